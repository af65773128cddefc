"""Bounded mappings."""

from __future__ import annotations

from inferd.backends.recent_dict import RecentDict


def test_the_entries_assigned_last_stay() -> None:
    found = RecentDict[str, int](2)
    found["a"], found["b"] = 1, 2
    assert found["a"] == 1  # which does not make it younger
    found["c"] = 3
    assert list(found.items()) == [("b", 2), ("c", 3)]
    found["b"] = 4
    found["d"] = 5
    assert list(found.items()) == [("b", 4), ("d", 5)]


def test_a_mapping_that_may_hold_nothing_is_empty() -> None:
    found = RecentDict[str, int](0)
    found["a"] = 1
    assert not found
