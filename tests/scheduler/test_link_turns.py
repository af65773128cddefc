"""Threads that share a worker's link in turns: a lane wakes the owner's thread where it must, and
reads commands while that rests.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from inferd.backends import GraphModel, ModelSpec, load_model
from inferd.backends.tensors import TENSOR_TYPES, Tensor
from inferd.scheduler import messages as m
from inferd.scheduler.call_thread import CallResult
from inferd.scheduler.engine.tensor_engine import Lane, TensorEngine
from inferd.scheduler.record import WRITTEN_S
from inferd.scheduler.worker import LinkClosed, SocketLink, end_step, take_turn
from inferd.wire.frames import ANY_LENGTH, FrameReader, pack_frame
from tests.onnx_graphs import loop

SECONDS_MAX = 60
FOREVER, FOREVER_S = 1 << 62, 3600.0


class Shared:
    """A link whose turn the test has, until the owner's thread waits in `wait`."""

    def __init__(self) -> None:
        ours, self.daemon = socket.socketpair()
        self.daemon.settimeout(SECONDS_MAX)
        self.link, self.turn = SocketLink(ours), threading.Lock()
        self.turn.acquire()
        self.link.share(self.turn)
        self.received: list[list[m.Command]] = []
        self._ours, self._thread = ours, threading.Thread()
        self._frames = FrameReader(ANY_LENGTH)

    def wait(self, timeout_s: float | None, times: int = 1) -> None:
        """Begin waits of the owner's thread; return with the turn, when it is in the first one."""

        def receive() -> None:
            try:
                for _ in range(times):
                    self.received.append(self.link.receive_commands(timeout_s))
            except LinkClosed:
                pass

        self._thread = threading.Thread(target=receive)
        self._thread.start()
        self.turn.acquire()

    def join(self) -> list[list[m.Command]]:
        """Return what the owner's thread has received, at its end."""
        self._thread.join(SECONDS_MAX)
        assert not self._thread.is_alive(), "nothing has woken it"
        return self.received

    def receive_reports(self) -> list[m.Report]:
        """Return the reports of the next frame."""
        while True:
            for frame in self._frames.read_frames(self.daemon.recv(1 << 16)):
                return msgspec.msgpack.decode(frame, type=list[m.Report])

    def close(self) -> None:
        self.daemon.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self.daemon.close()
        self._ours.close()


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("wait_s", "due_s", "is_woken"),
    [
        (None, 3600.0, True),
        (7200.0, 3600.0, True),
        (None, 0.0, True),
        (None, None, False),
        (3600.0, 7200.0, False),
        (3600.0, None, False),
    ],
)
def test_the_owners_thread_is_woken_if_something_is_due_before_its_wait_ends(
    shared: Shared, wait_s: float | None, due_s: float | None, is_woken: bool
) -> None:
    shared.wait(wait_s)
    shared.link.wake(due_s)
    assert bool(select.select([shared.link._woken], [], [], 0)[0]) == is_woken
    shared.turn.release()
    if not is_woken:
        shared.daemon.sendall(pack_frame([m.Queue(1)]))
    assert shared.join() == [[] if is_woken else [m.Queue(1)]]


def test_a_link_knows_whether_there_are_commands_to_read(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = shared.link
    assert not link.has_arrived()
    shared.daemon.sendall(pack_frame([m.Queue(1)]))
    assert link.has_arrived()
    assert link.receive_commands(0) == [m.Queue(1)]
    assert not link.has_arrived()
    link.channels = link.new_channels(())
    assert not link.has_arrived()
    monkeypatch.setattr(type(link.channels), "has_backlog", True)
    assert link.has_arrived(), "a channel's frames were read and not handled"


def test_the_owners_thread_sends_the_rest_of_a_lanes_reports(shared: Shared) -> None:
    shared.wait(None, times=1000)
    large = m.CommandResult(1, bytes(16 << 20))
    shared.link.send_reports([large])
    shared.link.wake(None)
    shared.turn.release()
    assert shared.receive_reports() == [large]


def test_while_the_owners_thread_rests_another_one_reads_commands(shared: Shared) -> None:
    shared.link.rest_for(FOREVER_S)
    shared.wait(None)
    shared.daemon.sendall(pack_frame([m.Queue(1)]))
    shared.turn.release()
    time.sleep(0.1)  # without a rest, the owner's thread reads it
    with shared.turn:
        assert shared.link.rests and shared.link.receive_commands(0) == [m.Queue(1)]
        assert shared.received == []
        shared.link.rest_for(0.0)
        shared.daemon.sendall(pack_frame([m.Queue(2)]))
    assert shared.join() == [[m.Queue(2)]]


def test_a_rest_that_is_ended_is_over_at_once(shared: Shared) -> None:
    shared.link.rest_for(FOREVER_S)
    shared.wait(None)
    shared.daemon.sendall(pack_frame([m.Queue(1)]))
    shared.link.rest_for(0.0)
    shared.turn.release()
    assert shared.join() == [[m.Queue(1)]]


def test_a_rest_ends_after_its_time(shared: Shared) -> None:
    shared.link.rest_for(0.05)
    shared.wait(None)
    shared.daemon.sendall(pack_frame([m.Queue(1)]))
    shared.turn.release()
    assert shared.join() == [[m.Queue(1)]]


def test_a_rest_ends_for_what_is_due_earlier(shared: Shared) -> None:
    shared.link.rest_for(FOREVER_S)
    shared.wait(None)
    shared.link.wake(5.0)
    shared.turn.release()
    assert shared.join() == [[]]


def test_nobody_rests_while_reports_wait_for_the_daemon(shared: Shared) -> None:
    shared.link.send_reports([m.CommandResult(1, bytes(16 << 20))])
    shared.link.rest_for(FOREVER_S)
    assert not shared.link.rests


def test_what_a_lane_has_read_is_not_handled_by_the_owners_thread(shared: Shared) -> None:
    shared.wait(None)
    shared.daemon.sendall(pack_frame([m.Queue(1)]))
    time.sleep(0.1)  # the owner's thread has seen that the socket is readable, and wants the turn
    assert shared.link.receive_commands(0) == [m.Queue(1)]
    shared.turn.release()
    time.sleep(0.1)  # it waits again
    shared.daemon.sendall(pack_frame([m.Queue(2)]))
    assert shared.join() == [[m.Queue(2)]]


def new_engine(folder: Path, clock: list[float]) -> TensorEngine:
    (folder / "loop.onnx").write_bytes(loop())
    spec = ModelSpec(name="loop", backend="onnx", path=str(folder / "loop.onnx"), threads=1)
    model = cast(GraphModel, load_model(spec, lambda _: True))
    return TensorEngine(model, spec, lambda: clock[0])


def computation_for_ever() -> m.ComputeTensors:
    x = Tensor(struct.pack("f", 1), (1,), TENSOR_TYPES["fp32"])
    times = Tensor(struct.pack("q", FOREVER), (), TENSOR_TYPES["i64"])
    return m.ComputeTensors(1, [("x", x), ("times", times)])


def test_the_owners_thread_spins_only_while_no_lane_computes(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    def note_and_poll(poll: Callable[[float | None], Any], timeout: float | None) -> Any:
        waits.append(timeout)
        return poll(timeout)

    monkeypatch.setattr(shared.link._spinning, "poll", note_and_poll)
    engine = new_engine(tmp_path, [0.0])
    engine.start()
    commands: list[m.Command] = [m.Queue(1), computation_for_ever()]
    for number, command in enumerate(commands):
        end_step(shared.link, engine, engine.advance([command]))
        shared.wait(None)
        shared.turn.release()
        shared.daemon.sendall(pack_frame([m.Queue(2)]))
        assert shared.join() == [[m.Queue(2)]] * (number + 1)
    assert engine.is_computing and waits == [None]
    engine.close()


def test_the_owners_thread_is_woken_again_after_a_failure(shared: Shared, tmp_path: Path) -> None:
    engine = new_engine(tmp_path, [0.0])
    engine.failure = ValueError("a bug")
    shared.link.rest_for(FOREVER_S)
    shared.wait(None)
    shared.turn.release()
    lane = Lane(0, lambda lane, result: False, time.monotonic)
    assert not take_turn(shared.link, engine, shared.turn, lane, CallResult(None, 0.0))
    assert shared.join() == [[]]


def test_a_lane_that_takes_the_turn_reports_and_wakes_the_owners_thread(
    shared: Shared, tmp_path: Path
) -> None:
    clock = [0.0]
    engine = new_engine(tmp_path, clock)
    engine.start()
    shared.link.wake_on(engine.fileno())
    engine.take_turn = partial(take_turn, shared.link, engine, shared.turn)
    engine.advance([computation_for_ever()])
    clock[0] = 2 * WRITTEN_S
    engine.advance([])
    assert engine.wait_s_max() is None
    shared.wait(None)
    shared.turn.release()
    engine.cancel_running()
    [refused] = shared.receive_reports()
    assert isinstance(refused, m.Refused) and refused.error["name"] == "Cancelled"
    assert shared.join() == [[]], "the metrics are due"
    assert engine.wait_s_max() == WRITTEN_S
    engine.close()
