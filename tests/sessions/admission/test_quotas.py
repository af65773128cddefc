"""Quotas of one user: tokens a minute, waiting tasks, sessions, a highest priority."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from inferd.backends.errors import Busy, PermissionDenied, QuotaExceeded
from inferd.scheduler.messages import TurnStats
from inferd.scheduler.owner import Owner, Priority
from inferd.sessions import (
    AdmissionBounds,
    DormantLimits,
    Ledger,
    Opening,
    Quota,
    TurnOptions,
    check_priority,
)
from inferd.sessions.admission import bounds as quotas
from inferd.sessions.admission.bounds import NO_QUOTA, OwnerCounts, Spending, Ticket
from inferd.sessions.table import SessionState
from tests.sessions.doubles import Harness

A_MINUTE = Quota(rule="r", tokens_per_minute=60)
"""A token a second."""
SOON_S = 0.002
"""The predicted retry is at most a millisecond after the moment itself."""


def refused_for_s(spending: Spending, quota: Quota, now: float, under_way: int = 0) -> float:
    """Return the seconds after which a refused turn may retry; 0: it is admitted."""
    counts = OwnerCounts()
    counts.add(Owner(1), under_way)
    try:
        spending.check(Owner(1), quota, counts, now)
    except QuotaExceeded as exc:
        return exc.retry_after_s
    return 0.0


@pytest.mark.parametrize("spent", [60, 61, 90, 1000, 12345])
@pytest.mark.parametrize("limit", [1, 7, 60, 997, 1_000_000])
def test_a_refusal_has_the_first_moment_of_admission(limit: int, spent: int) -> None:
    spending, quota = Spending(), Quota(rule="r", tokens_per_minute=limit)
    began = 1234.5
    spending.add(Owner(1), quota, limit + spent, began)

    predicted_s = refused_for_s(spending, quota, began)

    assert predicted_s == pytest.approx((spent + 1) * 60 / limit, abs=SOON_S)
    assert refused_for_s(spending, quota, began + predicted_s - SOON_S) > 0
    assert refused_for_s(spending, quota, began + predicted_s) == 0


def test_a_user_with_one_token_left_is_admitted_and_pays_the_rest_later() -> None:
    spending = Spending()
    spending.add(Owner(1), A_MINUTE, 59, 0.0)
    assert refused_for_s(spending, A_MINUTE, 0.0) == 0
    spending.add(Owner(1), A_MINUTE, 121, 0.0)
    assert refused_for_s(spending, A_MINUTE, 0.0) == pytest.approx(121, abs=SOON_S)


def test_what_was_saved_in_quiet_times_is_one_minutes_tokens_and_no_more() -> None:
    spending = Spending()
    spending.add(Owner(1), A_MINUTE, 1, 0.0)
    spending.add(Owner(1), A_MINUTE, 60, 86_400.0)
    assert refused_for_s(spending, A_MINUTE, 86_400.0) == pytest.approx(1, abs=SOON_S)


def test_what_turns_under_way_take_counts_before_they_end() -> None:
    spending = Spending()
    assert refused_for_s(spending, A_MINUTE, 0.0, under_way=59) == 0
    assert refused_for_s(spending, A_MINUTE, 0.0, under_way=60) > 0


def test_a_refusal_has_the_numbers_and_says_where_the_bound_is() -> None:
    spending = Spending()
    spending.add(Owner(1), A_MINUTE, 70, 0.0)
    with pytest.raises(QuotaExceeded, match=r"70 tokens; the limit is 60 a minute") as caught:
        spending.check(Owner(1), A_MINUTE, OwnerCounts(), 0.0)
    error = caught.value
    assert isinstance(error, Busy) and error.retryable
    assert error.data == {
        "bound": "access.r.tokens-per-minute",
        "tokens": 70,
        "tokens_per_minute": 60,
        "retry_after_s": error.retry_after_s,
    }
    assert f"{error.retry_after_s:g} s" in error.hint


def test_another_limit_holds_at_once() -> None:
    spending = Spending()
    spending.add(Owner(1), A_MINUTE, 90, 0.0)
    assert refused_for_s(spending, Quota(tokens_per_minute=91), 0.0) == 0
    assert refused_for_s(spending, NO_QUOTA, 0.0) == 0


def test_users_do_not_spend_each_others() -> None:
    spending = Spending()
    spending.add(Owner(2), A_MINUTE, 1000, 0.0)
    assert refused_for_s(spending, A_MINUTE, 0.0) == 0


def test_who_misses_nothing_is_forgotten_and_no_more_than_so_many_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "_OWNERS_MAX", 4)
    spending = Spending()
    spending.add(Owner(1), A_MINUTE, 5, 0.0)
    spending.add(Owner(1), A_MINUTE, -5, 0.0)
    assert len(spending) == 0
    for user in range(4):
        spending.add(Owner(user), A_MINUTE, 600, 0.0)
    spending.add(Owner(4), A_MINUTE, 600, 1.0)
    assert len(spending) == 4, "who has spent nothing for longest is let off"
    for user in range(10, 13):
        spending.add(Owner(user), A_MINUTE, 600, 700.0)
    assert len(spending) == 3, "those before have everything back"
    spending.add(Owner(20), NO_QUOTA, 600, 700.0)
    assert len(spending) == 3, "who has no bound is not counted"


@pytest.mark.parametrize(("highest", "priority"), list(combinations(Priority, 2)))
def test_a_class_above_the_highest_is_refused_and_the_highest_named(
    highest: Priority, priority: Priority
) -> None:
    quota = Quota(priority_max=highest)
    check_priority(quota, highest)
    with pytest.raises(PermissionDenied, match=f"class {priority.label}") as caught:
        check_priority(quota, priority)
    assert caught.value.hint.startswith(f"use {highest.label}, ")
    assert caught.value.data == {"priority_max": highest.label}


# In the ledger.


class Book:
    """A ledger with a clock, where user 1 has a quota."""

    def __init__(self, **quota: Any):
        self.now = 100.0
        self.ledger = Ledger(AdmissionBounds(100, 100), lambda: self.now)
        self.quota = Quota(rule="r", **quota)
        self.ledger.bounds.quota_of = lambda owner: self.quota if owner == 1 else NO_QUOTA

    def ticket(
        self,
        owner: int = 1,
        prompt: int = 10,
        priority: Priority = Priority.NORMAL,
        *,
        quota_checked: bool = False,
    ) -> Ticket:
        ticket = Ticket(Owner(owner), "m", 1, priority, prompt, quota_checked=quota_checked)
        self.ledger.admit_turn(ticket)
        return ticket

    def end(self, ticket: Ticket, output: int, prompt: int = 10, cached: int = 0) -> None:
        ticket.output = range(output)
        self.ledger.move_ticket(ticket, SessionState.RUNNING)
        self.ledger.move_ticket(ticket, SessionState.DONE)
        stats = TurnStats(
            stop_reason="eos", prompt_tokens=prompt, cached_tokens=cached, output_tokens=output
        )
        self.ledger.charge_turn(ticket, stats)

    def retry_after_s(self) -> float:
        """Return the error of a refused turn."""
        with pytest.raises(QuotaExceeded) as caught:
            self.ticket()
        return caught.value.retry_after_s


def test_prompt_and_answer_count_less_what_was_cached() -> None:
    book = Book(tokens_per_minute=60)
    book.end(book.ticket(prompt=50), output=20, prompt=50, cached=40)
    book.end(book.ticket(prompt=10), output=29)
    assert book.retry_after_s() == pytest.approx(10, abs=SOON_S)
    book.now += 10 + SOON_S
    book.ticket()


def test_a_turn_that_runs_goes_on_and_those_after_it_wait() -> None:
    book = Book(tokens_per_minute=60)
    running = book.ticket(prompt=10)
    said: list[int] = []
    running.output = said
    book.ledger.move_ticket(running, SessionState.RUNNING)
    said += range(49)
    second = book.ticket(prompt=10)
    assert book.retry_after_s() > 0
    book.ledger.move_ticket(second, SessionState.FAILED)
    said += range(1000)
    assert running.state is SessionState.RUNNING
    assert book.retry_after_s() > 900


def test_a_turn_that_never_ran_costs_nothing_and_one_that_was_cancelled_what_it_has_taken() -> None:
    book = Book(tokens_per_minute=60)
    waits = book.ticket(prompt=59)
    book.ledger.move_ticket(waits, SessionState.FAILED)
    assert len(book.ledger.spending) == 0
    runs = book.ticket(prompt=59)
    runs.output = range(11)
    book.ledger.move_ticket(runs, SessionState.RUNNING)
    book.ledger.move_ticket(runs, SessionState.FAILED)
    assert book.retry_after_s() == pytest.approx(11, abs=SOON_S)


def test_what_an_earlier_turn_has_computed_is_not_counted_twice() -> None:
    book = Book(tokens_per_minute=60)
    resumed = book.ticket(prompt=10)
    resumed.resumed_tokens = 45
    book.end(resumed, output=50)
    book.ticket(prompt=0)


def test_more_turns_of_a_call_that_was_admitted_are_not_refused() -> None:
    book = Book(tokens_per_minute=60)
    book.end(book.ticket(), output=100)
    book.retry_after_s()
    book.ticket(quota_checked=True)


def test_a_turn_that_waited_for_its_model_is_not_refused_in_the_end() -> None:
    book = Book(tokens_per_minute=60)
    waited = Ticket(Owner(1), "m", 1, Priority.NORMAL, 0)
    book.ledger.add_ticket(waited)
    book.ledger.spending.add(Owner(1), book.quota, 1000, book.now)
    book.ledger.model_loaded(waited)
    book.ticket()
    book.retry_after_s()


def test_tasks_waiting_are_bounded_for_the_user_alone() -> None:
    book = Book(tasks_waiting_max=2)
    book.ticket()
    book.ticket()
    with pytest.raises(QuotaExceeded, match=r"2 tasks wait \(yours\); the limit is 2") as caught:
        book.ticket()
    assert caught.value.data["bound"] == "access.r.tasks-waiting-max"
    assert caught.value.data["queue_length"] == 2
    assert caught.value.retry_after_s >= 0.1
    for _ in range(5):
        book.ticket(owner=2)


def test_the_class_of_a_session_from_before_the_rule_is_looked_at_when_it_begins_a_turn() -> None:
    book = Book(priority_max=Priority.NORMAL)
    book.ticket(priority=Priority.NORMAL)
    with pytest.raises(PermissionDenied, match="class high"):
        book.ticket(priority=Priority.HIGH)
    book.ticket(owner=2, priority=Priority.URGENT)
    assert book.ledger.waiting.tasks.total() == 2


# Sessions.


def opened(
    harness: Harness, owner: int, session_id: str | None = None, home: str = "here"
) -> object:
    return harness.manager.open_session(
        Opening(home, Owner(owner), harness.source, {}, session_id)
    )[0]


def harness_with(sessions: int) -> Harness:
    harness = Harness(sessions_max=10)
    quota = Quota(rule="r", sessions_max=sessions)
    harness.ledger.bounds.quota_of = lambda owner: quota if owner == 1 else NO_QUOTA
    return harness


def test_the_refusal_of_a_session_says_when_the_users_first_one_expires() -> None:
    harness = harness_with(2)
    harness.manager.dormant.limits = DormantLimits(sessions_max=0)  # none may yield its place
    opened(harness, 2)
    harness.now = 100.0
    opened(harness, 1)
    harness.now = 130.0
    opened(harness, 1)
    with pytest.raises(QuotaExceeded, match="you have 2 sessions open; the limit is 2") as caught:
        opened(harness, 1)
    assert caught.value.data == {
        "bound": "access.r.sessions-max",
        "sessions": 2,
        "sessions_max": 2,
        "retry_after_s": 270.0,
    }, "the user's first session expires at 400; that of the other user does not count"
    opened(harness, 2)
    assert len(harness.manager.live) == 4


def test_branches_and_sessions_that_are_come_back_to_count() -> None:
    harness = harness_with(2)
    harness.manager.open_session(Opening("gone", Owner(1), harness.source, {}, "diary"))
    harness.manager.close_connection("gone")
    first, _ = harness.manager.open_session(Opening("here", Owner(1), harness.source, {}))
    with pytest.raises(QuotaExceeded):
        harness.manager.fork_session("here", first, 2)
    assert len(harness.manager.live) == 1, "all branches, or none"
    harness.manager.fork_session("here", first, 1)
    with pytest.raises(QuotaExceeded):
        opened(harness, 1, "diary")
    assert len(harness.manager.dormant) == 1, "it sleeps on"


@pytest.mark.asyncio
async def test_a_session_s_turns_are_counted_to_their_end() -> None:
    harness = harness_with(9)
    quota = Quota(rule="r", tokens_per_minute=60)
    harness.ledger.bounds.quota_of = lambda _: quota
    session, _ = harness.manager.open_session(Opening("here", Owner(1), harness.source, {}))
    await session.set_input(b"x" * 40)
    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    assert turn.stats is not None
    took = turn.stats.prompt_tokens - turn.stats.cached_tokens + turn.stats.output_tokens
    assert took >= 80, "the echo repeats its input"
    with pytest.raises(QuotaExceeded) as caught:
        await session.start_turn(TurnOptions())
    assert caught.value.data["tokens"] == took
    harness.now += caught.value.retry_after_s
    await session.start_turn(TurnOptions())


@pytest.mark.asyncio
async def test_a_turn_that_is_resumed_counts_what_is_computed_again_and_what_is_new() -> None:
    harness = harness_with(9)
    quota = Quota(rule="r", tokens_per_minute=1000)
    harness.ledger.bounds.quota_of = lambda _: quota
    session, _ = harness.manager.open_session(
        Opening("gone", Owner(1), harness.source, {}, "diary")
    )
    await session.set_input(b"abcdefghij")
    await session.start_turn(TurnOptions(credit=3))
    harness.port.run()
    harness.manager.close_connection("gone")
    back, _ = harness.manager.open_session(Opening("here", Owner(1), harness.source, {}, "diary"))
    turn = await back.resume_turn(TurnOptions(), [], b"")
    harness.port.run()
    assert turn.stats is not None and bytes(turn.text) == b"abcdefghij"
    with pytest.raises(QuotaExceeded) as caught:
        harness.ledger.spending.check(
            Owner(1), Quota(tokens_per_minute=1), OwnerCounts(), harness.now
        )
    prompt, said = len(back.conversation.prompt), len(turn.tokens)
    assert caught.value.data["tokens"] == prompt + 3 + prompt + said - 3
