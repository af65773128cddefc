"""Channels of clients to the process of a graph: frames, bounds, ends, reports, hostile ends."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.fd_frames import SCM_MAX_FD
from inferd.backends.tensors import TENSOR_TYPES, Tensor
from inferd.scheduler import channels as channels_module
from inferd.scheduler import messages as m
from inferd.scheduler.channels import (
    CHANNEL_BYTES_MAX,
    READ_BYTES,
    REPORT_S,
    REQUESTS_MAX,
    Channels,
    channel_of,
)
from inferd.scheduler.owner import Owner, Priority
from inferd.scheduler.worker import LinkClosed, SocketLink
from inferd.wire.channels import RANK_MAX, TENSORS_MAX
from inferd.wire.frames import ANY_LENGTH, FRAME_BYTES_MAX, REPLY_BYTES_MAX, FrameReader, pack_frame

REPLY, ERROR, GOODBYE = 2, 3, 6
FP32 = TENSOR_TYPES["fp32"]
ONE: dict[str, Any] = {"data": struct.pack("f", 1), "dimensions": [1], "type": "fp32"}
SO_PASSCRED, SO_PASSPIDFD = 16, 76
REFUSAL = InvalidArgument("no").to_wire()
SEED = 20261202


def pidfds() -> list[str]:
    """Return the descriptors of processes that this one has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in found if "pidfd" in target]


class Peer:
    """The client's end of a channel. *kept* is a duplicate of the end that the process has."""

    def __init__(self, sock: socket.socket, kept: socket.socket):
        self.sock, self.kept = sock, kept
        sock.setblocking(False)
        self._frames = FrameReader(ANY_LENGTH)
        self._messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.sock.sendall(pack_frame(message))

    def compute(self, number: int, tensor: Any = ONE, **params: Any) -> None:
        self.send([1, number, "compute", {"inputs": [["x", tensor]], **params}])

    def send_some(self, data: bytes) -> bytes:
        """Send as much as the socket accepts, and return the rest."""
        try:
            while data:
                data = data[self.sock.send(data) :]
        except BlockingIOError:
            pass
        return data

    def receive(self) -> list[Any]:
        """Return the messages that have arrived; the last one is None at the end."""
        found, ended = list[Any](), False
        try:
            while data := self.sock.recv(1 << 20):
                found += map(msgspec.msgpack.decode, self._frames.read_frames(data))
            ended = True
        except BlockingIOError:
            pass
        return [*found, None] if ended else found

    def close(self) -> None:
        self.sock.close()
        self.kept.close()


class Bench:
    """Channels on a clock of its own, whose *reports* were sent at once."""

    def __init__(self) -> None:
        self.now, self.reports = 0.0, list[m.Report]()
        self.busy_s = 0.0
        self.poll = select.epoll()
        self.channels = Channels(self.poll, self.reports.extend, ["x", "y"], lambda: self.now)
        self._peers: list[Peer] = []

    def open(self, number: int = 1, user: int = 1, *classes: Priority) -> Peer:
        ours, theirs = socket.socketpair()
        peer = Peer(ours, theirs.dup())
        self._peers.append(peer)
        usual, most = classes or (Priority.NORMAL, Priority.URGENT)
        fd = theirs.detach()
        self.channels.open_channel(m.OpenChannel(number, Owner(user), usual, most, fd))
        return peer

    def read(self) -> list[m.Command]:
        """Return the commands of all data that may be read now."""
        commands = self.channels.read_round(self.poll.poll(0))
        while self.channels.due_in() == 0 and (more := self.channels.read_round(())):
            commands += more
        return commands

    def read_computation(self) -> m.ComputeTensors:
        [command] = self.read()
        assert isinstance(command, m.ComputeTensors)
        return command

    def answer(self, *requests: m.Command, size: int = 4) -> None:
        """Answer requests with outputs of *size* bytes."""
        output = "y", Tensor(bytes(size), (size // 4,), FP32)
        self.reports += self.channels.take_reports(
            m.CommandResult(request.id, m.ComputedTensors([output], 0.25))
            for request in requests
            if isinstance(request, m.ComputeTensors)
        )

    def uses(self) -> list[m.ChannelUse]:
        """Return the uses that were reported at once or are due."""
        reports = [*self.reports, *self.channels.take_reports([])]
        self.reports.clear()
        used = [report for report in reports if isinstance(report, m.ChannelsUsed)]
        self.busy_s += sum(report.busy_s for report in used)
        return [use for report in used for use in report.uses]

    def is_closed(self, number: int = 1) -> bool:
        return any(use.closed and use.channel == number for use in self.uses())

    def close(self) -> None:
        self.channels.close()
        for peer in self._peers:
            peer.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_inputs_go_to_the_engine_and_outputs_to_the_client(bench: Bench) -> None:
    peer = bench.open(7, 42)
    peer.compute(3, queue_timeout_s=2.5)
    request = bench.read_computation()
    assert request.inputs == [("x", Tensor(ONE["data"], (1,), FP32))]
    assert (request.requester.owner, request.wait_s) == (Owner(42), 2.5)
    assert channel_of(request.id) == 7
    bench.answer(request)
    output = {"data": bytes(4), "dimensions": [1], "type": FP32}
    assert peer.receive() == [[REPLY, 3, {"outputs": [["y", output]]}]]


def test_requests_of_several_channels_are_answered_in_any_order(bench: Bench) -> None:
    peers = [bench.open(number) for number in (1, 2)]
    for peer in peers:
        peer.compute(1)
        peer.compute(2)
    requests = bench.read()
    assert len({request.id for request in requests if isinstance(request, m.ComputeTensors)}) == 4
    bench.answer(*reversed(requests))
    for peer in peers:
        assert [message[:2] for message in peer.receive()] == [[REPLY, 2], [REPLY, 1]]


def test_results_of_the_daemons_requests_are_left_to_it(bench: Bench) -> None:
    reports: list[m.Report] = [m.CommandResult(5, None), m.Refused(6, REFUSAL), m.Progress(0.5)]
    assert bench.channels.take_reports(reports) == reports


@pytest.mark.parametrize(
    ("given", "found"),
    [("", Priority.NORMAL), ("low", Priority.LOW), ("urgent", Priority.HIGH)],
)
def test_the_class_is_bounded_by_that_of_the_user(
    bench: Bench, given: str, found: Priority
) -> None:
    bench.open(1, 1, Priority.NORMAL, Priority.HIGH).compute(1, priority=given)
    assert bench.read_computation().requester.priority is found


@pytest.mark.parametrize("spelled", ["fp32", "FP32", FP32])
def test_the_type_of_an_output_is_spelled_as_that_of_the_input_with_its_name(
    bench: Bench, spelled: object
) -> None:
    peer = bench.open()
    peer.compute(1, ONE | {"type": spelled})
    request = bench.read_computation()
    outputs = [(name, Tensor(b"", (0,), kind)) for name, kind in (("x", FP32), ("y", FP32))]
    bench.channels.take_reports([m.CommandResult(request.id, m.ComputedTensors(outputs, 0.1))])
    [[_, _, result]] = peer.receive()
    assert [output["type"] for _, output in result["outputs"]] == [spelled, FP32]


def test_an_output_of_another_type_than_the_input_with_its_name_has_its_own(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    request = bench.read_computation()
    outputs = [("x", Tensor(b"", (0,), TENSOR_TYPES["u8"]))]
    bench.channels.take_reports([m.CommandResult(request.id, m.ComputedTensors(outputs, 0.1))])
    [[_, _, result]] = peer.receive()
    assert result["outputs"][0][1]["type"] == TENSOR_TYPES["u8"]


def test_an_error_of_the_engine_is_the_answer(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    error = InvalidArgument("the input does not fit", hint="change it").to_wire()
    bench.channels.take_reports([m.Refused(bench.read_computation().id, error)])
    assert peer.receive() == [[ERROR, 1, error]]


def test_outputs_that_no_reply_takes_are_an_error(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    bench.answer(bench.read_computation(), size=REPLY_BYTES_MAX + 4)
    [[kind, number, error]] = peer.receive()
    assert (kind, number, error["name"]) == (ERROR, 1, "TooLarge")
    assert error["data"] == {"bytes": REPLY_BYTES_MAX + 4, "reply_bytes_max": REPLY_BYTES_MAX}


def test_a_cancelled_computation_is_dropped_and_both_requests_are_answered(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    request = bench.read_computation()
    peer.send([1, 2, "cancel", {"request": 1}])
    assert bench.read() == [m.DropInput(request.id)]
    [error, reply] = peer.receive()
    assert (error[:2], error[2]["name"], reply[:2]) == ([ERROR, 1], "Cancelled", [REPLY, 2])
    bench.answer(request)
    assert peer.receive() == [], "it has an answer"
    peer.compute(1)
    bench.answer(bench.read_computation())
    assert peer.receive()[0][:2] == [REPLY, 1], "its number may be used again"


def test_a_request_that_is_not_under_way_may_be_cancelled(bench: Bench) -> None:
    peer, other = bench.open(1), bench.open(2)
    other.compute(1)
    bench.read()
    peer.send([1, 2, "cancel", {"request": 1}])
    assert bench.read() == []
    assert peer.receive() == [[REPLY, 2, {}]] and other.receive() == []


def test_a_number_that_is_under_way_ends_the_channel(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    request = bench.read_computation()
    peer.compute(1)
    assert bench.read() == [m.DropInput(request.id)]
    [goodbye, end] = peer.receive()
    assert (goodbye[0], goodbye[1]["name"], end) == (GOODBYE, "ProtocolError", None)
    assert bench.is_closed()


UNREADABLE = {
    "no array": pack_frame({"a": 1}),
    "no request": pack_frame([2, 1, {}]),
    "short": pack_frame([1, 1, "compute"]),
    "long": pack_frame([1, 1, "compute", {}, 0]),
    "no number": pack_frame([1, "1", "compute", {}]),
    "negative": pack_frame([1, -1, "compute", {}]),
    "huge number": pack_frame([1, 1 << 63, "compute", {}]),
    "no call": pack_frame([1, 1, 5, {}]),
    "no UTF-8": pack_frame([1, 1, "xxxx", {}]).replace(b"xxxx", b"\xff\xfe\xff\xfe"),
    "empty": pack_frame([])[:4].replace(b"\x01", b"\x00"),
    "nested": struct.pack("<I", 100_000) + b"\x91" * 100_000,
    "nested params": struct.pack("<I", 100_004) + b"\x94\x01\x01\xa0" + b"\x91" * 100_000,
    "cut off inside": struct.pack("<I", 3) + b"\x94\x01\x01",
    "too large": struct.pack("<I", FRAME_BYTES_MAX + 1) + bytes(100),
    "text": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_after_an_unreadable_frame_the_channel_says_goodbye_and_ends(
    bench: Bench, name: str
) -> None:
    peer, other = bench.open(1), bench.open(2)
    peer.compute(1)
    request = bench.read_computation()
    peer.send_some(UNREADABLE[name])
    while (commands := bench.read()) == [] and bench.poll.poll(0):
        pass
    assert commands == [m.DropInput(request.id)]
    [goodbye, end] = peer.receive()
    assert (goodbye[0], end) == (GOODBYE, None)
    assert goodbye[1]["message"].isprintable()
    assert bench.is_closed()
    other.compute(1)
    bench.answer(bench.read_computation())
    assert other.receive()[0][:2] == [REPLY, 1]


def test_random_bytes_end_the_channel_or_wait_for_the_rest_of_a_frame(bench: Bench) -> None:
    rng = random.Random(SEED)
    whole = pack_frame([1, 1, "compute", {"inputs": [["x", ONE]], "priority": "low"}])
    for number in range(1, 1000):
        peer, data = bench.open(number), bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        peer.send_some(bytes(data[: rng.randrange(1, len(data) + 1)]))
        requests = [command for command in bench.read() if isinstance(command, m.ComputeTensors)]
        bench.answer(*requests)
        peer.close()
        bench.read()
        assert bench.is_closed(number)
    assert bench.channels.watched == []


REFUSED: dict[str, tuple[str, Any]] = {
    "another call": ("load", {}),
    "a context": ("compute", {"inputs": [], "context": 1}),
    "no inputs": ("compute", {}),
    "no map": ("compute", 5),
    "kept": ("compute", {"inputs": [["x", {"kept": 1}]]}),
    "buffer": ("compute", {"inputs": [["x", {"buffer": 1, "offset": 0, "length": 4}]]}),
    "descriptor": ("compute", {"inputs": [["x", {"fd": 0}]]}),
    "type": ("compute", {"inputs": [["x", ONE | {"type": "fp23"}]]}),
    "dimensions": ("compute", {"inputs": [["x", ONE | {"dimensions": [1] * (RANK_MAX + 1)}]]}),
    "tensors": ("compute", {"inputs": [["x", ONE]] * (TENSORS_MAX + 1)}),
    "class": ("compute", {"inputs": [["x", ONE]], "priority": "highest"}),
    "timeout": ("compute", {"inputs": [["x", ONE]], "queue_timeout_s": -1.0}),
    "nan": ("compute", {"inputs": [["x", ONE]], "queue_timeout_s": float("nan")}),
    "cancel": ("cancel", {}),
    "cancelled": ("cancel", {"request": "1"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_with_mistakes_is_refused_and_the_channel_stays(bench: Bench, name: str) -> None:
    peer = bench.open()
    call, params = REFUSED[name]
    peer.send([1, 4, call, params])
    assert bench.read() == []
    [[kind, number, error]] = peer.receive()
    assert (kind, number, error["name"]) == (ERROR, 4, "InvalidArgument")
    assert error["hint"] and error["message"].isprintable()
    peer.compute(4)
    bench.answer(bench.read_computation())
    assert peer.receive()[0][:2] == [REPLY, 4]
    assert bench.uses()[-1].computed == 0, "the last report came before"


def test_a_name_that_is_no_text_is_refused(bench: Bench) -> None:
    peer = bench.open()
    frame = pack_frame([1, 1, "compute", {"inputs": [["name", ONE]]}])
    peer.sock.sendall(frame.replace(b"name", b"\xff\xfe\xff\xfe"))
    assert bench.read() == []
    [[kind, number, error]] = peer.receive()
    assert (kind, number, error["name"]) == (ERROR, 1, "InvalidArgument")


def test_a_frame_may_arrive_byte_by_byte(bench: Bench) -> None:
    peer, found = bench.open(), list[m.Command]()
    for byte in pack_frame([1, 1, "compute", {"inputs": [["x", ONE]]}]):
        assert not found
        peer.sock.sendall(bytes([byte]))
        found += bench.read()
    assert len(found) == 1


# Bounds.


def read_all(bench: Bench, peer: Peer, data: bytes) -> tuple[list[m.Command], bytes]:
    """Send and read until nothing more is accepted; return the commands and the unsent bytes."""
    commands, stuck = list[m.Command](), 0
    while stuck < 2:
        before = len(data)
        data = peer.send_some(data)
        found = bench.read()
        commands += found
        stuck = 0 if found or len(data) < before else stuck + 1
    return commands, data


def test_no_more_computations_are_read_than_may_be_under_way(bench: Bench) -> None:
    peer = bench.open()
    frames = [
        pack_frame([1, number, "compute", {"inputs": [["x", ONE | {"data": bytes(1000)}]]}])
        for number in range(4 * REQUESTS_MAX)
    ]
    commands, rest = read_all(bench, peer, b"".join(frames))
    assert len(commands) == REQUESTS_MAX
    assert rest, "the client has to wait"
    bench.answer(commands[0])
    assert len(bench.read()) == 1
    bench.answer(*commands[1:])
    more, _ = read_all(bench, peer, rest)
    assert len(more) == REQUESTS_MAX - 1, "one was under way"


def test_no_more_bytes_of_inputs_are_read_than_a_channel_may_hold(bench: Bench) -> None:
    peer, size = bench.open(), 200_000
    frames = [
        pack_frame([1, number, "compute", {"inputs": [["x", ONE | {"data": bytes(size)}]]}])
        for number in range(3 * CHANNEL_BYTES_MAX // size)
    ]
    commands, rest = read_all(bench, peer, b"".join(frames))
    assert CHANNEL_BYTES_MAX <= len(commands) * size <= CHANNEL_BYTES_MAX + READ_BYTES + size
    assert rest
    bench.answer(*commands)
    more, rest = read_all(bench, peer, rest)
    assert more


def test_a_channel_that_occupies_its_part_of_the_memory_stops_no_other_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, channels = 50_000, 4
    monkeypatch.setattr(channels_module, "BYTES_MAX", channels * 2 * size)
    greedy, *others = [bench.open(number, number) for number in range(1, channels + 1)]
    tensor = ONE | {"data": bytes(size)}
    frames = [
        pack_frame([1, number, "compute", {"inputs": [["x", tensor]]}]) for number in range(100)
    ]
    held, _ = read_all(bench, greedy, b"".join(frames))
    assert 2 <= len(held) <= 4
    for other in others:
        other.compute(1)
        assert bench.read_computation()


def test_of_a_client_that_does_not_read_its_answers_no_more_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_module, "CHANNEL_BYTES_MAX", 1 << 20)
    peer = bench.open()
    peer.compute(1)
    bench.answer(bench.read_computation(), size=2 << 20)
    peer.compute(2)
    assert bench.read() == []
    received, found = list[Any](), list[m.Command]()
    while not received or not found:
        received += peer.receive()
        found += bench.read()
    assert received[0][:2] == [REPLY, 1]


def test_a_channel_with_too_many_answers_that_nobody_reads_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_module, "UNSENT_BYTES_MAX", 4 << 20)
    peer = bench.open()
    for number in range(8):
        peer.compute(number)
    requests = bench.read()
    bench.answer(requests[0], size=4 << 20)
    assert bench.read() == [], "it was not too much"
    bench.answer(requests[1], size=1 << 20)
    assert bench.channels.due_in() == 0.0
    dropped = [m.DropInput(r.id) for r in requests[2:] if isinstance(r, m.ComputeTensors)]
    assert bench.read() == dropped
    assert bench.is_closed()


def test_of_channels_with_too_many_unread_answers_those_with_more_than_their_part_are_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_module, "BYTES_MAX", 8 << 20)
    peers = [bench.open(number) for number in (1, 2, 3, 4)]
    requests = []
    for peer in peers:
        peer.compute(1)
        requests += bench.read()
    for request, size in zip(requests, (1 << 20, 4 << 20, 1 << 20, 6 << 20), strict=True):
        bench.answer(request, size=size)
        bench.read()
    assert [use.channel for use in bench.uses() if use.closed] == [4]


def test_large_answers_reach_a_client_that_reads_slowly(bench: Bench) -> None:
    peer = bench.open()
    for number in (1, 2):
        peer.compute(number)
    bench.answer(*bench.read(), size=1 << 20)
    received = list[Any]()
    while len(received) < 2:
        received += peer.receive()
        bench.read()
    assert [message[:2] for message in received] == [[REPLY, 1], [REPLY, 2]]
    assert all(len(message[2]["outputs"][0][1]["data"]) == 1 << 20 for message in received)


def test_no_number_is_used_twice_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_module, "_NUMBER_BITS", 2)
    peers = [bench.open(number) for number in (1, 2)]
    for number in range(40):
        for peer in peers:
            peer.compute(number)
        requests = bench.read()
        assert sorted(channel_of(r.id) for r in requests if isinstance(r, m.ComputeTensors)) == [
            1,
            2,
        ]
        bench.answer(*requests)
        for peer in peers:
            assert [message[:2] for message in peer.receive()] == [[REPLY, number]]


# Ends.


def test_a_client_that_leaves_has_its_computations_dropped(bench: Bench) -> None:
    peer, other = bench.open(1), bench.open(2)
    for one in (peer, other):
        one.compute(1)
    requests = [r for r in bench.read() if isinstance(r, m.ComputeTensors)]
    peer.close()
    assert bench.read() == [m.DropInput(r.id) for r in requests if channel_of(r.id) == 1]
    assert bench.is_closed(1)
    bench.answer(*requests)
    assert len(other.receive()) == 1


def test_a_client_that_leaves_is_noticed_while_its_channel_is_not_read(bench: Bench) -> None:
    peer = bench.open()
    for number in range(REQUESTS_MAX):
        peer.compute(number)
        bench.read()
    peer.close()
    assert len(bench.read()) == REQUESTS_MAX
    assert bench.is_closed()


def test_a_client_that_leaves_is_noticed_while_its_frames_wait(bench: Bench) -> None:
    peer = bench.open()
    frames = [
        pack_frame([1, number, "compute", {"inputs": [["x", ONE]]}])
        for number in range(2 * REQUESTS_MAX)
    ]
    read_all(bench, peer, b"".join(frames))
    peer.close()
    assert len(bench.read()) == REQUESTS_MAX, "they are dropped"
    assert bench.is_closed()


def test_a_closing_channel_answers_its_computations_and_takes_no_more(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    request = bench.read_computation()
    peer.compute(2)
    assert bench.channels.close_channel(m.CloseChannel(1)) == []
    assert bench.read() == [] and not bench.is_closed()
    assert bench.channels.watched[0][1] == 0, "nothing is read or written"
    bench.answer(request)
    message, end = peer.receive()
    assert (message[:2], end) == ([REPLY, 1], None)


def test_a_closing_channel_sends_large_answers_whole(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    request = bench.read_computation()
    bench.channels.close_channel(m.CloseChannel(1))
    bench.answer(request, size=4 << 20)
    received = list[Any]()
    while not received or received[-1] is not None:
        received += peer.receive()
        bench.read()
    assert len(received[0][2]["outputs"][0][1]["data"]) == 4 << 20
    assert bench.is_closed()


def test_an_unused_channel_closes_at_once(bench: Bench) -> None:
    peer = bench.open()
    bench.channels.close_channel(m.CloseChannel(1))
    assert peer.receive() == [None] and bench.is_closed()
    assert bench.channels.close_channel(m.CloseChannel(1)) == []


def test_a_channel_closed_at_once_drops_its_computations(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    request = bench.read_computation()
    assert bench.channels.close_channel(m.CloseChannel(1, at_once=True)) == [
        m.DropInput(request.id)
    ]
    assert peer.receive() == [None] and bench.is_closed()


def test_a_client_that_stops_its_own_reading_is_closed_at_the_next_answer(bench: Bench) -> None:
    peer = bench.open()
    for number in (1, 2):
        peer.compute(number)
    first, second = bench.read()
    peer.kept.shutdown(socket.SHUT_WR)
    bench.answer(first)
    assert bench.read() == [m.DropInput(second.id)]  # type: ignore[union-attr]
    assert bench.is_closed()


def test_a_channel_whose_descriptor_did_not_arrive_is_reported_as_closed(bench: Bench) -> None:
    classes = Priority.NORMAL, Priority.NORMAL
    bench.channels.open_channel(m.OpenChannel(9, Owner(1), *classes))
    assert bench.is_closed(9)


# Reports.


def test_the_first_computation_is_reported_at_once_and_others_in_intervals(bench: Bench) -> None:
    peer = bench.open()
    assert bench.channels.due_in() is None
    peer.compute(1, priority="high")
    request = bench.read_computation()
    [use] = bench.uses()
    assert (use.under_way, use.computed, use.priority) == (1, 0, Priority.HIGH)
    assert bench.channels.due_in() == REPORT_S
    bench.now = REPORT_S / 2
    bench.answer(request)
    peer.compute(2, priority="low")
    second = bench.read_computation()
    assert bench.uses() == []
    bench.now = REPORT_S
    [use] = bench.uses()
    assert (use.under_way, use.computed, use.seconds) == (1, 1, 0.25)
    assert bench.busy_s == pytest.approx(REPORT_S)
    assert use.priority is Priority.HIGH, "the highest class in the interval"
    bench.answer(second)
    bench.now = 2 * REPORT_S
    [use] = bench.uses()
    assert (use.under_way, use.computed, use.priority) == (0, 1, Priority.LOW)
    assert bench.channels.due_in() is None, "an unused channel is not reported"


def test_only_the_time_with_computations_counts_as_busy(bench: Bench) -> None:
    peer = bench.open()
    for number, (begin, end) in enumerate(((0.0, 0.01), (0.03, 0.035))):
        bench.now = begin
        peer.compute(number)
        request = bench.read_computation()
        bench.now = end
        bench.answer(request)
    bench.now = REPORT_S
    bench.uses()
    assert bench.busy_s == pytest.approx(0.015)


def test_the_busy_times_of_several_channels_are_one(bench: Bench) -> None:
    peers = [bench.open(number) for number in (1, 2, 3)]
    for number, peer in enumerate(peers):
        bench.now = number / 100
        peer.compute(1)
        bench.read()
    bench.now = REPORT_S
    bench.uses()
    assert bench.busy_s == pytest.approx(REPORT_S)


def test_the_computations_of_a_user_are_bounded_over_all_its_channels(bench: Bench) -> None:
    peers = [bench.open(number) for number in range(1, 5)]
    for peer in peers:
        for number in range(REQUESTS_MAX // 2):
            peer.compute(number)
    commands = [command for _ in range(2) for command in bench.read()]
    assert len(commands) == REQUESTS_MAX
    other = bench.open(9, 2)
    other.compute(1)
    assert len(bench.read()) == 1, "that of another user"
    bench.answer(*commands)
    assert len(bench.read()) == REQUESTS_MAX, "the other channels are read again"


@pytest.mark.parametrize("option", [SO_PASSCRED, SO_PASSPIDFD])
def test_options_that_the_client_sets_leave_no_descriptors(bench: Bench, option: int) -> None:
    peer = bench.open()
    try:
        peer.kept.setsockopt(socket.SOL_SOCKET, option, 1)
    except OSError:
        pytest.skip("kernels before 6.5 pass no pidfds")
    reader, writer = os.pipe()
    socket.send_fds(peer.sock, [b"x"], [writer] * SCM_MAX_FD)
    os.close(writer)
    assert bench.read() == []
    assert bench.is_closed()
    assert os.read(reader, 1) == b"", "all of them were received, and closed"
    os.close(reader)
    while pidfds():
        time.sleep(0.01)


def test_refused_computations_are_not_counted(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    bench.channels.take_reports([m.Refused(bench.read_computation().id, REFUSAL)])
    bench.now = REPORT_S
    assert sum(use.computed for use in bench.uses()) == 0


def test_the_last_report_has_the_use_since_the_previous_one(bench: Bench) -> None:
    peer = bench.open()
    peer.compute(1)
    bench.answer(bench.read_computation())
    bench.uses()
    peer.compute(2)
    bench.answer(bench.read_computation())
    peer.close()
    bench.read()
    [use] = bench.uses()
    assert (use.closed, use.computed, use.under_way) == (True, 2, 0)


# Hostile ends.


def test_a_socket_in_blocking_mode_does_not_block_the_process(bench: Bench) -> None:
    peer = bench.open()
    peer.kept.setblocking(True)  # the mode is that of both descriptors
    peer.compute(1)
    bench.answer(bench.read_computation(), size=4 << 20)
    assert bench.channels.read_round([(bench.channels.watched[0][0], select.EPOLLIN)]) == []


def test_descriptors_in_a_channel_end_it_and_are_closed(bench: Bench) -> None:
    peer = bench.open()
    reader, writer = os.pipe()
    frame = pack_frame([1, 1, "compute", {"inputs": [["x", ONE]]}])
    socket.send_fds(peer.sock, [frame], [writer])
    os.close(writer)
    assert bench.read() == []
    [goodbye, end] = peer.receive()
    assert (goodbye[0], goodbye[1]["name"], end) == (GOODBYE, "ProtocolError", None)
    assert os.read(reader, 1) == b"", "nobody else has the other end"
    os.close(reader)


def test_descriptors_that_were_not_read_are_closed_with_the_channel(bench: Bench) -> None:
    peer = bench.open()
    reader, writer = os.pipe()
    for _ in range(3):
        socket.send_fds(peer.sock, [b"x"], [writer])
    os.close(writer)
    bench.channels.close_channel(m.CloseChannel(1, at_once=True))
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_one_socket_as_two_channels_harms_only_its_client(bench: Bench) -> None:
    peer, other = bench.open(1), bench.open(2)
    classes = Priority.NORMAL, Priority.NORMAL
    again = os.dup(peer.kept.fileno())
    bench.channels.open_channel(m.OpenChannel(3, Owner(1), *classes, again))
    for number in range(20):
        peer.compute(number)
        bench.answer(*bench.read())
    peer.close()
    while any(fileno for fileno, _ in bench.poll.poll(0)):
        bench.read()
    assert {use.channel for use in bench.uses() if use.closed} == {1, 3}
    other.compute(1)
    bench.answer(bench.read_computation())
    assert len(other.receive()) == 1


def test_both_ends_as_channels_end_each_other(bench: Bench) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(pack_frame([1, 1, "load", {}]))
    classes = Priority.NORMAL, Priority.NORMAL
    for number, sock in ((1, ours), (2, theirs)):
        bench.channels.open_channel(m.OpenChannel(number, Owner(1), *classes, sock.detach()))
    while bench.poll.poll(0):
        bench.read()
    assert {use.channel for use in bench.uses() if use.closed} == {1, 2}


# The link.


class Linked:
    """The link of a worker with a channel."""

    def __init__(self) -> None:
        self.ours, self.daemon = socket.socketpair()
        self.link = SocketLink(self.ours)
        self.link.channels = self.channels = self.link.new_channels(["y"])
        ours, theirs = socket.socketpair()
        self.peer = Peer(ours, theirs.dup())
        opened = m.OpenChannel(1, Owner(1), Priority.NORMAL, Priority.NORMAL)
        socket.send_fds(self.daemon, [pack_frame([opened])], [theirs.detach()])
        assert self.link.receive_commands(0) == []

    def close(self) -> None:
        self.channels.close()
        self.peer.close()
        self.ours.close()
        self.daemon.close()


@pytest.fixture
def linked() -> Iterator[Linked]:
    made = Linked()
    yield made
    made.close()


def answer_linked(linked: Linked, size: int) -> None:
    """Compute for the channel, and answer with *size* bytes."""
    linked.peer.compute(1)
    [request] = linked.link.receive_commands(None)
    assert isinstance(request, m.ComputeTensors)
    output = "y", Tensor(bytes(size), (size,), TENSOR_TYPES["u8"])
    linked.link.send_reports([m.CommandResult(request.id, m.ComputedTensors([output], 0.1))])


def test_an_idle_worker_sends_the_rest_of_an_answer(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_linked(linked, 4 << 20)
    monkeypatch.setattr(linked.channels, "due_in", lambda: None)  # the last report was sent
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        with pytest.raises(LinkClosed):
            while True:
                linked.link.receive_commands(None)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    linked.peer.sock.settimeout(60)
    frames, message = FrameReader(ANY_LENGTH), None
    while message is None:
        for frame in frames.read_frames(linked.peer.sock.recv(1 << 16)):
            message = msgspec.msgpack.decode(frame)
    assert message[:2] == [REPLY, 1]
    linked.daemon.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_the_standby_waits_for_the_events_of_channels_that_are_read(linked: Linked) -> None:
    [(fileno, events)] = [one for one in linked.link.watched if one[0] != linked.ours.fileno()]
    assert events == select.EPOLLIN
    linked.peer.compute(1)
    [request] = linked.link.receive_commands(None)
    linked.daemon.sendall(pack_frame([m.CloseChannel(1)]))
    linked.link.receive_commands(None)
    assert dict(linked.link.watched)[fileno] == 0, "a closing channel is not read"
    linked.daemon.sendall(pack_frame([m.CloseChannel(1, at_once=True)]))
    assert linked.link.receive_commands(None) == [m.DropInput(request.id)]  # type: ignore[union-attr]
    assert fileno not in dict(linked.link.watched)


def test_a_user_has_so_many_frames_in_a_round_whatever_the_number_of_its_channels(
    bench: Bench,
) -> None:
    flooding = [bench.open(number, user=1) for number in range(1, 5)]
    frames = [pack_frame([1, number, "nothing", {}]) for number in range(1000)]
    for peer in flooding:
        peer.send_some(b"".join(frames))
    other = bench.open(5, user=2)
    other.send_some(pack_frame([1, 1, "compute", {"inputs": [["x", ONE]]}]))
    handled = 0
    for _ in range(3):
        commands = bench.channels.read_round(bench.poll.poll(0))
        handled += len(commands)
    assert handled == 1, "the other user's came in its turn"
    assert bench.channels.due_in() == 0, "the rest follows"
