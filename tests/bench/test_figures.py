"""The bench's figures: from the clients' streams to ratios and targets."""

from __future__ import annotations

import random

import pytest

from bench.runs import Figure, Run, Target, over_rounds, reached, typical
from bench.streams import (
    CACHED_TOKENS_MAX,
    Stream,
    by_label,
    check_cold,
    check_complete,
    computed_twice,
    gap_worst_s,
    makespan_s,
    percentile,
)
from bench.texts import mark, story


def stream(requested_s: float = 0.0, *arrivals_s: float, **fields: int | str) -> Stream:
    values: dict[str, int | str] = {
        "tokens": len(arrivals_s),
        "tokens_requested": len(arrivals_s),
        **fields,
    }
    return Stream(requested_s, arrivals_s, **values)  # type: ignore[arg-type]


def test_a_makespan_goes_from_the_first_request_to_the_last_piece() -> None:
    assert makespan_s([stream(2, 3, 9), stream(1, 4), stream(5, 6, 7)]) == 8


def test_gaps_count_where_they_touch_the_given_time() -> None:
    streams = [stream(0, 1, 5, 6, 6.5, 20)]
    assert gap_worst_s(streams, 0.0, 30.0) == 13.5
    assert gap_worst_s(streams, 4.0, 6.2) == 4
    assert gap_worst_s(streams, 5.5, 6.0) == 1
    assert gap_worst_s(streams, 21.0, 30.0) == 0


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3, 1, 2], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 2, 3, 3]
    assert [percentile(range(1, 101), share) for share in (0.5, 0.99, 0.991)] == [50, 99, 100]
    assert percentile([], 0.5) == 0


def test_a_history_computed_except_for_its_last_token_is_computed_once() -> None:
    first = stream(0, 1, 2, 3, tokens=3, input_tokens=50)
    whole = stream(4, 5, tokens=1, input_tokens=60, cached_tokens=52)
    half = stream(6, 7, tokens=1, input_tokens=70, cached_tokens=30)
    assert computed_twice([first]) == 0
    assert computed_twice([first, whole]) == 0
    assert computed_twice([first, whole, half]) == 30


def test_turns_of_a_label_are_in_the_order_of_their_requests() -> None:
    early, late = stream(0, 1, label="a"), stream(2, 3, label="a")
    assert by_label([late, stream(1, 2, label="b"), early])["a"] == [early, late]


def test_a_run_with_an_answer_cut_short_is_refused() -> None:
    check_complete([stream(0, 1, 2)])
    with pytest.raises(AssertionError, match="1 tokens, not 2"):
        check_complete([stream(0, 1, tokens=1, tokens_requested=2)])
    with pytest.raises(AssertionError, match="Busy"):
        check_complete([stream(0, error="Busy")])


def test_a_run_with_a_cached_prompt_is_refused() -> None:
    check_cold([stream(0, 1, cached_tokens=CACHED_TOKENS_MAX)])
    with pytest.raises(AssertionError, match="from a cache"):
        check_cold([stream(0, 1, cached_tokens=CACHED_TOKENS_MAX + 1)])


def test_serials_next_to_each_other_differ_in_their_first_digit() -> None:
    assert {mark(n)[0] for n in range(10)} == set("0123456789")
    assert (mark(12), mark(7, 2)) == ("2100", "70")


def test_a_story_has_the_requested_number_of_words() -> None:
    assert len(story(random.Random(1), 123).split()) == 123


def runs(side: str, *values: float, case: int = 0) -> list[Run]:
    return [Run(side, case, n, {"s": v, "lost": v}) for n, v in enumerate(values, 1)]


FIGURES = (Figure("s", "seconds"), Figure("lost", "lost", over="max"))


def test_the_median_counts_and_the_largest_where_every_run_must_hold() -> None:
    counted = over_rounds(runs("a", 1, 9, 2), FIGURES)
    assert counted == {(0, "a"): {"s": 2, "lost": 9}}


def test_targets_are_figures_or_ratios_within_a_case() -> None:
    counted = over_rounds([*runs("a", 6), *runs("b", 3), *runs("b", 12, case=4)], FIGURES)
    assert reached(counted, Target("s", "a")) == 6
    assert reached(counted, Target("s", "a", "b")) == 2
    assert reached(counted, Target("s", "a", "b", case=4)) is None
    assert reached(counted, Target("s", "b", "a", case=4)) is None


def test_a_target_is_met_at_its_bound() -> None:
    least, most = Target("s", "a", least=6.5), Target("s", "a", most=0)
    assert (least.met(6.5), least.met(6.49), most.met(0), most.met(1)) == (True, False, True, False)
    assert (least.bound(), most.bound(), Target("s", "a").bound()) == ("≥ 6.5", "≤ 0", "")


def test_the_picture_shows_the_median_run() -> None:
    assert typical(runs("a", 5, 1, 3), (0, "a"), "s").round == 3
