"""`inferd wasm run` with guests in C, which make the calls of WasmEdge's example programs, and with
a component: limits and ends.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from wasmtime import wat2wasm

from inferd import Client
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd, inferd_process, on_terminal
from tests.echo import echo_model
from tests.gateways.wasm.guests import c_guest
from tests.waiting import wait_until

CONFIG = echo_model("slow", step_ms=20) + echo_model("slower", step_ms=200)
LONG = "and so on " * 100
COMPONENT = str(Path(__file__).parent / "guests" / "command.wat")
END_S_MAX = 60.0


@pytest.fixture(scope="module")
def guest() -> str:
    return str(c_guest())


@contextmanager
def wasm_run(
    daemon: RunningDaemon, *arguments: str, **more: Any
) -> Iterator[subprocess.Popen[bytes]]:
    process = inferd_process("wasm", "run", *arguments, socket=daemon.socket, **more)
    with process:
        try:
            yield process
        finally:
            process.kill()


def finished(daemon: RunningDaemon, *arguments: str, text: str = "") -> tuple[int, str, str]:
    """Return the exit status, the output and the messages of a guest."""
    with wasm_run(daemon, *arguments, stdin=subprocess.PIPE) as process:
        output, errors = process.communicate(text.encode(), timeout=END_S_MAX)
    return process.returncode, output.decode(), errors.decode()


# The calls of WasmEdge's example programs.


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("stream", "echo", "What is up?"), "What is up?\n13 12\n"),
        (("stream", "echo", "grand", '{"ctx-size":9}'), "gr\nContext full.\n7 2\n"),
        (("stream", "echo", "much too long", '{"ctx-size":9}'), "\nPrompt too long.\n15 0\n"),
        (("basic", "echo", "grüß dich"), "[grüß dich]\n"),
        (("unload", "echo", "hi"), "".join(f"{i} hi\n" for i in range(5))),
        (("twice", "echo", "hello"), "7\n7\n"),
        (("embedding", "echo", "one", "two"), "16\n16\n"),
        (("rpc", "echo", "hello there"), "hello\n13 5\n"),
        (("builder", "echo", "hello"), "hel\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_guests_of_each_kind_run(
    arguments: tuple[str, ...], output: str, daemon: RunningDaemon, guest: str
) -> None:
    assert finished(daemon, guest, "--", *arguments) == (0, output, "")


def test_a_guest_has_a_label(daemon: RunningDaemon, guest: str, client: Client) -> None:
    with wasm_run(daemon, "--label", "guest-1", guest, "--", "stream", "slower", LONG):
        tasks = wait_until(client.queue)
        assert [task["label"] for task in tasks] == ["guest-1"]
        assert [session["label"] for session in client.sessions()] == ["guest-1"]
    status, _, errors = finished(daemon, "--label", "a b", guest, "--", "stream", "echo", "hi")
    assert status == 1 and "the label 'a b'" in errors


def test_a_guest_reads_its_input_turn_by_turn(daemon: RunningDaemon, guest: str) -> None:
    status, output, errors = finished(
        daemon, guest, "--", "interactive", "echo", text="first\nsecond\n"
    )
    assert (status, errors) == (0, "")
    assert output == "? first\n? second\n? "


def test_a_guest_has_a_conversation_on_a_terminal(daemon: RunningDaemon, guest: str) -> None:
    with on_terminal(
        "wasm", "run", guest, "--", "interactive", "echo", socket=daemon.socket
    ) as terminal:
        for line in ("first", "second"):
            terminal.until("? ")
            terminal.type(f"{line}\n")
            terminal.until(f"{line}\r\n{line}")
        terminal.until("? ")
        terminal.interrupt()
        assert terminal.process.wait(END_S_MAX) == 130


def test_an_error_of_a_call_is_printed_and_the_guest_gets_its_number(
    daemon: RunningDaemon, guest: str
) -> None:
    status, output, errors = finished(daemon, guest, "--", "stream", "ecko", "x")
    assert (status, output) == (10 + 103, "")
    assert errors.startswith("inferd: load_by_name: there is no model 'ecko'")
    assert "did you mean 'echo'" in errors and errors.endswith("load: error 103\n")


def test_preloads_name_the_guests_models(daemon: RunningDaemon, guest: str) -> None:
    preload = ("--nn-preload", "default:GGML:AUTO:echo")
    assert finished(daemon, *preload, guest, "twice", "default", "x") == (0, "3\n3\n", "")
    status, _, errors = finished(daemon, *preload, guest, "twice", "echo", "x")
    assert status == 10 + 8 and "may not load 'echo'" in errors


def test_allowed_models_are_loaded_by_their_own_names(daemon: RunningDaemon, guest: str) -> None:
    allow = ("--allow-model", "echo", "--nn-preload", "default:GGML:AUTO:slow")
    for name in ("echo", "default"):
        assert finished(daemon, *allow, guest, "twice", name, "x") == (0, "3\n3\n", "")
    status, _, errors = finished(daemon, *allow, guest, "twice", "slow", "x")
    assert status == 10 + 8 and "its names are 'echo', 'default'" in errors


def test_arguments_environment_and_directories_are_the_guests(
    daemon: RunningDaemon, guest: str, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text("a note\n")
    options = ["--env", "COLOUR=blue", "--dir", f"/data:{tmp_path}"]
    status, output, _ = finished(daemon, *options, guest, "--", "-a", "--json")
    assert (status, output) == (0, "-a --json blue\na note\nwritten\n")
    options[-1] += ":readonly"
    assert finished(daemon, *options, guest)[1] == "blue\na note\nnot written\n"
    assert finished(daemon, guest)[1] == "-\nnot written\n"


# Ends.


@pytest.mark.parametrize("way", ["exit", "trap"])
def test_a_guest_that_leaves_its_turn_behind_leaves_nothing_in_the_daemon(
    way: str, daemon: RunningDaemon, guest: str, client: Client
) -> None:
    status, output, errors = finished(daemon, guest, "--", "leave", "slow", LONG, way)
    assert output == "leaving\n"
    assert status == (7 if way == "exit" else 1)
    assert way == "exit" or errors == (
        "inferd: the guest trapped: wasm trap: wasm `unreachable` instruction executed\n"
        "  the error is in the guest\n"
    )
    wait_until_nothing_is_left(client)


def wait_until_nothing_is_left(client: Client) -> None:
    deadline = time.monotonic() + END_S_MAX
    while client.sessions() or client.queue():
        assert time.monotonic() < deadline


def test_a_killed_guest_leaves_nothing_in_the_daemon(
    daemon: RunningDaemon, guest: str, client: Client
) -> None:
    with wasm_run(daemon, guest, "--", "leave", "slow", LONG, "compute") as process:
        wait_for_output(process)
        process.kill()
        process.wait()
        wait_until_nothing_is_left(client)


def wait_for_output(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"leaving\n"


WAYS = ("loop", "sleep", "read", "compute")


def test_a_timeout_ends_guests_wherever_they_are(
    daemon: RunningDaemon, guest: str, client: Client
) -> None:
    begun = time.monotonic()
    with ExitStack() as stack:
        processes = []
        for way in WAYS:
            arguments = ("--timeout", "3", guest, "--", "leave", "slow", LONG, way)
            run = wasm_run(daemon, *arguments, stdin=subprocess.PIPE)
            processes.append(stack.enter_context(run))
        for way, process in zip(WAYS, processes, strict=True):
            wait_for_output(process)
            assert process.stderr is not None
            assert process.stderr.read().decode() == (
                "inferd: the guest ran longer than 3 s\n  raise the guest's timeout\n"
            ), way
            assert process.wait(END_S_MAX) == 4, way
    assert 3 <= time.monotonic() - begun < 10
    wait_until_nothing_is_left(client)


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_a_guest_wherever_it_is(
    way: str, daemon: RunningDaemon, guest: str, client: Client
) -> None:
    arguments = (guest, "--", "leave", "slow", LONG, way)
    with wasm_run(daemon, *arguments, stdin=subprocess.PIPE) as process:
        wait_for_output(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S_MAX) == 130
        assert process.stderr is not None and process.stderr.read() == b""
    wait_until_nothing_is_left(client)


def table_of(folder: Path, elements: int) -> Path:
    path = folder / "table.wasm"
    path.write_bytes(wat2wasm(f'(module (table {elements} funcref) (func (export "_start")))'))
    return path


def test_memory_and_fuel_are_limited(daemon: RunningDaemon, guest: str, tmp_path: Path) -> None:
    limit = ("--memory-bytes", str(64 << 20))
    status, output, _ = finished(daemon, *limit, guest, "--", "grow")
    assert status == 0 and 16 <= int(output.split()[0]) < 64
    status, _, errors = finished(daemon, "--memory-bytes", "65536", guest, "--", "grow")
    assert status == 1 and "cannot be started" in errors
    status, _, errors = finished(daemon, *limit, str(table_of(tmp_path, 64 << 20)))
    assert status == 1 and "cannot be started" in errors
    arguments = ("--fuel", "10000000", guest, "--", "leave", "echo", "x", "loop")
    status, output, errors = finished(daemon, *arguments)
    assert (status, output) == (1, "leaving\n") and "raise --fuel" in errors


# Components.


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        (("answer", "echo", "grüß dich", "", " again"), (0, "grüß dich again", "")),
        (("exit",), (1, "leaving\n", "")),
        (("fail",), (1, "leaving\n", "")),
        (("trap",), (1, "leaving\n", "`unreachable` instruction executed\n")),
        (("wait", "slow", "x"), (0, "leaving\nx", "")),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
@pytest.mark.parametrize("form", ["text", "binary"])
def test_components_run(
    form: str,
    arguments: tuple[str, ...],
    ending: tuple[int, str, str],
    daemon: RunningDaemon,
    client: Client,
    tmp_path: Path,
) -> None:
    path = Path(COMPONENT)
    if form == "binary":
        path = tmp_path / "guest.wasm"
        path.write_bytes(wat2wasm(Path(COMPONENT).read_text()))
    status, output, errors = finished(daemon, str(path), "--", *arguments)
    assert (status, output) == ending[:2] and ending[2] in errors
    assert bool(errors) == bool(ending[2])
    wait_until_nothing_is_left(client)


def test_an_error_of_a_component_is_printed_and_the_guest_reads_it(daemon: RunningDaemon) -> None:
    status, output, errors = finished(daemon, COMPONENT, "--", "answer", "ecko", "x")
    error = json.loads(output)
    assert (status, error["name"]) == (1, "ModelNotFound") and "'echo'" in error["hint"]
    assert errors.startswith("inferd: load-by-name: there is no model 'ecko'")


def test_the_options_hold_for_components(daemon: RunningDaemon, client: Client) -> None:
    preload = ("--nn-preload", "default:GGML:AUTO:echo")
    assert finished(daemon, *preload, COMPONENT, "answer", "default", "x") == (0, "x", "")
    status, output, _ = finished(daemon, *preload, COMPONENT, "answer", "echo", "x")
    assert status == 1 and json.loads(output)["name"] == "NotFound"
    for limit, more in (("--fuel", "raise --fuel"), ("--memory-bytes", "cannot be started")):
        status, _, errors = finished(daemon, limit, "65536", COMPONENT, "loop")
        assert status == 1 and more in errors
    assert finished(daemon, "--memory-bytes", "262144", COMPONENT, "answer", "echo", "x")[0] == 0
    with wasm_run(
        daemon, "--label", "guest-1", "--priority", "low", COMPONENT, "wait", "slower", LONG
    ):
        tasks = wait_until(client.queue)
        assert [(task["label"], task["priority"]) for task in tasks] == [("guest-1", "low")]
    wait_until_nothing_is_left(client)


@pytest.mark.parametrize("way", ["loop", "wait"])
@pytest.mark.parametrize("end", ["timeout", "ctrl-c", "kill"])
def test_a_component_is_ended_wherever_it_is(
    end: str, way: str, daemon: RunningDaemon, client: Client
) -> None:
    options = ("--timeout", "3") if end == "timeout" else ()
    with wasm_run(daemon, *options, COMPONENT, "--", way, "slow", LONG) as process:
        wait_for_output(process)
        if end != "timeout":
            process.send_signal(signal.SIGINT if end == "ctrl-c" else signal.SIGKILL)
        _, errors = process.communicate(timeout=END_S_MAX)
    assert process.returncode == {"timeout": 4, "ctrl-c": 130, "kill": -signal.SIGKILL}[end]
    assert errors.decode() == (
        "inferd: the guest ran longer than 3 s\n  raise the guest's timeout\n"
        if end == "timeout" else ""
    )  # fmt: skip
    wait_until_nothing_is_left(client)


# Wrong files and options.

NO_START = '(module (memory (export "memory") 1))'
STRANGE = '(module (import "env" "f" (func)) (func (export "_start")))'
OTHER_EXPORT = '(component (instance $i) (export "wasi:cli/runner@0.2.0" (instance $i)))'
STRANGE_COMPONENT = """(component
  (import "wasi:http/types@0.2.0" (instance (export "f" (func))))
  (instance $i) (export "wasi:cli/run@0.2.0" (instance $i)))"""


def test_a_missing_guest_is_reported_before_a_missing_daemon(tmp_path: Path) -> None:
    for name, reason in (("guest.wasm", "No such file"), (".", "Is a directory")):
        result = inferd("wasm", "run", "--socket", str(tmp_path / "none"), str(tmp_path / name))
        assert result.exit_code == 1 and f"cannot be read: {reason}" in result.stderr


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file"),
        (b"\x7fELF", "is not a WebAssembly program"),
        (b"", "is not a WebAssembly program"),
        (b"\0asm", "is not a WebAssembly program"),
        (b"\0asm\x0d\0\1\0\xff", "is not a WebAssembly program"),
        (b"(component) )", "is not a WebAssembly program"),
        (bytes(wat2wasm("(component)")), "does not export wasi:cli/run"),
        (OTHER_EXPORT.encode(), "does not export wasi:cli/run"),
        (bytes(wat2wasm(NO_START)), "has no function _start"),
        (bytes(wat2wasm(STRANGE)), "unknown import: `env::f`"),
        (STRANGE_COMPONENT.encode(), "`wasi:http/types@0.2.0`"),
    ],
)
def test_another_file_than_a_program_is_refused(
    content: bytes | None, sentence: str, daemon: RunningDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "guest.wasm"
    if content is not None:
        path.write_bytes(content)
    status, output, errors = finished(daemon, str(path))
    assert (status, output) == (1, "") and sentence in errors, errors
    assert errors.startswith("inferd: ") and errors.count("\n") == 2


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (("--nn-preload", "x"), 1, "'x' is not a preload"),
        (("--env", "x"), 2, "not of the form NAME=VALUE"),
        (("--dialect", "wasm4"), 2, "'wasm4' is not one of"),
        (("--dir", "/nonexistent"), 1, "the directory /nonexistent cannot be opened"),
        (("--socket", "/nonexistent.sock"), 3, "no daemon answers"),
    ],
)
def test_wrong_options_are_refused(
    options: tuple[str, ...], status: int, sentence: str, daemon: RunningDaemon, guest: str
) -> None:
    found = finished(daemon, *options, guest)
    assert found[:2] == (status, "") and sentence in found[2]


def test_without_wasmtime_the_error_names_the_extra(daemon: RunningDaemon) -> None:
    main = "import sys\nsys.modules['wasmtime'] = None\nfrom inferd.cli import main\nmain()"
    with wasm_run(daemon, "x.wasm", main=main) as process:
        _, errors = process.communicate(timeout=END_S_MAX)
    assert process.returncode == 1
    assert b"guests run in wasmtime; wasmtime is missing" in errors and b"[wasm]" in errors


def test_other_commands_do_not_import_wasmtime(daemon: RunningDaemon) -> None:
    code = (
        "import sys\nfrom inferd.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'wasmtime' not in sys.modules"
    )
    for arguments in (("ps",), ("--help",), ("wasm", "run", "--help")):
        with inferd_process(*arguments, socket=daemon.socket, main=code) as process:
            _, errors = process.communicate(timeout=END_S_MAX)
        assert (process.returncode, errors) == (0, b"")
