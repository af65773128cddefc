"""The bound on events that one user can cause."""

from __future__ import annotations

from inferd.daemon.logs.setup import EVENTS_MAX, INTERVAL_S, RepeatLimit

ADA, BOB = 1, 2


def test_a_user_causes_few_logged_events_in_an_interval() -> None:
    limit = RepeatLimit()
    counted = [limit.count_event(ADA, 0.1 * n) for n in range(100)]
    assert counted == [0] * EVENTS_MAX + [None] * (100 - EVENTS_MAX)
    assert limit.count_event(BOB, 10.0) == 0, "each user has their own"


def test_the_first_event_of_the_next_interval_has_the_number_of_omitted_ones() -> None:
    limit = RepeatLimit()
    for _ in range(50):
        limit.count_event(ADA, 5.0)
    assert limit.count_event(ADA, 5.0 + INTERVAL_S) == 50 - EVENTS_MAX
    assert limit.count_event(ADA, 6.0 + INTERVAL_S) == 0
