"""Calls that never wait are answered as they are read, behind the connection's earlier requests.
Some others go on without a task.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from inferd.backends.errors import BackendError, Cancelled, InferdError, NotFound
from inferd.ipc import messages as w
from inferd.ipc.server.connection import Request, ServerConnection
from inferd.ipc.server.fairness import STARTS_MAX, WITHOUT_TASK
from inferd.ipc.server.server import NeedsTask, Server
from inferd.ipc.server.socket_connection import LARGE_FRAMES_MAX, REQUESTS_BYTES
from tests.raw import Closed, RawClient

IMMEDIATE, WAITING, BEGUN = "get_output", "get_output_single", "parameters"


class Answers:
    """A handler that notes how each request ran, and whose calls fail with *error*, if any."""

    def __init__(self, error: Exception | None = None):
        self.error, self.failures = error, list[Exception]()
        self.at_once, self.in_tasks = list[int](), list[int]()
        self.may_end = anyio.Event()

    def server_hello(self) -> w.ServerHello:
        return w.ServerHello(
            protocol=w.PROTOCOL_VERSION, software="x", instance=1, limits=w.Limits(*[1 << 20] * 8)
        )

    def may_begin_call(self, request: Request) -> bool:
        return False

    def begin_call(self, request: Request, end: Any) -> bool:
        raise AssertionError("no call may begin")

    def runs_at_once(self, request: Request) -> bool:
        return request.call == IMMEDIATE

    def run_at_once(self, request: Request) -> Any:
        self.at_once.append(request.number)
        return self._answer()

    async def run_call(self, request: Request) -> Any:
        self.in_tasks.append(request.number)
        if request.call == WAITING:
            await self.may_end.wait()
        return self._answer()

    def _answer(self) -> w.OutputResult:
        if self.error is not None:
            raise self.error
        return w.OutputResult(data=b"x")

    def admit_connection(self, connection: ServerConnection) -> bool:
        return False

    def connection_greeted(self, connection: ServerConnection, hello: w.ClientHello) -> None:
        return

    async def connection_delegated(
        self, connection: ServerConnection, hello: w.ClientHello
    ) -> None:
        return

    def connection_ended(self, connection: ServerConnection) -> None: ...

    def connection_refused(self, connection: ServerConnection, error: InferdError) -> None: ...

    def accept_failed(self, error: OSError) -> None:
        raise error

    def call_refused(self, call: str, error: InferdError) -> None:
        raise error

    def call_failed(self, operation: str, error: Exception) -> None:
        self.failures.append(error)


async def serve(handler: Answers, folder: Path, use: Callable[[RawClient], None]) -> None:
    """Serve one client, which *use* gets in a thread."""
    path = str(folder / "sock")

    def connect() -> None:
        with RawClient(path) as client:
            use(client)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        async with anyio.create_task_group() as group:
            await group.start(Server(handler, handler).serve, listener)
            await anyio.to_thread.run_sync(connect)
            group.cancel_scope.cancel()


def requests(*calls: str, padding: int = 0) -> bytes:
    """Return the frames of *calls*, numbered from 1, each with *padding*."""
    bodies = [
        msgspec.msgpack.encode([1, number, call, {"context": 1, "padding": bytes(padding)}])
        for number, call in enumerate(calls, 1)
    ]
    return b"".join(struct.pack("<I", len(body)) + body for body in bodies)


def answered(client: RawClient, count: int) -> list[int]:
    """Return the ids of the next *count* answers, in their order."""
    return [client.read_message()[1] for _ in range(count)]


def test_a_call_that_never_waits_runs_without_a_task(tmp_path: Path) -> None:
    handler = Answers()

    def use(client: RawClient) -> None:
        for _ in range(3):
            assert client.call(IMMEDIATE, context=1) == {"data": b"x"}

    anyio.run(serve, handler, tmp_path, use)
    assert (handler.at_once, handler.in_tasks) == ([1, 2, 3], [])


def test_it_begins_after_an_earlier_request_of_its_connection(tmp_path: Path) -> None:
    handler = Answers()

    def use(client: RawClient) -> None:
        client.send_bytes(requests(WAITING, IMMEDIATE))
        assert answered(client, 1) == [2]
        assert (handler.at_once, handler.in_tasks) == ([], [1, 2])
        anyio.from_thread.run_sync(handler.may_end.set)
        assert answered(client, 1) == [1]

    anyio.run(serve, handler, tmp_path, use)


def test_one_read_runs_a_bounded_number_at_once(tmp_path: Path) -> None:
    handler = Answers()

    def use(client: RawClient) -> None:
        client.send_bytes(requests(*[IMMEDIATE] * 20))
        assert answered(client, 20) == list(range(1, 21))

    anyio.run(serve, handler, tmp_path, use)
    assert handler.at_once == list(range(1, STARTS_MAX + 1))
    assert handler.in_tasks == list(range(STARTS_MAX + 1, 21))


@pytest.mark.parametrize("error", [NotFound("no such context"), ValueError("a bug")])
def test_its_error_is_the_answer_and_the_connection_goes_on(
    tmp_path: Path, error: Exception
) -> None:
    handler = Answers(error)

    def use(client: RawClient) -> None:
        with pytest.raises(NotFound if isinstance(error, NotFound) else BackendError):
            client.call(IMMEDIATE, context=1)
        handler.error = None
        assert client.call(IMMEDIATE, context=1) == {"data": b"x"}

    anyio.run(serve, handler, tmp_path, use)
    assert handler.failures == ([error] if isinstance(error, ValueError) else [])


class Begun(Answers):
    """A handler of calls without a task, which `end` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: dict[int, tuple[Request, Any]] = {}
        self.cancelled = list[int]()

    def may_begin_call(self, request: Request) -> bool:
        return request.call == BEGUN

    def begin_call(self, request: Request, end: Any) -> bool:
        self.begun[request.number] = request, end
        request.on_cancel = partial(self._cancel, request)
        return True

    def _cancel(self, request: Request) -> None:
        self.cancelled.append(request.number)
        self.end(request.number, Cancelled("by the test"))

    def end(self, number: int, error: Exception | None = None) -> None:
        """End a call with a result or an error."""
        self.error = error
        request, report_end = self.begun.pop(number)
        report_end(self._answer)
        request.connection.flush()


def test_a_call_without_a_task_is_answered_at_its_end(tmp_path: Path) -> None:
    handler = Begun()

    def use(client: RawClient) -> None:
        client.send_bytes(requests(BEGUN, BEGUN, IMMEDIATE))
        assert answered(client, 1) == [3], "it has read all"
        for number in (2, 1):
            anyio.from_thread.run_sync(handler.end, number)
            assert answered(client, 1) == [number]

    anyio.run(serve, handler, tmp_path, use)
    assert handler.in_tasks == [3], "behind requests in flight"


@pytest.mark.parametrize("error", [NotFound("no such context"), ValueError("a bug")])
def test_the_error_of_a_call_without_a_task_is_its_answer(tmp_path: Path, error: Exception) -> None:
    handler = Begun()

    def use(client: RawClient) -> None:
        client.send_bytes(requests(BEGUN, IMMEDIATE))
        assert answered(client, 1) == [2]
        anyio.from_thread.run_sync(handler.end, 1, error)
        message = client.read_message()
        assert (message[0], message[1]) == (w.Kind.ERROR, 1)

    anyio.run(serve, handler, tmp_path, use)
    assert handler.failures == ([error] if isinstance(error, ValueError) else [])


def test_no_call_without_a_task_begins_before_an_earlier_request(tmp_path: Path) -> None:
    handler = Begun()

    def use(client: RawClient) -> None:
        client.send_bytes(requests(WAITING, BEGUN))
        assert answered(client, 1) == [2]
        assert (handler.in_tasks, handler.begun) == ([1, 2], {})
        anyio.from_thread.run_sync(handler.may_end.set)
        assert answered(client, 1) == [1]

    anyio.run(serve, handler, tmp_path, use)


def test_a_call_that_needs_a_task_after_all_gets_one(tmp_path: Path) -> None:
    handler = Begun()

    def use(client: RawClient) -> None:
        client.send_bytes(requests(BEGUN, IMMEDIATE))
        assert answered(client, 1) == [2]

        def need_task() -> None:
            handler.end(1, NeedsTask())
            handler.error = None

        anyio.from_thread.run_sync(need_task)
        assert answered(client, 1) == [1]

    anyio.run(serve, handler, tmp_path, use)
    assert handler.in_tasks == [2, 1]


class Together(Begun):
    """It also notes how many calls have begun in each iteration of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.together = list[int]()
        self._count = 0

    def begin_call(self, request: Request, end: Any) -> bool:
        if not self._count:
            asyncio.get_running_loop().call_soon(self._end_iteration)
        self._count += super().begin_call(request, end)
        return request.number in self.begun

    def _end_iteration(self) -> None:
        self.together.append(self._count)
        self._count = 0


def test_some_large_requests_that_have_arrived_are_read_together(tmp_path: Path) -> None:
    handler = Together()

    def use(client: RawClient) -> None:
        assert client.call(IMMEDIATE, context=1), "the hello was read"
        calls = [BEGUN] * (LARGE_FRAMES_MAX + 2)
        frames = requests(*calls, IMMEDIATE, padding=REQUESTS_BYTES)
        anyio.from_thread.run_sync(client.send_bytes, frames)  # before the loop reads
        assert answered(client, 1) == [len(calls) + 1], "it has read all"

    anyio.run(serve, handler, tmp_path, use)
    assert handler.together == [LARGE_FRAMES_MAX, 2]


def test_the_end_of_its_connection_cancels_a_call_without_a_task(tmp_path: Path) -> None:
    handler = Begun()

    def use(client: RawClient) -> None:
        client.send_bytes(requests(BEGUN, IMMEDIATE))
        assert answered(client, 1) == [2]

    anyio.run(serve, handler, tmp_path, use)
    assert handler.cancelled == [1] and not handler.begun


class Crowd(Begun):
    """It notes the order in which requests start, and acts when the call of a number begins."""

    def __init__(self, number: int, act: Callable[[Request], bool]) -> None:
        super().__init__()
        self.order = list[int]()
        self._number, self._act = number, act

    def begin_call(self, request: Request, end: Any) -> bool:
        if request.number == self._number and not self._act(request):
            return False
        self.order.append(request.number)
        return super().begin_call(request, end)

    async def run_call(self, request: Request) -> Any:
        self.order.append(request.number)
        return await super().run_call(request)


CROWD = 3 * round(STARTS_MAX / WITHOUT_TASK)
"""More calls than begin in an iteration of the loop."""
QUEUED = CROWD // 3 + 1
"""The first of them that waits for the next iteration."""


def test_calls_that_have_to_wait_begin_in_their_order_without_tasks(tmp_path: Path) -> None:
    handler = Crowd(0, lambda _: True)

    def use(client: RawClient) -> None:
        client.send_bytes(requests(*[BEGUN] * CROWD, IMMEDIATE))
        assert answered(client, 1) == [CROWD + 1]

    anyio.run(serve, handler, tmp_path, use)
    assert handler.order == [*range(1, CROWD + 2)]
    assert handler.in_tasks == [CROWD + 1]


class Identified(Crowd):
    """Its connections act on behalf of a user who is known."""

    def connection_greeted(self, connection: ServerConnection, hello: w.ClientHello) -> None:
        connection.identified = anyio.Event()
        connection.identified.set()


@pytest.mark.parametrize("kind", [Crowd, Identified])
@pytest.mark.parametrize("behind", [0, 3, CROWD], ids=lambda behind: f"{behind}-behind")
def test_a_call_that_waits_may_need_a_task_at_its_turn(
    tmp_path: Path, kind: type[Crowd], behind: int
) -> None:
    handler, last = kind(QUEUED, lambda _: False), QUEUED + behind + 2

    def use(client: RawClient) -> None:
        client.send_bytes(requests(*[BEGUN] * (QUEUED + behind), IMMEDIATE, IMMEDIATE))
        while (number := answered(client, 1)[0]) != last:
            assert number >= QUEUED

    anyio.run(serve, handler, tmp_path, use)
    assert handler.order == [*range(1, last + 1)], "none overtakes it"
    assert handler.in_tasks[0] == QUEUED


def test_a_call_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    def cancel_last(request: Request) -> bool:
        request.connection.requests[CROWD].cancel("by the test")
        return True

    handler = Crowd(QUEUED, cancel_last)

    def use(client: RawClient) -> None:
        client.send_bytes(requests(*[BEGUN] * CROWD, IMMEDIATE))
        message = client.read_message()
        assert message[:2] == [w.Kind.ERROR, CROWD] and "by the test" in str(message[2])
        assert answered(client, 1) == [CROWD + 1]

    anyio.run(serve, handler, tmp_path, use)
    assert handler.order == [*range(1, CROWD), CROWD + 1]


def test_a_bug_in_a_call_that_has_waited_is_its_answer(tmp_path: Path) -> None:
    def fail(request: Request) -> bool:
        raise ValueError("a bug")

    handler = Crowd(QUEUED, fail)

    def use(client: RawClient) -> None:
        client.send_bytes(requests(*[BEGUN] * CROWD, IMMEDIATE))
        assert client.read_message()[:2] == [w.Kind.ERROR, QUEUED]
        assert answered(client, 1) == [CROWD + 1]

    anyio.run(serve, handler, tmp_path, use)
    assert [str(one) for one in handler.failures] == ["a bug"]
    assert handler.order == [number for number in range(1, CROWD + 2) if number != QUEUED]


def test_the_end_of_its_connection_cancels_a_call_that_waits(tmp_path: Path) -> None:
    def cut(request: Request) -> bool:
        request.connection.cut()
        return True

    handler = Crowd(QUEUED, cut)

    def use(client: RawClient) -> None:
        client.send_bytes(requests(*[BEGUN] * CROWD))
        with pytest.raises((Closed, ConnectionError)):
            client.read_message()

    anyio.run(serve, handler, tmp_path, use)
    assert handler.order[:QUEUED] == [*range(1, QUEUED + 1)] and not handler.begun
    assert handler.cancelled == handler.order
