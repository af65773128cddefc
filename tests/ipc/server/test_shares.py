"""Limits that users share: nobody can take everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.ipc.server.fairness import SharedLimit


def taken(limit: SharedLimit, uid: int) -> int:
    """Let a user take as much as possible, and return how much that is."""
    count = 0
    while limit.fits(uid, 1):
        limit.take_amount(uid, 1)
        count += 1
    return count


def test_each_user_in_turn_gets_a_part_of_what_is_free() -> None:
    assert [taken(SharedLimit(256, factor), 1) for factor in (1, 3, 7)] == [128, 192, 224]
    limit = SharedLimit(256, 7)
    assert [taken(limit, uid) for uid in range(4)] == [224, 28, 4, 0]
    limit = SharedLimit(256, 1)
    assert [taken(limit, uid) for uid in range(6)] == [128, 64, 32, 16, 8, 4]


def test_what_is_given_back_is_free_again() -> None:
    limit = SharedLimit(10)
    limit.take_amount(1, 5)
    assert not limit.fits(1, 1)
    limit.take_amount(1, -5)
    assert (limit.total, limit.largest, limit.held_by(1)) == (0, 0, 0)
    assert limit.fits(1, 5)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20))), st.integers(1, 7))
def test_the_total_stays_in_the_limit(takers: list[tuple[int, int]], factor: int) -> None:
    limit = SharedLimit(100, factor)
    for uid, amount in takers:
        if limit.fits(uid, amount):
            limit.take_amount(uid, amount)
        assert limit.total <= limit.total_max
