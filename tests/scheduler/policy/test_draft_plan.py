"""The number of drafts of each stream, decided without a model or a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec import structs

from inferd.scheduler.policy.cost import StepCost, StepLoad
from inferd.scheduler.policy.draft_plan import (
    DRAFT_MAX,
    NO_PROMPTS,
    POSITIONS,
    REST_MIN,
    SIZES,
    STREAMS_MAX,
    Acceptance,
    DraftPlan,
    PromptChunks,
    StepBounds,
    StepTimes,
    StreamOffer,
    passes_of,
    pays_to_catch_up,
    plan_drafts,
    saving_s,
)

CPU_ROWS = {
    **{1: 1.0, 2: 1.87, 3: 2.46, 4: 2.98, 5: 3.72, 6: 4.32, 8: 4.95},
    **{12: 7.03, 16: 9.01, 24: 13.4, 32: 17.2},
}
"""SmolLM2-135M Q4_1 on one thread: the time of a pass by its tokens, 1 being a decode."""


def learned(rows: dict[int, float], second: float = 0.01) -> Callable[[int], float]:
    """Return the cost of a pass as a worker learns it from steps of these sizes."""
    cost = StepCost()
    for size, factor in sorted(rows.items()):
        for _ in range(20):
            chunks = [(0, 1)] * size
            cost.learn_step(StepLoad.of_chunks(chunks), factor * second)
    return cost.logits_pass_s


def gpu(tokens: int) -> float:
    """Passes are nearly free in their tokens: 5 ms, and 10 us for each."""
    return 0.005 + 1e-5 * tokens


def stream(rate: float, limit: int = 16, level: int = 1, pending: int = 1) -> StreamOffer:
    """Return a stream whose drafts are accepted at *rate* each."""
    expected, chance, total = [], 1.0, 0.0
    for _ in range(limit):
        chance *= rate
        total += chance
        expected.append(total)
    return StreamOffer(pending, 100, limit, expected, level)


def silent(drafts_max: int = 16) -> StreamOffer:
    """Return a stream without a proposal."""
    return StreamOffer(1, 100, drafts_max)


def decide(
    streams: Sequence[StreamOffer],
    pass_s: Callable[[int], float],
    seconds_max: float = 10.0,
    tokens_max: int = 1000,
    position_s: float = 0.0,
    prompts: PromptChunks = NO_PROMPTS,
    longer_s: float = 0.0,
) -> DraftPlan:
    times = StepTimes(pass_s, position_s, prompts)
    return plan_drafts(streams, times, StepBounds(seconds_max, tokens_max, longer_s))


def counts(*streams: StreamOffer, pass_s: Callable[[int], float], **bounds: object) -> list[int]:
    return decide(streams, pass_s, **bounds).counts  # type: ignore[arg-type]


def test_where_tokens_are_nearly_free_long_drafts_are_chosen_even_for_free_text() -> None:
    assert counts(stream(0.3, DRAFT_MAX), pass_s=gpu) >= [4]
    assert counts(stream(0.8, DRAFT_MAX), pass_s=gpu) >= [16]
    assert counts(stream(1.0, DRAFT_MAX), pass_s=gpu) == [DRAFT_MAX - 1]
    assert decide([stream(0.8)], gpu).slowdown < 1.1


def test_on_a_cpu_free_text_has_no_drafts_and_a_copied_text_has_many() -> None:
    cpu = learned(CPU_ROWS)
    for rate in (0.05, 0.3, 0.5, 0.6, 0.7):
        assert counts(stream(rate), pass_s=cpu) == [0]
    assert counts(stream(0.9), pass_s=cpu) >= [3]
    assert counts(stream(1.0), pass_s=cpu) == [15]
    assert counts(stream(1.0, 6), pass_s=cpu) == [5], "as many as there are proposals"
    assert decide([stream(1.0)], cpu).slowdown == pytest.approx(9.0, abs=0.2)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("streams", [1, 2, 4, 16])
@pytest.mark.parametrize("pass_s", [gpu, learned(CPU_ROWS)])
def test_what_is_chosen_is_expected_to_be_faster_for_every_stream(
    rate: float, streams: int, pass_s: Callable[[int], float]
) -> None:
    offers = [stream(rate if n % 2 == 0 else rate / 2) for n in range(streams)]
    plan = decide(offers, pass_s)
    lengths = [1 + n for n in plan.counts]
    before, after = pass_s(streams), sum(map(pass_s, passes_of(lengths)))
    assert plan.slowdown == pytest.approx(after / before if any(plan.counts) else 1.0)
    for offer, count in zip(offers, plan.counts, strict=True):
        assert (1 + offer.gain(count)) / plan.slowdown >= 0.98


def test_a_stream_without_a_proposal_does_not_pay_for_the_drafts_of_others() -> None:
    """On the CPU, a pass with more tokens takes longer, and a second pass, too."""
    cpu = learned(CPU_ROWS)
    assert counts(stream(1.0), pass_s=cpu) == [15]
    assert counts(stream(1.0), silent(), pass_s=cpu) == [0, 0]
    assert counts(stream(1.0), stream(0.98), pass_s=cpu) >= [4, 4], "they share the pass"


def test_where_tokens_are_free_all_chunks_are_filled_up_to_one_length() -> None:
    short = stream(0.9, 2)._replace(drafts_max=16)
    plan = decide([stream(1.0), silent(), short], gpu)
    assert plan.counts[0] == plan.counts[1] == plan.counts[2] >= 3
    assert plan.slowdown <= 1.02
    assert counts(stream(1.0), silent(3), pass_s=gpu) == [3, 3]
    assert counts(stream(1.0), silent(0), pass_s=gpu) == [0, 0], "a second pass doubles the time"
    assert counts(*[stream(1.0)] * 40, pass_s=gpu) == [15] * 40


def pair_is_free(tokens: int) -> float:
    """A pass of two tokens costs almost nothing, one of more than three very much."""
    return {2: 0.0001, 3: 0.01}.get(tokens, 0.0001 if tokens == 1 else 10.0)


def test_streams_of_lower_classes_lose_their_drafts_first() -> None:
    offers = [stream(0.9, 2, level=1), stream(0.7, 2, level=3), stream(0.8, 2, level=1)]
    assert counts(*offers, pass_s=pair_is_free, tokens_max=1) == [0, 1, 0]
    assert counts(*offers, pass_s=lambda _: 0.01, tokens_max=6) == [2, 2, 2]


def test_of_one_class_the_stream_that_gains_most_comes_first() -> None:
    offers = [stream(0.5, 2), stream(0.9, 2), stream(0.8, 2)]
    assert counts(*offers, pass_s=pair_is_free, tokens_max=1) == [0, 1, 0]


def test_a_step_keeps_to_its_target() -> None:
    cpu = learned(CPU_ROWS)
    assert counts(stream(1.0), pass_s=cpu, seconds_max=0.06) == [7]
    assert counts(stream(1.0), pass_s=cpu, seconds_max=0.026) == [2]
    assert counts(stream(1.0), pass_s=cpu, seconds_max=0.009) == [0]
    deep = decide([stream(1.0)], cpu, seconds_max=0.05, position_s=2e-5)
    assert deep.counts < [7], "each draft attends to 100 positions: 2 ms"


LLAMA_S = {
    **{1: 0.062, 2: 0.075, 3: 0.088, 4: 0.092, 6: 0.106, 8: 0.107},
    **{12: 0.155, 16: 0.158, 24: 0.245, 32: 0.305},
}
"""Llama 1.1B Q4_0 on two cores, whose weights are multiplied with 16 tokens at once."""
TARGET_S, LONGER_S = 0.15, 0.3


def test_a_longer_step_must_pay() -> None:
    llama = learned(LLAMA_S, 1.0)

    def chosen(rate: float, longer_s: float = LONGER_S) -> list[int]:
        return counts(stream(rate, 31), pass_s=llama, seconds_max=TARGET_S, longer_s=longer_s)

    assert chosen(1.0, longer_s=0.0) == [7]
    assert chosen(1.0) == [15], "31 drafts bring 4 % more"
    assert chosen(0.97) == [15]
    assert chosen(0.8) <= [7], "most of 15 are rejected"
    assert chosen(0.3) == [0], "a free text"
    assert counts(stream(1.0, 31), pass_s=llama, seconds_max=0.107, longer_s=0.157) == [7]


def test_a_longer_step_changes_nothing_where_tokens_are_nearly_free() -> None:
    for rate in (0.0, 0.3, 0.8, 1.0):
        offers = stream(rate, DRAFT_MAX), stream(rate / 2, DRAFT_MAX)
        for offered in (offers, offers[:1]):
            usual = counts(*offered, pass_s=gpu, seconds_max=TARGET_S)
            longer = counts(*offered, pass_s=gpu, seconds_max=TARGET_S, longer_s=LONGER_S)
            assert usual == longer


def test_a_model_whose_every_step_is_longer_than_the_target_has_drafts_in_longer_ones() -> None:
    slow = learned({1: 0.2, 2: 0.21, 3: 0.25, 4: 0.26, 6: 0.32, 8: 0.36}, 1.0)
    assert counts(stream(1.0), pass_s=slow, seconds_max=TARGET_S) == [0]
    assert counts(stream(1.0), pass_s=slow, seconds_max=TARGET_S, longer_s=LONGER_S) == [3]


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("longer_s", [0.0, 0.2, 0.3, 0.5])
def test_no_step_is_longer_than_its_bound(rate: float, longer_s: float) -> None:
    for pass_s in (gpu, learned(CPU_ROWS), learned(LLAMA_S, 1.0)):
        plan = decide([stream(rate, 31)], pass_s, seconds_max=TARGET_S, longer_s=longer_s)
        seconds = pass_s(1) * plan.slowdown
        assert seconds <= max(TARGET_S, longer_s)
        usual = decide([stream(rate, 31)], pass_s, seconds_max=TARGET_S)
        if plan != usual:
            gain = (1 + stream(rate, 31).gain(plan.counts[0])) / plan.slowdown
            before = (1 + stream(rate, 31).gain(usual.counts[0])) / usual.slowdown
            assert gain > 1.1 * before


def test_the_tokens_with_logits_are_bounded() -> None:
    assert counts(stream(1.0), pass_s=gpu, tokens_max=4) == [3]
    assert counts(stream(1.0), pass_s=gpu, tokens_max=0) == [0]
    many = [stream(1.0) for _ in range(256)]
    for most in (0, 255, 256, 1000, 10_000):
        assert sum(counts(*many, pass_s=gpu, tokens_max=most)) <= most
    apart = [*many[: 2 * STREAMS_MAX], silent(0)]
    few = counts(*apart, pass_s=lambda tokens: 1.0 if tokens == 33 else 0.001)
    assert sum(n > 0 for n in few) == STREAMS_MAX


def test_drafts_stand_behind_forced_tokens() -> None:
    offers = [stream(1.0, 4, pending=5), stream(1.0, 4, pending=5)]
    assert decide(offers, gpu).counts == [3, 3]


def test_nothing_is_drafted_while_no_cost_is_known() -> None:
    assert counts(stream(1.0), pass_s=StepCost().logits_pass_s) == [0]


def test_passes_are_those_of_llama_cpp() -> None:
    assert passes_of([1, 1, 1]) == [3]
    assert passes_of([5, 1, 1]) == [3, 4]
    assert passes_of([5, 5, 2]) == [6, 6]
    assert passes_of([7]) == [7]


def test_unknown_sizes_are_tried_and_then_known() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.learn_step(StepLoad.of_chunks([(0, 64)]), 0.064)
        cost.learn_step(StepLoad.of_chunks([(100, 1)]), 0.01)
    assert counts(stream(0.5), pass_s=cost.logits_pass_s) == [2], "a prompt's token takes 1 ms"
    for size in SIZES:
        load = StepLoad.of_chunks([(100, 1 + size)])
        seconds = 0.01 * (1 + 0.55 * size)
        cost.learn_step(StepLoad(1, 1 + size, load.depth, passes=(1 + size,)), seconds)
    assert counts(stream(0.5), pass_s=cost.logits_pass_s) == [0]
    assert cost.logits_pass_s(15) == pytest.approx(0.01 * (1 + 0.55 * 14), rel=0.1)


def test_a_second_pass_is_learned_as_the_rest_of_its_step() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.learn_step(StepLoad.of_chunks([(0, 1)] * 3), 0.02)
    before = cost.coefficients()
    for _ in range(50):
        cost.learn_step(StepLoad(2, 7, 0, passes=(3, 4)), 0.05)
        cost.learn_step(StepLoad(2, 70, 0, passes=(30, 40)), 9.0)  # the first one is unknown
    assert cost.logits_pass_s(4) == pytest.approx(0.03, rel=0.05)
    assert cost.coefficients() == before, "steps with drafts do not change the cost of others"
    assert cost.logits_pass_s(40) < 0.5


def test_a_time_is_forgotten_if_its_size_was_not_seen_for_long() -> None:
    cost = StepCost()
    cost.learn_step(StepLoad.of_chunks([(0, 1)]), 0.01)
    cost.learn_step(StepLoad(1, 9, 0, passes=(9,)), 1.0)
    assert cost.logits_pass_s(9) > 0.9
    for _ in range(9000):
        cost.learn_step(StepLoad.of_chunks([(0, 1)]), 0.01)
    assert cost.logits_pass_s(9) < 0.2


def test_acceptance_is_learned_by_position() -> None:
    acceptance = Acceptance()
    expected = acceptance.expected(0, 4)
    assert 0.3 < expected[0] < 0.5 and expected == sorted(expected)
    assert acceptance.expected(12, 1)[0] > 0.85, "a drafter that was right so often copies"
    for _ in range(200):
        acceptance.note(0, right=True)
        acceptance.note(1, right=False)
        acceptance.note(POSITIONS + 5, right=False)
    assert acceptance.expected(0, 2) == pytest.approx([1.0, 1.0], abs=1e-3)
    assert acceptance.expected(POSITIONS - 1, 3) == pytest.approx([0.0] * 3, abs=1e-3)


def gpu_prompts(*lengths: int, known_max: int = 100) -> PromptChunks:
    return PromptChunks(lengths, 1e-5, 0.005, known_max)


def test_beside_prompts_drafts_are_computed_where_they_are_nearly_free() -> None:
    beside = gpu_prompts(100)
    assert counts(stream(0.8), pass_s=gpu, prompts=beside) >= [12]
    assert counts(stream(0.9), stream(0.9), pass_s=gpu, prompts=beside) >= [6, 6]
    assert counts(stream(0.9), silent(), pass_s=gpu, prompts=beside)[0] >= 6, "it may be filled"
    assert counts(stream(0.05), pass_s=gpu, prompts=beside) == [0]
    assert counts(stream(0.9), pass_s=gpu, prompts=beside, seconds_max=0.0105) == [0], "the target"
    assert counts(stream(0.9), pass_s=gpu, prompts=beside, seconds_max=0.01104) == [2]
    assert 0 < counts(stream(0.9), pass_s=gpu, prompts=beside, tokens_max=4)[0] <= 4


def test_beside_prompts_no_size_is_tried() -> None:
    """A prompt of a few tokens is computed in the passes of the stream."""
    assert counts(stream(1.0), pass_s=gpu, prompts=gpu_prompts(100, known_max=5)) == [3]
    assert counts(stream(1.0), pass_s=gpu, prompts=gpu_prompts(100, known_max=0)) == [0]
    assert counts(stream(1.0), pass_s=gpu, prompts=gpu_prompts(9, known_max=5)) == [3]


@pytest.mark.parametrize("rate", [0.3, 0.9, 1.0])
def test_on_a_cpu_a_prompt_does_not_pay_for_drafts(rate: float) -> None:
    """100 tokens take about as long as ten decodes, a draft half a decode."""
    beside = PromptChunks((100,), 0.001, 0.002, 100)
    assert counts(stream(rate), pass_s=learned(CPU_ROWS), prompts=beside) == [0]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("lengths", [(1,), (9,), (40, 200), (512,)])
@pytest.mark.parametrize("token_s", [1e-6, 1e-5, 1e-3])
def test_beside_prompts_all_tokens_together_become_more_and_no_prompt_loses_pace(
    rate: float, lengths: tuple[int, ...], token_s: float
) -> None:
    beside = PromptChunks(lengths, token_s, 0.005, 200)
    offers = [stream(rate), stream(rate / 2), silent()]
    plan = decide(offers, gpu, prompts=beside)
    gain = sum(offer.gain(n) for offer, n in zip(offers, plan.counts, strict=True))
    total = len(offers) + sum(lengths)
    assert plan.slowdown <= 1.02 and (total + gain) / plan.slowdown >= total
    if any(plan.counts):
        assert (len(offers) + gain) / plan.slowdown >= 1.1 * len(offers)


def test_nothing_is_learned_from_a_step_of_drafts_and_prompts() -> None:
    cost = StepCost()
    for _ in range(10):
        cost.learn_step(StepLoad.of_chunks([(0, 1)]), 0.01)
        cost.learn_step(StepLoad.of_chunks([(0, 50)]), 0.05)
    before = cost.coefficients(), cost.logits_pass_s(1), cost.logits_pass_s(3)
    load = structs.replace(StepLoad.of_chunks([(0, 3), (0, 50)]), passes=(6, 47), has_prompts=True)
    cost.learn_step(load, 5.0)
    assert (cost.coefficients(), cost.logits_pass_s(1), cost.logits_pass_s(3)) == before
    assert cost.logits_pass_known == 1


# Slots that go back to before the step.


def going_back(rate: float, limit: int = 16, pending: int = 1) -> StreamOffer:
    return stream(rate, limit, pending=pending)._replace(goes_back=True)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("pending", [1, 6])
@pytest.mark.parametrize(("proposed", "drafts"), [(1, 1), (2, 2), (9, 9), (9, 4), (3, 7)])
def test_the_tokens_that_are_computed_again_are_expected(
    rate: float, pending: int, proposed: int, drafts: int
) -> None:
    """Summed up over the number of accepted drafts. Fill is rejected."""
    again, offer = 0.0, going_back(rate, proposed, pending)
    for accepted in range(min(proposed, drafts) + 1):
        rejects = accepted < drafts
        chance = rate**accepted * ((1 - rate) if accepted < proposed and rejects else 1)
        again += chance * (pending + accepted) * rejects
    assert offer.again(drafts) == pytest.approx(again)


def test_a_slot_that_goes_back_has_drafts_only_where_nearly_all_are_right() -> None:
    cpu = learned(CPU_ROWS)
    for rate in (0.3, 0.7, 0.8):
        assert counts(going_back(rate), pass_s=cpu) == [0]
    assert counts(stream(0.9), pass_s=cpu) > counts(going_back(0.9), pass_s=cpu)
    assert counts(going_back(1.0), pass_s=cpu) == [15]
    assert counts(going_back(0.7), pass_s=gpu) >= [4], "tokens are nearly free"


def test_the_time_of_keeping_states_counts() -> None:
    def decided(keep_s: float, rate: float = 0.95) -> list[int]:
        times = StepTimes(gpu, keep_s=keep_s)
        return plan_drafts([going_back(rate)], times, StepBounds(1.0, 100)).counts

    assert decided(0.0) >= decided(0.005) > [0]
    assert decided(0.05) == [0]
    assert decided(0.05, 1.0) == [15]


# Draft models.


def by_model(rate: float) -> StreamOffer:
    return stream(rate)._replace(by_model=True)


def decide_with(
    streams: Sequence[StreamOffer],
    pass_s: Callable[[int], float],
    draft_s: Callable[[int, int], float],
) -> list[int]:
    """Return the drafts of each stream if a draft model takes *draft_s*."""
    times = StepTimes(pass_s, draft_s=draft_s)
    return plan_drafts(streams, times, StepBounds(1.0, 100)).counts


@pytest.mark.parametrize(
    ("rate", "draft_s", "drafts"),
    [(0.8, 0.0, 16), (0.8, 0.0005, 6), (0.8, 0.002, 2), (0.8, 0.006, 0), (1.0, 0.0005, 16)],
)
def test_the_time_of_a_draft_model_counts(rate: float, draft_s: float, drafts: int) -> None:
    """On a GPU, where rows are nearly free, it decides how many drafts pay."""
    found = decide_with([by_model(rate)], gpu, lambda n, size: size * draft_s)
    assert abs(found[0] - drafts) <= drafts / 3
    without = decide_with([stream(rate)], gpu, lambda n, size: 9.0)
    assert without == counts(stream(rate), pass_s=gpu, seconds_max=1.0, tokens_max=100)


def test_the_draft_model_computes_the_drafts_of_all_streams_together() -> None:
    seen = set()

    def draft_s(streams: int, drafts: int) -> float:
        seen.add(streams)
        return drafts * 1e-4

    times = StepTimes(gpu, draft_s=draft_s)
    plan = plan_drafts([by_model(0.9)] * 3 + [stream(0.9)], times, StepBounds(1.0, 100))
    assert plan.counts[0] > 3 and len(set(plan.counts)) == 1
    assert max(seen) == 3
    assert plan.slowdown > gpu(4 * (1 + plan.counts[0])) / gpu(4)


def test_on_the_cpu_only_a_draft_model_that_is_mostly_right_pays() -> None:
    pass_s = learned(CPU_ROWS)
    assert decide_with([by_model(0.6)], pass_s, fast_s) == [0]
    assert decide_with([by_model(1.0)], pass_s, fast_s) > [0]
    assert decide_with([by_model(1.0)], pass_s, lambda n, size: size * 0.01) == [0]


def fast_s(streams: int, drafts: int) -> float:
    return drafts * 0.0005


def test_a_plan_saves_time_for_each_token() -> None:
    offer = stream(1.0, limit=4)
    assert saving_s([offer], DraftPlan([4], 2.0), 0, 0.01) == pytest.approx(0.006)
    assert saving_s([offer], DraftPlan([4], 6.0), 0, 0.01) == 0.0
    assert saving_s([offer], DraftPlan([0], 1.0), 0, 0.01) == 0.0


def test_a_draft_model_catches_up_where_that_pays() -> None:
    assert pays_to_catch_up(0.1, 0.001, 0, 1000, 0.0, 0.01)
    assert not pays_to_catch_up(0.1, 0.001, 0, 50, 0.0, 0.01), "the answer ends soon"
    assert not pays_to_catch_up(0.001 * REST_MIN, 0.001, REST_MIN - 1, 1000, 0.0, 0.01)
    assert pays_to_catch_up(0.001 * REST_MIN, 0.001, REST_MIN + 1, 1000, 0.0, 0.01)
    assert not pays_to_catch_up(0.1, 0.0, 0, 1000, 0.1, 0.01)
    assert pays_to_catch_up(0.1, 0.0, 0, 1000, 0.111, 0.01), "its account has the time"


def test_all_streams_of_a_draft_model_share_a_slow_acceptance() -> None:
    shared, own = Acceptance.of_models(), Acceptance()
    for _ in range(8):
        shared.note(0, right=False)
        own.note(0, right=False)
    assert 0.6 < shared.rates[0] < 0.75 and shared.rates[1] == 0.8
    assert own.rates[0] < 0.2
