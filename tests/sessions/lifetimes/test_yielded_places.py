"""Idle sessions that yield their place: they keep handle, history and output, within bounds."""

from __future__ import annotations

import anyio
import pytest

from inferd.backends.errors import (
    Busy,
    InvalidArgument,
    PermissionDenied,
    QuotaExceeded,
    SessionExpired,
)
from inferd.scheduler.owner import Owner, Priority
from inferd.sessions import DormantLimits, Opening, PlaceWait, Quota, Session, TurnOptions
from tests.sessions.conversation.test_sessions import HERE, answer, opened
from tests.sessions.doubles import Harness

pytestmark = pytest.mark.asyncio
YIELD_S = 10.0


async def filled(harness: Harness) -> list[Session]:
    """Open sessions with an answer in all places; return them once they are idle for long."""
    sessions = [opened(harness) for _ in range(harness.manager.live.sessions_max)]
    for number, session in enumerate(sessions):
        await answer(harness, session, b"text %d" % number)
        harness.now += 1.0
    harness.now += YIELD_S
    return sessions


async def restored(harness: Harness, *sessions: Session) -> None:
    for session in sessions:
        await harness.manager.places.restore_place(session, PlaceWait())


async def test_the_longest_idle_session_yields_and_keeps_its_handle_history_and_output() -> None:
    harness = Harness()
    first, *_ = sessions = await filled(harness)
    kept, live = first.kept_bytes, harness.manager.live
    before = harness.ledger.kept_bytes.open_bytes(1000)
    opened(harness)

    assert [live.has_yielded(s) for s in sessions] == [True, False, False]
    assert (live.places_taken, harness.manager.places.yields) == (3, 1)
    assert harness.manager.dormant.bytes == kept and not list(harness.manager.dormant)
    assert harness.ledger.kept_bytes.open_bytes(1000) < before + kept
    assert live.get_session(HERE, first.handle) is first
    assert first.read_output(0) == b"text 0"

    await restored(harness, first)
    assert not live.has_yielded(first) and live.places_taken == 3
    assert harness.manager.dormant.bytes == first.kept_bytes or harness.manager.places.yields == 2
    first.set_options({"append": True})
    await first.set_input(b" and more")
    turn = await first.start_turn(TurnOptions())
    harness.port.run()
    await first.finish_turn(turn)
    assert bytes(t for t in first.conversation.prompt if t < 256) == b"text 0text 0 and more"


async def test_no_session_yields_before_its_time_or_in_use() -> None:
    harness = Harness()
    first, second, third = await filled(harness)
    second.used_at = third.used_at = harness.now - YIELD_S + 0.5
    first.calls_under_way = 1
    with pytest.raises(Busy) as caught:
        opened(harness)
    assert caught.value.retry_after_s == 0.5, "the first place is free then"
    first.calls_under_way = 0
    await first.start_turn(TurnOptions())
    with pytest.raises(Busy):
        opened(harness)
    harness.now += 0.5
    opened(harness)


async def test_a_user_s_own_sessions_yield_at_their_own_bound() -> None:
    harness = Harness()
    harness.ledger.bounds.quota_of = lambda _: Quota(rule="r", sessions_max=1)
    session = opened(harness)
    with pytest.raises(QuotaExceeded) as caught:
        opened(harness)
    assert caught.value.data["retry_after_s"] == YIELD_S
    harness.now += YIELD_S
    opened(harness)
    assert harness.manager.live.has_yielded(session)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (DormantLimits(sessions_max=2), 2),
        (DormantLimits(bytes_max=32_000), 3),
        (DormantLimits(sessions_max=0), 0),
        (DormantLimits(bytes_max=100), 0),
        (DormantLimits(seconds_max=0.0), 0),
    ],
)
async def test_sessions_past_the_bounds_of_dormant_ones_expire(
    limits: DormantLimits, kept: int
) -> None:
    harness = Harness()
    manager, yielded = harness.manager, 0
    manager.dormant.limits = limits
    sessions = [opened(harness) for _ in range(3)]
    for _ in range(6):
        harness.now += YIELD_S
        try:
            sessions.append(opened(harness))
        except Busy:
            assert not kept
    yielded = len(sessions) - 3
    assert manager.dormant.yielded == min(kept, yielded) and manager.live.places_taken == 3
    expired = sessions[: yielded - kept] if kept else []
    for session in expired:
        with pytest.raises(SessionExpired):
            manager.live.get_session(HERE, session.handle)
    for session in sessions[len(expired) :]:
        assert manager.live.get_session(HERE, session.handle) is session
    assert manager.expired == len(expired)


async def test_a_yielded_session_expires_at_its_idle_timeout_or_becomes_dormant() -> None:
    harness = Harness(sessions_max=2)
    plain, named = opened(harness), opened(harness, session_id="diary")
    await answer(harness, named, b"dear diary")
    harness.now += YIELD_S
    opened(harness), opened(harness)
    manager = harness.manager
    assert manager.dormant.yielded == 2 and not len(manager.dormant)
    async with anyio.create_task_group() as group:
        harness.now += 300.0
        group.start_soon(manager.expire_idle)
        with anyio.fail_after(60):
            while len(manager.live):
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert list(manager.dormant) == [named] and manager.dormant.yielded == 0
    for session in (plain, named):
        with pytest.raises(SessionExpired):
            manager.live.get_session(HERE, session.handle)
    again = opened(harness, session_id="diary")
    assert again is named and manager.live.places_taken == 1


async def yielded_one(harness: Harness) -> tuple[Session, list[Session]]:
    """Return a yielded session, and those in all places, which are in use."""
    first, *others = await filled(harness)
    others.append(opened(harness))
    for session in others:
        session.calls_under_way = 1
    return first, others


async def waiting(harness: Harness, requests: int = 1) -> None:
    """Wait until so many requests wait for a place."""
    with anyio.fail_after(60):
        while len(harness.manager.places) != requests:
            await anyio.lowlevel.checkpoint()


async def test_two_calls_on_a_yielded_session_take_one_place() -> None:
    harness = Harness()
    first, others = await yielded_one(harness)
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(restored, harness, first)
        await waiting(harness, 2)
        await harness.manager.close_session(others[0])
    assert harness.manager.live.places_taken == 3 and len(harness.manager.places) == 0
    await harness.manager.close_session(others[1])
    opened(harness)
    assert harness.manager.live.places_taken == 3, "no place stays reserved"


@pytest.mark.parametrize("end", ["close", "delete", "expire"])
async def test_a_call_that_waits_returns_when_its_session_ends(end: str) -> None:
    harness = Harness()
    first, _ = await yielded_one(harness)
    async with anyio.create_task_group() as group:
        group.start_soon(restored, harness, first)
        await waiting(harness)
        if end == "close":
            await harness.manager.close_session(first)
        elif end == "delete":
            await harness.manager.delete_session(first)
        else:
            harness.manager.dormant.limits = DormantLimits(sessions_max=0)
            harness.manager.delete_excess()
    error = SessionExpired if end == "expire" else InvalidArgument
    with pytest.raises(error):
        harness.manager.live.get_session(HERE, first.handle)
    assert harness.manager.dormant.bytes == 0 and harness.manager.dormant.yielded == 0


async def test_a_cancelled_wait_passes_its_place_on() -> None:
    harness = Harness()
    first, others = await yielded_one(harness)
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(restored, harness, first)
            await waiting(harness)
            scope.cancel()
        group.cancel_scope.cancel()
    assert len(harness.manager.places) == 0
    await harness.manager.close_session(others[0])
    opened(harness)
    with pytest.raises(Busy):
        opened(harness)


async def test_a_restored_session_must_fit_its_owner_s_bound() -> None:
    harness = Harness()
    first, others = await yielded_one(harness)
    kept = harness.ledger.kept_bytes.open_bytes(1000)
    harness.ledger.bounds.session_bytes_owner_max = kept + first.kept_bytes - 1
    for session in others[1:]:
        harness.manager.discard_session(session)
    harness.ledger.bounds.session_bytes_owner_max = (
        harness.ledger.kept_bytes.open_bytes(1000) + first.kept_bytes - 1
    )
    with pytest.raises(QuotaExceeded):
        await restored(harness, first)
    assert harness.manager.live.has_yielded(first)


async def test_a_class_above_the_user_s_highest_does_not_wait() -> None:
    harness = Harness()
    harness.ledger.bounds.quota_of = lambda _: Quota(rule="r", priority_max=Priority.NORMAL)
    with pytest.raises(PermissionDenied):
        await harness.manager.open_session_in_queue(
            Opening(HERE, Owner(1000), harness.source, {}), PlaceWait(Priority.HIGH, 1.0)
        )
    assert harness.manager.live.places_taken == 0


async def test_idle_sessions_yield_to_waiting_requests_in_time() -> None:
    """Nothing happens in the daemon when a session has been idle for long enough."""
    harness = Harness()
    sessions = [opened(harness) for _ in range(3)]
    manager, done = harness.manager, anyio.Event()

    async def open_in_turn() -> None:
        await manager.open_session_in_queue(
            Opening(HERE, Owner(1000), harness.source, {}), PlaceWait()
        )
        done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(manager.expire_idle)
        group.start_soon(open_in_turn)
        await waiting(harness)
        assert manager.places.next_yield_in_s() == YIELD_S
        harness.now += YIELD_S
        sessions[0].used_at = harness.now - YIELD_S + 0.01
        sessions[1].used_at = sessions[2].used_at = harness.now
        manager.set_limits(
            sessions_max=3,
            idle_timeout_s=300.0,
            dormant_limits=manager.dormant.limits,
            place_bounds=manager.places.bounds,
        )
        assert len(manager.places) == 1
        harness.now += 0.02  # the manager's timer is the loop's
        with anyio.fail_after(60):
            await done.wait()
        group.cancel_scope.cancel()
    assert manager.live.has_yielded(sessions[0])
