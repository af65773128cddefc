"""Cores among models: who gets how many threads, and who is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.daemon.cores import LOADING, Cores, deal


class Busy:
    """A worker as the cores see it."""

    def __init__(self, claim: int | None = None, threads_max: int = 8):
        self.claim, self.threads_max = claim, threads_max
        self.told: list[int] = []

    def set_threads(self, threads: int) -> None:
        self.told.append(threads)


@pytest.mark.parametrize(
    ("claims", "cores", "threads"),
    [
        ([(1, 8)], 2, [2]),
        ([(1, 8), (1, 8)], 2, [1, 1]),
        ([(1, 8), (2, 8)], 8, [1, 7]),
        ([(1, 8), (1, 8), (1, 8)], 8, [6, 1, 1]),
        ([(1, 8), (1, 8), (1, 8)], 2, [1, 1, 1]),
        ([(3, 2), (1, 8)], 8, [2, 6]),
        ([(LOADING, 8)], 8, [1]),
        ([(LOADING, 8), (0, 8)], 8, [1, 7]),
        ([], 8, []),
    ],
)
def test_the_highest_class_gets_what_one_for_each_other_leaves(
    claims: list[tuple[int, int]], cores: int, threads: list[int]
) -> None:
    assert deal(claims, cores) == threads


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 16)), max_size=20), st.integers(1, 64))
def test_nobody_goes_without_and_no_core_is_dealt_twice(
    claims: list[tuple[int, int]], cores: int
) -> None:
    threads = deal(claims, cores)
    assert all(1 <= number <= most for number, (_, most) in zip(threads, claims, strict=True))
    assert sum(threads) <= max(cores, len(claims))


def test_only_who_gets_another_number_is_told() -> None:
    one, two = Busy(1), Busy()
    workers = [one, two]
    cores = Cores(4, lambda: workers)
    cores.share()
    cores.share()
    two.claim = 3
    cores.share()
    two.claim = None
    cores.share()
    cores.share()

    assert one.told == [4, 1, 4]
    assert two.told == [3]


def test_a_worker_that_loads_is_told_when_it_has_work() -> None:
    it = Busy(LOADING)
    cores = Cores(4, lambda: [it])
    cores.share()
    assert it.told == []
    it.claim = 1
    cores.share()
    assert it.told == [4]
