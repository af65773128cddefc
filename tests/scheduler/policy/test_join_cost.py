"""The decision how many rows of a graph are joined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from inferd.scheduler.policy.join_cost import JOINED_S_MAX, KEYS_MAX, STALE_RUNS, JoinCost

Seconds = Callable[[int], float]
KEY = ((8,),)


def matrix(rows: int) -> float:
    """The time of a network whose weights are read once for all rows."""
    return 1e-3 + 1e-4 * rows


def convolution(rows: int) -> float:
    return 1e-3 * rows


def run(cost: JoinCost, seconds: Seconds, available: int, count: int, own: int = 1) -> list[int]:
    """Compute *count* times with so many rows available; return the rows of each time."""
    found = []
    for _ in range(count):
        rows = cost.rows_to_join(KEY, own, available)
        cost.note_run(KEY, rows, seconds(rows))
        found.append(rows)
    return found


def test_the_first_computation_is_alone_and_rows_of_matrix_work_are_joined() -> None:
    assert run(JoinCost(), matrix, 16, 5) == [1, 16, 16, 16, 16]


def test_rows_that_are_much_work_by_themselves_are_joined_once() -> None:
    assert run(JoinCost(), convolution, 16, 5) == [1, 16, 1, 1, 1]


def test_the_smaller_number_is_used_if_the_larger_one_pays_less() -> None:
    def seconds(rows: int) -> float:
        return matrix(rows) if rows < 16 else convolution(rows)

    cost = JoinCost()
    assert run(cost, seconds, 4, 3) == [1, 4, 4]
    assert run(cost, seconds, 16, 3) == [16, 7, 7]


def test_of_two_numbers_that_pay_alike_the_smaller_one_is_used() -> None:
    def seconds(rows: int) -> float:
        return 1e-3 * rows * (1 if rows == 1 else 0.93 if rows < 4 else 0.91)

    cost = JoinCost()
    assert run(cost, seconds, 3, 3) == [1, 3, 3]
    assert run(cost, seconds, 7, 3) == [7, 3, 3]


def test_times_that_are_old_are_measured_again() -> None:
    cost = JoinCost()
    assert run(cost, convolution, 4, STALE_RUNS + 4).count(4) == 2
    assert set(run(cost, matrix, 4, 2 * STALE_RUNS + 20)[-10:]) == {4}
    assert run(cost, matrix, 4, STALE_RUNS).count(1) == 1, "single ones are measured again, too"


def test_rows_that_never_pay_are_joined_ever_more_rarely() -> None:
    cost = JoinCost()
    begun = [n for n, rows in enumerate(run(cost, convolution, 4, 45 * STALE_RUNS)) if rows == 4]
    waits = [round((b - a) / STALE_RUNS) for a, b in itertools.pairwise(begun)]
    assert waits == [1, 2, 4, 8, 16]
    assert set(run(cost, matrix, 4, 17 * STALE_RUNS)[-10:]) == {4}, "it pays now"


def test_a_joined_computation_that_failed_is_not_repeated_soon() -> None:
    cost = JoinCost()
    run(cost, matrix, 1, 1)
    cost.note_run(KEY, 8, math.inf)
    assert run(cost, matrix, 8, 5) == [1] * 5
    cost.note_run(KEY, 8, matrix(8))
    assert run(cost, matrix, 8, 2) == [8, 8], "a later success counts"


def test_a_joined_computation_is_expected_to_end_within_its_time() -> None:
    cost = JoinCost()
    assert run(cost, lambda rows: 0.05 * rows, 32, 2) == [1, int(JOINED_S_MAX / 0.05)]
    slow = JoinCost()
    assert run(slow, lambda rows: 1.0 * rows, 32, 3) == [1, 1, 1]


@pytest.mark.parametrize("own", [1, 3, 8, 40])
def test_never_fewer_rows_are_computed_than_one_input_has(own: int) -> None:
    for available in range(own, 70):
        cost = JoinCost()
        for rows in run(cost, matrix, available, 6, own):
            assert own <= rows <= available


def test_shapes_have_times_of_their_own_and_the_oldest_are_forgotten() -> None:
    cost = JoinCost()
    cost.note_run("a", 1, 1e-3)
    assert cost.rows_to_join("a", 1, 8) == 8
    assert cost.rows_to_join("b", 1, 8) == 1, "no single one is known"
    for number in range(KEYS_MAX):
        cost.note_run(number, 1, 1e-3)
    assert cost.rows_to_join("a", 1, 8) == 1
