"""The C client against a real daemon, as programs with sanitizers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.ir_graphs import write_ir
from tests.onnx_graphs import affine, write_graphs
from tests.tiny_gguf import write_split
from tests.waiting import wait_until

from .build import ADDRESS, CLIENT, HERE, THREAD, build, scenarios
from .conftest import MODELS

PROGRAM = "client_host"
WITH_A_PARTNER = (
    "a_killed_daemon_fails_the_calls_under_way_and_all_later_ones",
    "vanishes_during_a_turn",
)
SPLIT = "a_split_model_is_loaded_by_the_path_of_a_part"
GRAPHS = "graphs_are_loaded_from_one_builder_or_two"
WITH_THEIR_OWN_TESTS = (*WITH_A_PARTNER, SPLIT, GRAPHS)
THREADED = (
    "threads_share_a_client",
    "another_thread_cancels_a_call_that_waits",
    "a_client_is_closed_once_while_other_threads_use_it",
)


def run(daemon: RunningDaemon, sanitizers: str, scenario: str, **environment: str) -> None:
    done = subprocess.run(
        [str(build(sanitizers) / PROGRAM), scenario],
        env={**daemon.environment, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def wait_until_nothing_is_left(daemon: RunningDaemon) -> None:
    """Wait until the daemon has noticed the end of a program's connection."""
    with Client(daemon.socket) as client:
        wait_until(lambda: not (client.queue() or client.sessions()))
        assert client.sessions(dormant=True) == []


@pytest.mark.parametrize(
    "scenario", [s for s in scenarios(PROGRAM) if s not in WITH_THEIR_OWN_TESTS]
)
def test_a_c_program(daemon: RunningDaemon, tiny: Path, scenario: str) -> None:
    run(daemon, ADDRESS, scenario, MODEL_FILE=str(tiny))
    wait_until_nothing_is_left(daemon)


def test_a_c_program_loads_a_split_model(tmp_path: Path) -> None:
    for part in write_split(tmp_path, "split"):
        with running_daemon(models_dir=tmp_path) as daemon:
            run(daemon, ADDRESS, SPLIT, PART_FILE=str(part))


def test_a_c_program_loads_graphs_from_their_bytes(daemon: RunningDaemon, tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    write_graphs(tmp_path, {"g": affine()})
    ends = {"XML_FILE": "xml", "WEIGHTS_FILE": "bin", "ONNX_FILE": "onnx"}
    files = {name: str(tmp_path / f"g.{end}") for name, end in ends.items()}
    run(daemon, ADDRESS, GRAPHS, **files)
    wait_until_nothing_is_left(daemon)


@pytest.mark.parametrize("scenario", THREADED)
def test_threads_of_a_c_program_do_not_race(daemon: RunningDaemon, scenario: str) -> None:
    run(daemon, THREAD, scenario)


def test_each_function_of_the_header_is_called_with_a_wrong_client() -> None:
    header, source = (CLIENT / "inferd.h").read_text(), (HERE / f"{PROGRAM}.c").read_text()
    declared = set(re.findall(r"^\w+ (inferd_\w+)\((?:const )?inferd_client \*", header, re.M))
    assert declared == set(re.findall(r"(inferd_\w+)\(wrong", source))
    assert len(declared) == 27


def test_a_program_finds_the_socket_of_the_user(daemon: RunningDaemon, tmp_path: Path) -> None:
    (tmp_path / "inferd").mkdir()
    (tmp_path / "inferd" / "inferd.sock").symlink_to(daemon.socket)
    scenario = "computes_a_turn_and_closes_everything"
    run(daemon, ADDRESS, scenario, INFERD_SOCKET="", XDG_RUNTIME_DIR=str(tmp_path))


def test_a_program_that_vanishes_leaves_nothing_behind(daemon: RunningDaemon) -> None:
    run(daemon, ADDRESS, "vanishes_during_a_turn")
    wait_until_nothing_is_left(daemon)


def test_a_killed_daemon_fails_the_calls_of_a_c_program() -> None:
    with running_daemon(MODELS) as daemon:
        program = subprocess.Popen(
            [str(build(ADDRESS) / PROGRAM), WITH_A_PARTNER[0]],
            env=daemon.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with program:
            assert program.stdout and program.stderr
            assert program.stdout.readline() == b"running\n"
            daemon.kill()
            assert program.wait(30) == 0, program.stderr.read().decode()
