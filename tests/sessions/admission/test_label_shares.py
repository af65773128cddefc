"""The part of a user's bounds that one of the user's labels may have."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import Busy, QuotaExceeded
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.settings import EngineSettings
from inferd.sessions import AdmissionBounds, Ledger, Opening, Quota
from inferd.sessions.admission.bounds import KeptBytes, OwnerCounts, Spending, Ticket, exceeds_share
from inferd.sessions.admission.forecast import Forecast
from tests.sessions.doubles import Harness

PLAIN, GUEST, OTHER = Owner(1), Owner(1, "guest"), Owner(1, "other")


def admit(ledger: Ledger, owner: Owner, count: int, tokens: int = 0) -> int:
    """Add turns until one is refused; return how many were admitted."""
    for number in range(count):
        try:
            ledger.admit_turn(Ticket(owner, "m", 1, Priority.NORMAL, tokens))
        except (Busy, QuotaExceeded):
            return number
    return count


def test_a_label_may_have_as_much_as_is_left_of_its_users_bound() -> None:
    counts = OwnerCounts()
    counts.add(GUEST, 4)
    assert not exceeds_share(counts, GUEST, 1, 9) and exceeds_share(counts, GUEST, 2, 9)
    counts.add(OTHER, 3)
    assert exceeds_share(counts, GUEST, 1, 9) and not exceeds_share(counts, Owner(1, "c"), 2, 9)
    assert not exceeds_share(counts, PLAIN, 100, 9), "the user's own bound is checked elsewhere"
    counts.add(GUEST, -4)
    counts.add(OTHER, -3)
    assert len(counts) == 0 and not counts.users()


@pytest.mark.parametrize("by_rule", [True, False])
def test_a_label_that_floods_the_queue_leaves_places_for_another(by_rule: bool) -> None:
    ledger = Ledger(AdmissionBounds(1000, 1000 if by_rule else 8))
    rule = Quota(rule="r", tasks_waiting_max=8)
    ledger.bounds.quota_of = lambda user: rule if by_rule and user == 1 else Quota()
    assert admit(ledger, GUEST, 100) == 4
    with pytest.raises((Busy, QuotaExceeded)) as caught:
        ledger.admit_turn(Ticket(GUEST, "m", 1, Priority.NORMAL, 0))
    assert "'guest', of 4 of your user)" in caught.value.message and caught.value.hint
    assert admit(ledger, OTHER, 100) == 2
    assert admit(ledger, PLAIN, 100) == 2, "the user's bound holds for all labels together"
    assert admit(ledger, Owner(2), 100) == (100 if by_rule else 8)


def test_prompts_of_a_label_leave_space_for_those_of_another() -> None:
    ledger = Ledger(AdmissionBounds(1000, 1000, 10_000, 80))
    assert admit(ledger, GUEST, 100, tokens=10) == 4
    assert admit(ledger, OTHER, 100, tokens=10) == 2


def test_a_thousand_labels_have_no_more_than_their_user() -> None:
    ledger = Ledger(AdmissionBounds(1000, 50))
    admitted = sum(admit(ledger, Owner(1, f"label{n}"), 1) for n in range(1000))
    assert admitted == 50 and admit(ledger, Owner(2), 1) == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from("abcd"), st.integers(0, 300)), max_size=30
    )
)
def test_the_predicted_order_takes_the_user_and_then_the_label_with_the_fewest_tokens(
    turns: list[tuple[int, str, int]],
) -> None:
    forecast = Forecast(EngineSettings())
    tickets = [Ticket(Owner(u, label), "m", 1, Priority.NORMAL, size) for u, label, size in turns]
    arrivals = [ticket.owner for ticket in tickets]
    clock, waiting, expected = OwnerClock(), list(tickets), []
    while waiting:
        first = min(waiting, key=lambda t: (clock.served(t.owner), arrivals.index(t.owner)))
        waiting.remove(first)
        expected.append(first)
        clock.count_work(first.owner, forecast._computed_at_end(first))

    assert forecast.slot_order(tickets, time.monotonic()) == expected


def test_the_order_of_many_labels_takes_as_long_as_that_of_many_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn of a label once moved all others of its user: 0.1 s of the loop for each refusal."""
    served, calls = OwnerClock.served, list[Owner]()

    def count_call(self: OwnerClock, owner: Owner) -> tuple[int, int]:
        calls.append(owner)
        return served(self, owner)

    monkeypatch.setattr(OwnerClock, "served", count_call)
    labels = [Owner(1, f"label{n}") for n in range(400)]
    users = [Owner(n) for n in range(400)]
    for owners in (labels, users):
        calls.clear()
        tickets = [Ticket(owner, "m", 1, Priority.NORMAL, 1) for owner in owners]
        Forecast(EngineSettings()).slot_order(tickets, time.monotonic())
        assert 400 <= len(calls) <= 3 * 400


def test_a_label_spends_half_of_the_tokens_at_once_and_its_user_no_more_than_all() -> None:
    spending, quota, none = Spending(), Quota(rule="r", tokens_per_minute=600), OwnerCounts()
    spending.add(GUEST, quota, 300, 0.0)
    with pytest.raises(QuotaExceeded, match="300 of them as 'guest'") as caught:
        spending.check(GUEST, quota, none, 0.0)
    spending.check(OTHER, quota, none, 0.0)
    spending.check(PLAIN, quota, none, 0.0)
    spending.check(GUEST, quota, none, caught.value.retry_after_s)
    spending.add(OTHER, quota, 300, 0.0)
    for owner in (PLAIN, Owner(1, "third")):
        with pytest.raises(QuotaExceeded):
            spending.check(owner, quota, none, 0.0)
    spending.check(Owner(2, "guest"), quota, none, 0.0)


def test_bytes_of_a_label_leave_some_for_another() -> None:
    kept = KeptBytes(AdmissionBounds(1, 1, session_bytes_owner_max=100))
    kept.add_holder("s", GUEST, 40)
    kept.check_growth(GUEST, 20)
    with pytest.raises(QuotaExceeded, match="for labels other than 'guest'"):
        kept.check_growth(GUEST, 21)
    kept.check_growth(OTHER, 60)
    kept.check_growth(PLAIN, 60)
    with pytest.raises(QuotaExceeded):
        kept.check_growth(PLAIN, 61)


def test_sessions_of_a_label_leave_some_for_another_and_have_their_own_ids() -> None:
    harness = Harness(sessions_max=4)

    def opened(owner: Owner, session_id: str) -> bool:
        session, attached = harness.manager.open_session(
            Opening("c", owner, harness.source, {}, session_id)
        )
        assert session.owner == owner
        return attached

    assert not opened(GUEST, "diary") and not opened(GUEST, "other")
    with pytest.raises(QuotaExceeded, match="2 of them as 'guest'; the limit is 4") as caught:
        opened(GUEST, "third")
    assert (caught.value.data["bound"], caught.value.data["sessions_max"]) == ("sessions-max", 4)
    assert not opened(OTHER, "diary") and not opened(PLAIN, "diary")
    names = {session.name for session in harness.manager.live}
    assert len(names) == 4, "their KV states are deleted one by one"


@pytest.mark.asyncio
async def test_a_session_is_attached_and_deleted_only_by_its_label() -> None:
    harness = Harness()
    harness.manager.open_session(Opening("gone", GUEST, harness.source, {}, "diary"))
    harness.manager.close_connection("gone")
    for owner in (OTHER, PLAIN, Owner(2, "guest"), Owner(2)):
        assert not await harness.manager.delete_session_by_id(owner, "diary")
        session, attached = harness.manager.open_session(
            Opening("c", owner, harness.source, {}, "diary")
        )
        assert not attached
        await harness.manager.delete_session(session)
    assert harness.manager.open_session(Opening("c", GUEST, harness.source, {}, "diary"))[1]
