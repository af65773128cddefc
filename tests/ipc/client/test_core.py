"""The state of a connection without a socket: bytes go in, frames come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import (
    ConnectionLost,
    InferdError,
    ProtocolError,
    ShuttingDown,
    TooLarge,
)
from inferd.ipc.client.connection.core import ConnectionCore, InFlight, Outbox
from inferd.wire.frames import FrameReader, pack_frame
from tests.ipc.fake_server import HELLO

CANCELS_MAX = 16


class Frames(Outbox):
    """An outbox that decodes the frames."""

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self.messages: list[Any] = []

    def add_frame(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        self.messages += map(msgspec.msgpack.decode, FrameReader().read_frames(frame))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Connection(ConnectionCore):
    """A connection without a way to wait."""

    def __init__(self) -> None:
        self.sent = Frames()
        super().__init__("nowhere", self.sent)
        self.read(pack_frame([0, HELLO]))

    def read(self, data: bytes) -> None:
        self.receive(self._received.reads, data)

    def start(self, call: str = "chat") -> InFlight:
        request = InFlight(call, math.inf)
        self.send_request(request, {})
        return request

    def _notify(self, request: InFlight | None) -> None:
        pass

    async def start_request(
        self, request: InFlight, params: Any, descriptors: Sequence[int] = ()
    ) -> None:
        raise NotImplementedError

    async def wait_for(
        self, request: InFlight, ready: Callable[[], bool], until: float = math.inf
    ) -> None:
        raise NotImplementedError

    async def wait_lost(self, until: float) -> None:
        raise NotImplementedError

    def run_soon(self, action: Callable[[], object]) -> None:
        raise NotImplementedError


def events_of(request: InFlight) -> list[Any]:
    events = []
    while request.has_events():
        events.append(request.next_event())
    return events


ANSWER = b"".join(map(pack_frame, ([4, 1, {"text": b"a"}], [4, 1, {"text": b"b"}], [2, 1, {}])))


@pytest.mark.parametrize("size", [*range(1, 20), len(ANSWER)])
def test_messages_are_the_same_however_their_bytes_are_split(size: int) -> None:
    connection = Connection()
    request = connection.start()
    for start in range(0, len(ANSWER), size):
        assert not request.done
        connection.read(ANSWER[start : start + size])
    assert events_of(request) == [{"text": b"a"}, {"text": b"b"}]
    assert request.done and request.answered and request.outcome() == {}


def test_a_read_that_is_handled_twice_counts_once() -> None:
    connection = Connection()
    request = connection.start()
    for number, data in ((1, ANSWER[:10]), (2, ANSWER[10:])):
        connection.receive(number, data)
        connection.receive(number, data)
    assert events_of(request) == [{"text": b"a"}, {"text": b"b"}]


def test_an_event_that_is_added_twice_counts_once_even_if_it_was_read_between() -> None:
    request = InFlight("stream", math.inf)
    read = []
    for number in range(200):
        event = {"number": number}
        request.add_event(event)
        read += events_of(request)
        request.add_event(event)
        assert not request.has_events()
        assert len(request._events) <= 65
    assert read == [{"number": number} for number in range(200)]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"\xff\xff\xff\xff", TooLarge),
        (b"\x01\0\0\0\xc1", ProtocolError),
        (pack_frame([]), ProtocolError),
        (pack_frame([4, 2, "text"]), ProtocolError),
        (pack_frame([6, ShuttingDown("it ends").to_wire()]), ShuttingDown),
        (b"", ConnectionLost),
    ],
)
def test_a_connection_ends_after_the_messages_before_its_end(
    bad: bytes, error: type[InferdError]
) -> None:
    connection = Connection()
    answered, lost = connection.start(), connection.start()
    if bad:
        connection.read(ANSWER + bad + pack_frame([2, 2, {}]))
    else:
        connection.read(ANSWER)
        connection.read(bad)
    assert answered.outcome() == {} and not answered.lost
    assert lost.lost
    with pytest.raises(error):
        lost.outcome()
    with pytest.raises(ConnectionLost) as final:
        connection.start()
    assert not final.value.retryable


def test_cancels_are_bounded_and_the_next_is_sent_when_one_is_answered() -> None:
    connection = Connection()
    requests = [connection.start() for _ in range(CANCELS_MAX + 2)]
    connection.sent.messages.clear()
    for request in requests:
        connection.abandon_request(request)
        connection.abandon_request(request)
    cancels = [(call, params["request"]) for _, _, call, params in connection.sent.messages]
    assert cancels == [("cancel", request.id) for request in requests[:CANCELS_MAX]]
    connection.read(pack_frame([2, requests[-1].id, {}]))  # it no longer needs a cancel
    connection.read(pack_frame([2, connection.sent.messages[0][1], {"cancelled": True}]))
    assert connection.sent.messages[-1][3] == {"request": requests[-2].id}
    assert len(connection.sent.messages) == CANCELS_MAX + 1


def test_an_abandoned_request_gets_no_events_and_late_replies_are_dropped() -> None:
    connection = Connection()
    request = connection.start()
    connection.time_out(request)
    connection.read(ANSWER + pack_frame([2, 1, {"text": b"late"}]) + pack_frame([2, 99, {}]))
    assert not request.has_events() and request.answered and request.result == {}
    assert not connection.lost


def test_requests_wait_at_the_bounds_of_requests_and_of_unsent_bytes() -> None:
    connection = Connection()
    for _ in range(HELLO["limits"]["requests_max"] - CANCELS_MAX):
        assert connection.may_send()
        connection.start()
    assert not connection.may_send()
    connection.read(ANSWER)
    assert connection.may_send()
    connection.sent.unsent_bytes = 16 << 20
    assert connection.may_send()
    connection.sent.unsent_bytes += 1
    assert not connection.may_send()
