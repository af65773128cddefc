"""Graphs under callers of two users while processes are killed, files swapped, inputs crash and
calls are cancelled: no call is lost, and no output reaches another caller.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from inferd import Cancelled, Client, ConnectionLost, ShuttingDown, WorkerCrashed
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.graph_calls import state_of
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.onnx_graphs import affine, division, loop, write_graphs
from tests.raw import RawClient
from tests.repetitions import repetitions
from tests.waiting import wait_until

USERS, CALLERS = (ADA, BOB), 3
"""The users, and the programs of each."""
CALLS = 5
"""The calls of each program that end between two faults."""
MARK = 1 << 18
"""The distance of the numbers of two programs; all results are whole numbers that fp32 has."""
FOREVER = 1 << 62
RUNNING, WAITING = "computations_running", "computations_waiting"
CORES, FLOOD = 2, 12
"""The calls of a flood, one of which runs; the others wait, as one of another user does."""
LARGE = 9 << 20
"""More bytes than a frame takes."""


class Program(threading.Thread):
    """A program of a user, which computes one input after the other on the model `shared`."""

    def __init__(self, raw: RawClient, number: int, over: threading.Event):
        super().__init__()
        self.calls = 0
        self.factors: list[float] = []
        """The factors of the graphs that have computed, in their order, without repetitions."""
        self.failure: BaseException | None = None
        self._raw, self._first, self._over = raw, number * MARK, over
        self._context = raw.context("shared")

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._call(self._first + self.calls, 1 + self.calls % 3)
                self.calls += 1
        except BaseException as exc:  # for the test to raise
            self.failure = exc

    def _call(self, number: int, rows: int) -> None:
        values = np.arange(2 * rows, dtype=np.float32) + number
        tensor = {"dimensions": [rows, 2], "type": "fp32"}
        given = {"a": values, "b": np.full(2 * rows, 5, np.float32)}
        inputs = [[name, tensor | {"data": array.tobytes()}] for name, array in given.items()]
        [[name, output]] = self._raw.call("compute", context=self._context, inputs=inputs)[
            "outputs"
        ]
        found = np.frombuffer(output["data"], np.float32)
        factor = float((found[-1] - 5) / values[-1]) if values[-1] else 2.0
        assert (name, output["dimensions"]) == ("y", [rows, 2])
        assert np.array_equal(found, factor * values + 5), (number, found)
        if not self.factors or self.factors[-1] != factor:
            self.factors.append(factor)


@contextmanager
def computing(daemon: RunningDaemon) -> Iterator[Sequence[Program]]:
    """Let the programs of both users compute during the body."""
    over = threading.Event()
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(daemon, user)) for user in USERS * CALLERS]
        programs = [Program(raw, 1 + number, over) for number, raw in enumerate(clients)]
        for program in programs:
            program.start()
            stack.callback(program.join)
        stack.callback(over.set)
        yield programs
    for program in programs:
        if program.failure is not None:
            raise program.failure


def await_calls(programs: Sequence[Program], count: int = CALLS) -> None:
    """Wait until each program has made some more calls, or one has failed."""
    before = [program.calls for program in programs]
    wait_until(
        lambda: (
            any(program.failure for program in programs)
            or all(p.calls >= b + count for p, b in zip(programs, before, strict=True))
        )
    )


@contextmanager
def shared(folder: Path) -> Iterator[RunningDaemon]:
    """Run a daemon of all users with the graphs `shared` and `next`, 2·a + b and 3·a + b."""
    write_graphs(folder, {"shared": affine(), "next": affine(3)})
    tables = [
        f"[models.{name}]\nfile = {json.dumps(str(folder / f'{name}.onnx'))}\n"
        for name in ("shared", "next")
    ]
    with daemon_for_all(f"cores = {CORES}\n" + "".join(tables)) as daemon:
        yield daemon


def live_pid(client: Client, model: str) -> int:
    """Wait until a model has a process, and return its id."""
    return wait_until(lambda: int(state_of(client, model)["pid"]))


@pytest.mark.timeout(300)
def test_no_call_of_two_users_is_lost_while_processes_of_their_graph_are_killed(
    tmp_path: Path,
) -> None:
    with shared(tmp_path) as daemon, Client(daemon.socket) as client:
        pids = set()
        with computing(daemon) as programs:
            for _ in range(repetitions(4)):
                await_calls(programs)
                pids.add(pid := live_pid(client, "shared"))
                os.kill(pid, signal.SIGKILL)
            await_calls(programs)
        assert live_pid(client, "shared") not in pids and len(pids) >= 4
        assert {factor for program in programs for factor in program.factors} == {2}
        assert [one["tasks"] for one in client.models() if one["name"] == "shared"] == [0]


@pytest.mark.timeout(300)
def test_no_call_of_two_users_is_lost_in_swaps_of_their_graph(tmp_path: Path) -> None:
    with shared(tmp_path) as daemon, Client(daemon.socket) as client:
        with computing(daemon) as programs:
            for to in ("next", "shared") * repetitions(3):
                await_calls(programs)
                client.swap("shared", to)
            await_calls(programs)
        for program in programs:  # a swap is the same instant for all calls of a program
            assert program.factors == [2.0, 3.0] * repetitions(3) + [2.0]


def looped(times: int) -> list[list[Any]]:
    x = {"data": struct.pack("f", 1), "dimensions": [1], "type": "fp32"}
    return [["x", x], ["times", {"data": struct.pack("q", times), "dimensions": [], "type": "i64"}]]


@pytest.mark.timeout(300)
def test_cancelled_floods_of_one_user_leave_nothing_and_another_user_is_served(
    tmp_path: Path,
) -> None:
    write_graphs(tmp_path, {"loop": loop()})
    file = json.dumps(str(tmp_path / "loop.onnx"))
    config = f"worker-hang-timeout-s = 60\n[models.loop]\nfile = {file}\nthreads = 1\n"
    with (
        daemon_for_all(config) as daemon,
        Client(daemon.socket) as client,
        client_of(daemon, ADA) as ada,
    ):
        context = ada.context("loop")
        pid, flooded = live_pid(client, "loop"), {RUNNING: 1, WAITING: FLOOD - 1}
        for is_closed in (False, True) * repetitions(2):
            with client_of(daemon, BOB) as bob:
                contexts = [bob.context("loop") for _ in range(FLOOD)]
                for _ in range(8):
                    numbers = [
                        bob.start_request("compute", context=one, inputs=looped(FOREVER))
                        for one in contexts
                    ]
                    wait_until(lambda: computations(client) == flooded)
                    if is_closed:
                        break
                    waiting = ada.start_request("compute", context=context, inputs=looped(2))
                    wait_until(lambda: computations(client) == {**flooded, WAITING: FLOOD})
                    for number in numbers:
                        assert bob.call("cancel", request=number)["cancelled"]
                    check_one(ada.wait_result(waiting))
                    for number in numbers:
                        with pytest.raises(Cancelled):
                            bob.wait_result(number)
            wait_until(lambda: not any(computations(client).values()))
        check_one(ada.call("compute", context=context, inputs=looped(2)))
        with client_of(daemon, BOB) as bob:
            assert bob.call("sessions")["sessions"] == [], "those of the flood have ended"
        assert live_pid(client, "loop") == pid


def check_one(result: dict[str, Any]) -> None:
    [[_, output]] = result["outputs"]
    assert output["data"] == struct.pack("f", 1)


def computations(client: Client) -> Mapping[str, int]:
    """Return the computations that run and wait, once the process has answered in time."""
    while "loop" not in (found := client.stats()["models"]):
        pass
    return {name: found["loop"][name] for name in (RUNNING, WAITING)}


def test_an_input_that_crashes_is_refused_to_its_user_alone(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"division": division()})
    config = f"[models.division]\nfile = {json.dumps(str(tmp_path / 'division.onnx'))}\n"

    def divide(raw: RawClient, context: int, a: int, b: int) -> int:
        given = {"a": a, "b": b}
        inputs = [
            [name, {"data": struct.pack("i", n), "dimensions": [1], "type": "i32"}]
            for name, n in given.items()
        ]
        [[_, output]] = raw.call("compute", context=context, inputs=inputs)["outputs"]
        return int(struct.unpack("i", output["data"])[0])

    with (
        daemon_for_all(config) as daemon,
        Client(daemon.socket) as client,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        contexts = {raw: raw.context("division") for raw in (ada, bob)}
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            divide(bob, contexts[bob], -(2**31), -1)
        assert divide(ada, contexts[ada], 9, 3) == 3
        pid = live_pid(client, "division")
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            divide(bob, contexts[bob], -(2**31), -1)  # without a process
        assert divide(bob, contexts[bob], -(2**31), 1) == -(2**31)
        assert live_pid(client, "division") == pid
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            divide(ada, contexts[ada], -(2**31), -1)  # which is computed: it is another user's
        assert divide(ada, contexts[ada], 8, 2) == 4
        assert live_pid(client, "division") != pid


@pytest.mark.timeout(300)
def test_programs_go_on_after_the_daemon_was_killed_and_no_process_stays(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine(), "loop": loop()})
    is_up, over = threading.Event(), threading.Event()
    done, failures = [0] * 4, list[BaseException]()
    is_up.set()

    def compute(daemon: RunningDaemon, number: int) -> None:
        rows = LARGE // 8 if number == 0 else 1 + number
        zeros = np.zeros((rows, 2), np.float32)
        with Client(daemon.socket, reconnect=True) as client, client.graph("affine") as graph:
            while not over.is_set():
                values = np.full((rows, 2), number * MARK + done[number], np.float32)
                is_up.wait()
                try:
                    found = graph.run({"a": values, "b": zeros})["y"]
                except (ConnectionLost, ShuttingDown):
                    continue
                assert np.array_equal(found, 2 * values)
                done[number] += 1

    def repeat(daemon: RunningDaemon, number: int) -> None:
        try:
            compute(daemon, number)
        except BaseException as exc:
            failures.append(exc)

    def await_all() -> None:
        """Wait until each program has computed twice, or one has failed."""
        before = list(done)
        wait_until(
            lambda: (
                bool(failures)
                or all(now >= then + 2 for now, then in zip(done, before, strict=True))
            )
        )

    with running_daemon(f"[daemon]\ncores = {CORES}\n", models_dir=tmp_path) as daemon:
        threads = [threading.Thread(target=repeat, args=(daemon, n)) for n in range(len(done))]
        for thread in threads:
            thread.start()
        try:
            for _ in range(repetitions(3)):
                await_all()
                workers = psutil.Process(daemon.pid).children(recursive=True)
                assert workers, "the graph has a process"
                is_up.clear()
                daemon.kill()
                alive = psutil.wait_procs(workers, timeout=60)[1]
                assert not alive, alive
                daemon.start_again()
                is_up.set()
            await_all()
        finally:
            is_up.set()
            over.set()
            for thread in threads:
                thread.join()
        assert failures == []
