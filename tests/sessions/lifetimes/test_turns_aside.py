"""Turns that are set aside while their sessions have no place: they continue, fail or end once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from inferd.backends.errors import (
    Busy,
    Cancelled,
    QuotaExceeded,
    SessionExpired,
    ShuttingDown,
    Timeout,
)
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from inferd.sessions import DormantLimits, Opening, PlaceWait, Session, Turn, TurnOptions
from inferd.sessions.lifetimes.places import PlaceBounds
from inferd.sessions.table import SessionState
from tests.sessions.conversation.test_sessions import HERE, THERE, opened
from tests.sessions.doubles import Harness

pytestmark = pytest.mark.asyncio
TEXT = b"the whole text of an answer"
OTHER = Owner(2000)
LATER_S = 2.0
"""Longer than a session with a read turn keeps its place."""


class Reader:
    """The tokens that a stream has sent, and its turn."""

    def __init__(self) -> None:
        self.text = b""
        self.turn: Turn

    def read(self, report: m.Tokens) -> None:
        self.text += report.text

    @property
    def whole(self) -> bytes:
        return self.text + self.turn.tail


async def streaming(harness: Harness, session: Session, credit: int = 1) -> Reader:
    """Begin a stream. It uses its credit; the engine has not begun one with unlimited credit."""
    reader = Reader()
    await session.set_input(TEXT)
    reader.turn = await session.start_turn(TurnOptions(credit=credit), reader.read)
    if credit > 0:
        harness.port.run()
    return reader


@asynccontextmanager
async def managed(harness: Harness) -> AsyncIterator[None]:
    """Run the manager's background work, which grants places after a wake."""
    async with anyio.create_task_group() as group:
        group.start_soon(harness.manager.expire_idle)
        yield
        group.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.lowlevel.checkpoint()


def crowd() -> Harness:
    harness = Harness()
    harness.manager.places.bounds = PlaceBounds(reader_lag_s=0.0)
    harness.manager.dormant.limits = DormantLimits()
    return harness


async def yielded(
    harness: Harness, credit: int = 1, session_id: str | None = "diary"
) -> tuple[Session, Reader, Session]:
    """Return a session that has yielded its place, its stream, and another user's session there.
    Calls are under way on the other sessions.
    """
    session = opened(harness, session_id=session_id)
    reader = await streaming(harness, session, credit)
    harness.now += LATER_S
    for _ in range(2):
        opened(harness).calls_under_way = 1
    other = opened_by_another(harness)
    assert harness.manager.live.has_yielded(session)
    return session, reader, other


def opened_by_another(harness: Harness) -> Session:
    session, _ = harness.manager.open_session(Opening(THERE, OTHER, harness.source, {}))
    return session


async def test_an_unread_turn_continues_without_a_lost_or_doubled_token_once_it_is_read() -> None:
    harness = crowd()
    session, reader, other = await yielded(harness, credit=5)
    assert reader.text == TEXT[:5] and session.state == "parked"
    assert harness.manager.live.places_taken == 3 and not harness.port.readers
    async with managed(harness):
        reader.turn.add_credit(1)
        harness.port.run()
        assert len(harness.manager.places) == 1 and reader.text == TEXT[:5]
        harness.manager.discard_session(other)
        await until(lambda: not harness.manager.live.has_yielded(session))
        harness.port.run()
        assert reader.text == TEXT[:6], "it has the credit of its reader, and no more"
        reader.turn.add_credit(100)
        harness.port.run()
    assert reader.whole == TEXT and session.state == "done"
    assert session.read_output(0) == TEXT and len(harness.manager.places) == 0
    assert harness.manager.dormant.bytes == 0


async def test_late_reports_of_a_withdrawn_task_reach_no_reader() -> None:
    harness = crowd()
    session, reader, other = await yielded(harness)
    old = reader.turn.spec.id
    harness.manager.discard_session(other)
    await harness.manager.places.restore_place(session, PlaceWait())
    reader.turn.add_credit(100)
    assert reader.turn.spec.id == old, "it is renamed when it is set aside"
    harness.port.run()
    assert reader.whole == TEXT and reader.turn.error is None


async def test_a_turn_that_is_read_waits_for_the_next_place() -> None:
    harness = crowd()
    session, reader, other = await yielded(harness, credit=-1, session_id=None)
    async with managed(harness):
        await until(lambda: len(harness.manager.places) == 1)
        harness.manager.discard_session(other)
        await until(lambda: not harness.manager.live.has_yielded(session))
    harness.port.run()
    assert reader.whole == TEXT


async def test_the_turn_of_a_call_that_lost_its_place_begins_in_the_next_one() -> None:
    harness = crowd()
    session = opened(harness)
    for _ in range(2):
        opened(harness).calls_under_way = 1
    await session.set_input(TEXT)
    session.calls_under_way = 1
    harness.now += LATER_S
    other = opened_by_another(harness)
    [lost] = [s for s in harness.manager.live if harness.manager.live.has_yielded(s)]
    for each in harness.manager.live.sessions_of(HERE):
        if each is not lost:
            each.calls_under_way = 1
    await lost.set_input(TEXT)
    turn = await lost.start_turn(TurnOptions())
    harness.port.run()
    assert not turn.ended.is_set() and len(harness.manager.places) == 1
    async with managed(harness):
        harness.manager.discard_session(other)
        await until(lambda: not harness.manager.live.has_yielded(lost))
    harness.port.run()
    assert bytes(turn.text) == TEXT


async def test_a_stream_without_an_id_ends_with_an_error_and_its_handle_says_why() -> None:
    harness = crowd()
    session = opened(harness)
    reader = await streaming(harness, session)
    for _ in range(2):
        opened(harness).calls_under_way = 1
    opened_by_another(harness)
    error = reader.turn.error
    assert isinstance(error, Busy) and error.retryable and error.hint
    assert session.state is SessionState.CLOSED and session not in harness.manager.live
    with pytest.raises(SessionExpired, match="another user"):
        harness.manager.live.get_session(HERE, session.handle)
    assert harness.manager.dormant.bytes == 0 and harness.manager.live.places_taken == 3


async def test_a_stream_with_an_id_ends_where_dormant_sessions_cannot_be_kept() -> None:
    harness = crowd()
    harness.manager.dormant.limits = DormantLimits(sessions_max=0)
    session = opened(harness, session_id="diary")
    reader = await streaming(harness, session)
    for _ in range(2):
        opened(harness).calls_under_way = 1
    opened_by_another(harness)
    assert isinstance(reader.turn.error, Busy) and "dormant" in reader.turn.error.hint


async def test_a_pulled_turn_yields_between_two_tokens() -> None:
    harness = crowd()
    session = opened(harness)
    await session.set_input(b"ab")
    pieces = [await pulled(harness, session)]
    for _ in range(2):
        opened(harness).calls_under_way = 1
    other = opened_by_another(harness)
    assert harness.manager.live.has_yielded(session)
    harness.manager.discard_session(other)
    await harness.manager.places.restore_place(session, PlaceWait())
    pieces.append(await pulled(harness, session))
    assert pieces == [b"a", b"b"]


async def pulled(harness: Harness, session: Session) -> bytes:
    pieces: list[bytes] = []

    async def pull() -> None:
        pieces.append(await session.pull_token(TurnOptions()))

    async with anyio.create_task_group() as group:
        group.start_soon(pull)
        await anyio.wait_all_tasks_blocked()
        harness.port.run()
    return pieces[0]


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("end", ["cancel", "close", "delete", "detach", "connection", "expire"])
async def test_a_turn_ends_once_while_it_is_set_aside(end: str, is_read: bool) -> None:
    harness = crowd()
    session, reader, other = await yielded(harness)
    manager, error = harness.manager, Cancelled
    if is_read:
        reader.turn.add_credit(1)
    if end == "cancel":
        session.cancel_turn()
    elif end == "close":
        await manager.close_session(session)
    elif end == "delete":
        await manager.delete_session(session)
    elif end == "detach":
        manager.detach_session(session)
    elif end == "connection":
        manager.close_connection(HERE)
    else:
        manager.dormant.limits, error = DormantLimits(sessions_max=0), QuotaExceeded  # type: ignore[assignment]
        manager.delete_excess()
    assert isinstance(reader.turn.error, error)
    assert len(manager.places) == 0 and not harness.port.aside
    manager.discard_session(other)
    harness.port.run()
    assert reader.text == TEXT[:1], "nothing computes it"
    assert manager.live.places_taken == (0 if end == "connection" else 2)
    assert manager.live.has_yielded(session) == (end == "cancel")


async def test_a_turn_that_is_set_aside_keeps_its_timeout() -> None:
    harness = crowd()
    session = opened(harness, session_id="diary")
    await session.set_input(TEXT)
    turn = await session.start_turn(TurnOptions(credit=1, timeout_s=0.05))
    harness.port.run()
    for _ in range(2):
        opened(harness).calls_under_way = 1
    opened_by_another(harness)
    async with managed(harness):
        await until(turn.ended.is_set)
    assert isinstance(turn.error, Timeout) and turn.error.data == {"timeout": "total"}
    assert session.state is SessionState.FAILED


async def test_a_shutdown_fails_turns_that_wait_for_a_place() -> None:
    harness = crowd()
    _, reader, _ = await yielded(harness)
    reader.turn.add_credit(1)
    harness.manager.places.refuse_requests(ShuttingDown("the end"))
    assert isinstance(reader.turn.error, ShuttingDown) and len(harness.manager.places) == 0


async def test_turns_that_wait_for_a_place_do_not_fill_the_queue_of_requests() -> None:
    harness = crowd()
    _, reader, _ = await yielded(harness)
    harness.manager.places.bounds = PlaceBounds(1, 1, reader_lag_s=9.0)
    reader.turn.add_credit(1)
    assert len(harness.manager.places) == 1
    with pytest.raises(Timeout):
        async with harness.manager.places.waited_place(Owner(1000), PlaceWait(timeout_s=0.01)):
            pass


async def test_a_turn_without_memory_for_its_place_fails() -> None:
    harness = crowd()
    session, reader, other = await yielded(harness)
    kept = harness.ledger.kept_bytes.open_bytes(1000)
    harness.ledger.bounds.session_bytes_owner_max = kept + session.kept_bytes - 1
    harness.manager.dormant.limits = DormantLimits(bytes_max=1 << 40)
    reader.turn.add_credit(1)
    harness.manager.discard_session(other)
    harness.manager.places.grant_places()
    assert isinstance(reader.turn.error, QuotaExceeded)
    assert harness.manager.live.has_yielded(session) and harness.manager.live.places_taken == 2


async def test_one_user_s_turns_do_not_yield_to_the_user_s_own_requests() -> None:
    harness = crowd()
    readers = [await streaming(harness, opened(harness, session_id=str(n))) for n in range(3)]
    harness.now += LATER_S
    with pytest.raises(Busy):
        opened(harness)
    assert not any(reader.turn.ended.is_set() for reader in readers)


async def test_a_place_that_is_back_before_the_turn_was_set_aside_submits_nothing() -> None:
    """A turn's beginning is stored before its task is submitted."""
    harness = crowd()
    session = opened(harness)
    reader = await streaming(harness, session, credit=-1)
    harness.port.commands.clear()
    reader.turn.continue_in_place()
    assert not harness.port.commands
