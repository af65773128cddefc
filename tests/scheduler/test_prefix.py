"""Common parts of lists of tokens."""

from __future__ import annotations

from array import array

from inferd.scheduler.prefix import common_prefix, equal_runs


def test_common_prefix_counts_equal_tokens() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix(list(range(1000)), [*range(777), -1]) == 777
    assert common_prefix(array("i", [5, 6, 7]), array("i", [5, 6])) == 2


def test_equal_runs_skip_tokens_removed_from_the_middle() -> None:
    have, want = [1, 2, 30, 31, 5, 6, 7, 8], [1, 2, 5, 6, 7, 8, 9]

    assert equal_runs(have, want, keep=2, shortest=3) == [(4, 2, 4)]
    assert equal_runs(have, want, keep=2, shortest=5) == []


def test_equal_runs_follow_each_other_without_a_gap() -> None:
    have, want = [0, 99, 1, 2, 3, 98, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7]

    assert equal_runs(have, want, keep=1, shortest=2) == [(2, 1, 3), (6, 4, 3)]


def test_the_last_token_of_the_prompt_is_in_no_run() -> None:
    assert equal_runs([0, 9, 1, 2, 3], [0, 1, 2, 3], keep=1, shortest=2) == [(2, 1, 2)]
