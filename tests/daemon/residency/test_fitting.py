"""Sets of models that do not fit into the memory together."""

from __future__ import annotations

import pytest

from inferd.daemon.residency.plan import (
    MODELS_SEARCHED_MAX,
    SET_SIZE_MAX,
    SETS_MAX,
    sets_too_large,
)


@pytest.mark.parametrize(
    ("needs", "budget", "found"),
    [
        ({}, 10, []),
        ({"a": 10}, 10, []),
        ({"a": 11}, 10, [("a",)]),
        ({"a": 4, "b": 6}, 10, []),
        ({"a": 5, "b": 6}, 10, [("b", "a")]),
        ({"a": 11, "b": 1}, 10, [("a",)]),
        (
            {"a": 6, "b": 5, "c": 4},
            10,
            [
                ("a", "b"),
            ],
        ),
        ({"a": 4, "b": 4, "c": 4}, 10, [("a", "b", "c")]),
        ({"a": 8, "b": 3, "c": 3}, 10, [("a", "b"), ("a", "c")]),
    ],
)
def test_the_smallest_sets_that_exceed_the_budget_are_found(
    needs: dict[str, int], budget: int, found: list[tuple[str, ...]]
) -> None:
    assert sets_too_large(needs, budget) == found


def test_larger_sets_are_only_found_as_all_models_together() -> None:
    needs = {f"m{n}": 1 for n in range(SET_SIZE_MAX + 1)}
    assert sets_too_large(needs, SET_SIZE_MAX) == [tuple(needs)]


def test_the_search_is_bounded() -> None:
    needs = {f"m{n:03}": 6 for n in range(500)}
    found = sets_too_large(needs, 10)
    assert len(found) == SETS_MAX and found[0] == ("m000", "m001")
    fitting = {f"m{n:03}": 1 for n in range(500)}
    assert sets_too_large(fitting, 500) == []
    assert [len(names) for names in sets_too_large(fitting, 499)] == [500]
    assert MODELS_SEARCHED_MAX < 500
