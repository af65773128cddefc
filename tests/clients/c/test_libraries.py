"""The wasi-nn libraries in C hosts that open them with dlopen, against a real daemon."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.models import ONE_THREAD, short_smollm2
from tests.waiting import wait_until

from .build import ADDRESS, CLIENT, HERE, THREAD, build, compiler, scenarios

RUN_S_MAX = 120
RESTART = "a_load_after_a_restart_of_the_daemon_connects_again"
ENVIRONMENTS = {
    "the_environment_maps_names_to_models": {"INFERD_WASI_NN_MODELS": "default=echo,*=echo"},
    "the_environment_limits_the_names": {"INFERD_WASI_NN_MODELS": "other=echo,default=slow"},
    "a_turn_ends_at_the_timeout_of_the_environment": {"INFERD_WASI_NN_TIMEOUT_S": "0.05"},
    "a_full_conversation_goes_on": {"MODEL": "tiny"},  # echo reads the last message only
}
REMEMBERS = "a_session_remembers_its_turns"  # echo answers the last message only
REAL = (
    REMEMBERS,
    "models_load_with_flat_and_nested_configurations",
    "inference_answers",
    "runtime_parameters_hold_for_their_turn",
    "an_answer_is_the_same_for_the_same_seed",
)
THREADED = ("threads_share_a_backend", "a_backend_is_ended_once_while_other_threads_use_it")
LIBRARIES = {"wamr_host": "libwasi_nn_llamacpp.so", "backend_host": "libwasi_nn_backend.so"}
PARTS = "parts_host"  # linked with the client, without a library
SYMBOLS = {
    "libwasi_nn_llamacpp.so": {
        *("init_backend", "deinit_backend", "load", "load_by_name", "load_by_name_with_config"),
        *("init_execution_context", "set_input", "compute", "get_output"),
    },
    "libwasi_nn_backend.so": {
        *("init_backend", "init_backend_with_config", "deinit_backend", "load", "load_by_name"),
        *("load_by_name_with_config", "init_execution_context", "close_execution_context"),
        *("init_execution_context_with_session_id", "run_inference"),
        *("set_input", "compute", "get_output"),
    },
}
SCENARIOS = [
    (program, scenario)
    for program in LIBRARIES
    for scenario in scenarios(program)
    if scenario not in (RESTART, REMEMBERS)
]


def start(
    daemon: RunningDaemon, sanitizers: str, program: str, scenario: str, **environment: str
) -> subprocess.Popen[str]:
    folder = build(sanitizers)
    library = str(folder / LIBRARIES.get(program, ""))
    return subprocess.Popen(
        [str(folder / program), scenario],
        env={**daemon.environment, "MODEL": "echo", "LIBRARY": library, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    daemon: RunningDaemon, sanitizers: str, program: str, scenario: str, **environment: str
) -> str:
    """Run a scenario, and return the errors that the library has printed."""
    with start(daemon, sanitizers, program, scenario, **environment) as process:
        _, errors = process.communicate(timeout=RUN_S_MAX)
    assert process.returncode == 0, errors
    return errors


@pytest.mark.parametrize(("program", "scenario"), SCENARIOS)
def test_a_host(daemon: RunningDaemon, tiny: Path, program: str, scenario: str) -> None:
    environment = ENVIRONMENTS.get(scenario, {})
    run(daemon, ADDRESS, program, scenario, MODEL_FILE=str(tiny), **environment)
    with Client(daemon.socket) as client:
        # The daemon notices the end of the connection.
        wait_until(lambda: not (client.sessions() or client.queue()))


def test_a_host_prints_answers_with_stream_stdout(daemon: RunningDaemon) -> None:
    with start(daemon, ADDRESS, "wamr_host", "stream_stdout_prints_the_answers") as process:
        printed, errors = process.communicate(timeout=RUN_S_MAX)
    assert process.returncode == 0, errors
    assert printed == "printed,a "


@pytest.mark.parametrize("scenario", scenarios(PARTS))
def test_the_part_that_both_libraries_share(daemon: RunningDaemon, scenario: str) -> None:
    run(daemon, ADDRESS, PARTS, scenario)


@pytest.fixture(scope="module")
def real_daemon() -> Iterator[RunningDaemon]:
    with running_daemon(f'{ONE_THREAD}[models.smollm2]\nfile = "{short_smollm2()}"\n') as running:
        yield running


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", REAL)
def test_a_host_on_a_real_model(real_daemon: RunningDaemon, scenario: str) -> None:
    run(real_daemon, ADDRESS, "backend_host", scenario, MODEL="smollm2")


@pytest.mark.parametrize("program", LIBRARIES)
@pytest.mark.parametrize("scenario", THREADED)
def test_threads_of_a_host_do_not_race(daemon: RunningDaemon, program: str, scenario: str) -> None:
    run(daemon, THREAD, program, scenario)


@pytest.mark.parametrize("program", LIBRARIES)
def test_each_function_of_a_library_is_called_with_a_wrong_backend(program: str) -> None:
    called = set(re.findall(r"api\.(\w+)\(wrong", (HERE / f"{program}.c").read_text()))
    named = {"init": "init_backend", "deinit": "deinit_backend"}
    exported = SYMBOLS[LIBRARIES[program]] - {"init_backend", "init_backend_with_config"}
    assert {named.get(name, name) for name in called} == exported


@pytest.mark.parametrize("program", LIBRARIES)
def test_a_host_survives_a_killed_daemon(program: str) -> None:
    with (
        running_daemon() as daemon,
        start(daemon, ADDRESS, program, RESTART) as process,
    ):
        assert process.stdin and process.stdout and process.stderr
        for act in (daemon.kill, daemon.start_again):
            assert process.stdout.readline() == "now\n", process.stderr.read()
            act()
            process.stdin.write("\n")
            process.stdin.flush()
        _, errors = process.communicate(timeout=RUN_S_MAX)
        assert process.returncode == 0, errors
        assert "ConnectionLost" in errors and "(load the model again" in errors
        assert "the daemon has restarted" in errors


def test_an_error_is_printed_with_its_hint_unless_the_host_wants_silence(
    daemon: RunningDaemon,
) -> None:
    scenario = "wrong_arguments_have_wasmedges_numbers"
    errors = run(daemon, ADDRESS, "wamr_host", scenario)
    assert "inferd: load_by_name: ModelNotFound: " in errors
    assert "cannot open /?[2J?nothing.gguf: No such file or directory" in errors
    assert not run(daemon, ADDRESS, "wamr_host", scenario, INFERD_WASI_NN_QUIET="1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the libraries as users build them."""
    folder = tmp_path_factory.mktemp("plain")
    made = subprocess.run(
        ["make", "-s", "-C", str(CLIENT), f"BUILD={folder}", f"CC={compiler()}"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("library", SYMBOLS)
def test_a_library_exports_the_functions_of_its_dialect_only(plain: Path, library: str) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", str(plain / library)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.split()[0] for line in listed.stdout.splitlines()} == SYMBOLS[library]


EXPORTED = [
    f"{library}:{symbol}" for library, symbols in SYMBOLS.items() for symbol in sorted(symbols)
]


@pytest.mark.parametrize("name", EXPORTED)
def test_a_function(plain: Path, name: str) -> None:
    library, _, symbol = name.partition(":")
    assert callable(getattr(ctypes.CDLL(str(plain / library)), symbol))
