"""The choice between settings by measured times, with given costs and a fake clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from inferd.backends.tuning_choice import DEEP_TOKENS, PROBES, Probe, Sample, Setting
from inferd.scheduler.policy.cost import StepLoad
from inferd.scheduler.policy.tuning import (
    FIRST_MIX,
    GAIN_MIN,
    ROUNDS_MIN,
    SECONDS_MAX,
    Comparison,
    StepMix,
    candidates_of,
    chosen_setting,
    compare,
    mix_weights,
    next_run,
    steps_as_probes,
    thread_candidates,
    useful_probes,
    weighted_s,
)

OFF, ON = Setting(False), Setting(True)
SMALL_RUNNER = tuple(p for p in PROBES if p.name not in ("deep-4", "deep-16"))
Cost = Callable[[Probe, Setting], float]


def seconds_of(probe: Probe) -> float:
    """The time of a probe without flash attention in these tests."""
    return float(0.01 * probe.sequences**0.8 * probe.tokens**0.6 * (1 + probe.depth / DEEP_TOKENS))


def measure(
    cost: Cost, probes: tuple[Probe, ...] = SMALL_RUNNER, counts: dict[str, float] | None = None
) -> tuple[Comparison, float]:
    """Run the comparison of ON with OFF with a clock that advances by the *cost*."""
    samples: list[Sample] = []
    now = 0.0
    while True:
        result = compare(OFF, ON, samples, counts or {}, now)
        if result.verdict != "continue":
            return result, now
        probe, setting = next_run(OFF, ON, samples, probes)
        took = cost(probe, setting)
        now += took
        samples.append(Sample(setting, probe.name, took))


def noisy(gain: float, spread: float, seed: int) -> Cost:
    rng = random.Random(seed)

    def cost(probe: Probe, setting: Setting) -> float:
        factor = 1 - gain if setting == ON else 1.0
        return seconds_of(probe) * factor * rng.lognormvariate(0, spread)

    return cost


def test_a_clear_gain_changes_the_setting_after_few_rounds() -> None:
    result, spent_s = measure(noisy(0.15, 0.03, 1))
    assert result.verdict == "change" and result.ratio == pytest.approx(0.85, abs=0.03)
    assert result.rounds < 10 and spent_s < SECONDS_MAX / 2
    assert result.high < 1.0


def test_a_loss_leaves_the_setting_after_few_rounds() -> None:
    result, _ = measure(noisy(-0.3, 0.05, 2))
    assert (result.verdict, result.rounds) == ("stay", ROUNDS_MIN)


def test_a_gain_below_the_minimum_leaves_the_setting() -> None:
    result, _ = measure(noisy(0.03, 0.001, 3))
    assert result.verdict == "stay" and result.high < 1.0


def test_equal_settings_stay() -> None:
    changes = sum(measure(noisy(0.0, 0.1, seed))[0].verdict == "change" for seed in range(40))
    assert changes <= 2


def test_noise_that_hides_the_difference_ends_with_the_time() -> None:
    result, spent_s = measure(noisy(0.06, 2.0, 5))
    assert result.verdict == "stay"
    assert SECONDS_MAX <= spent_s < SECONDS_MAX + 20


def test_a_drift_of_the_machine_changes_nothing() -> None:
    now = 0.0

    def cost(probe: Probe, _: Setting) -> float:
        nonlocal now
        took = seconds_of(probe) * (1 + now / 10)  # the machine gets slower all the time
        now += took
        return took

    assert measure(cost)[0].verdict == "stay"


def test_the_mix_of_steps_decides_between_settings_that_differ_by_depth() -> None:
    def cost(probe: Probe, setting: Setting) -> float:
        factor = 1.0 if setting == OFF else (1.6 if probe.depth else 0.7)
        return seconds_of(probe) * factor

    short = {"decode-1": 10_000.0}
    deep = {"deep-1": 10_000.0}
    assert measure(cost, counts=short)[0].verdict == "change"
    assert measure(cost, counts=deep)[0].verdict == "stay"


def test_the_ratios_of_probes_are_in_the_result() -> None:
    result, _ = measure(
        lambda p, s: seconds_of(p) * (0.5 if s == ON and p.depth else 0.9 if s == ON else 1)
    )
    assert result.probes["deep-1"] == pytest.approx(0.5)
    assert result.probes["prompt"] == pytest.approx(0.9)


def test_both_settings_run_each_probe_in_turn_and_alternate() -> None:
    samples: list[Sample] = []
    firsts: dict[str, list[Setting]] = {p.name: [] for p in SMALL_RUNNER}
    for _ in range(4 * len(SMALL_RUNNER)):
        probe, setting = next_run(OFF, ON, samples, SMALL_RUNNER)
        if sum(s.probe == probe.name for s in samples) % 2 == 0:
            firsts[probe.name].append(setting)
        samples.append(Sample(setting, probe.name, 1.0))
    assert all(set(first) == {OFF, ON} for first in firsts.values())
    names = [sample.probe for sample in samples]
    assert names[::2] == names[1::2] == [p.name for p in SMALL_RUNNER] * 2


def test_deep_steps_of_several_sequences_are_estimated_from_one() -> None:
    seconds = {"decode-1": 1.0, "decode-4": 2.0, "deep-1": 1.5}
    assert weighted_s(seconds, {"deep-4": 1.0}) == pytest.approx(2.0 + 4 * 0.5)
    assert weighted_s(seconds, {"deep-16": 1.0}) == 0.0  # the model has fewer slots


def test_the_first_mix_counts_until_as_many_steps_were_computed() -> None:
    first = sum(FIRST_MIX.values())
    assert mix_weights({}) == FIRST_MIX
    assert mix_weights({"decode-1": first})["deep-1"] == 0.0
    half = mix_weights({"decode-1": first / 2})
    assert half["deep-1"] == pytest.approx(FIRST_MIX["deep-1"] / 2)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (StepLoad(1, 1, 0, decodes=True), {"decode-1": 1.0, "deep-1": 0.0}),
        (StepLoad(1, 1, DEEP_TOKENS, decodes=True), {"decode-1": 0.0, "deep-1": 1.0}),
        (StepLoad(1, 5, 5 * 750, decodes=True), {"decode-4": 0.5, "deep-4": 0.5}),
        (StepLoad(1, 40, 0, decodes=True), {"decode-16": 1.0, "deep-16": 0.0}),
        (StepLoad(1, 512, 100_000), {"prompt": 2.0}),
        (StepLoad(1, 16, 16 * 9000), {"prompt": 0.0, "deep-step": 1.0}),
        (StepLoad(0, 0, 0), {}),
    ],
)
def test_steps_count_as_the_probes_that_they_resemble(
    load: StepLoad, expected: dict[str, float]
) -> None:
    assert dict(steps_as_probes(load)) == pytest.approx(expected)


def test_a_mix_counts_steps() -> None:
    mix = StepMix()
    for _ in range(3):
        mix.add_step(StepLoad(1, 1, 0, decodes=True))
    assert mix.counts["decode-1"] == 3.0


def test_probes_without_a_share_of_the_time_are_not_run() -> None:
    seconds = {p.name: 0.01 for p in SMALL_RUNNER}
    counts = {"decode-16": 1e6}
    names = [p.name for p in useful_probes(SMALL_RUNNER, counts, seconds)]
    assert names == ["decode-1", "decode-16", "deep-1"]  # the last from the two others
    assert useful_probes(SMALL_RUNNER, {}, {}) == list(SMALL_RUNNER)


def test_threads_are_compared_after_attention_and_with_the_chosen_one() -> None:
    assert candidates_of(OFF, [], 8) == [ON]
    first = Comparison(present=OFF, candidate=ON, verdict="change", rounds=5)
    assert candidates_of(OFF, [first], 8) == [Setting(True, 7, 8), Setting(True, 4, 8)]
    second = Comparison(present=ON, candidate=Setting(True, 7, 8), verdict="stay", rounds=5)
    assert candidates_of(OFF, [first, second], 8) == [Setting(True, 4, 8)]
    third = Comparison(present=ON, candidate=Setting(True, 4, 8), verdict="change", rounds=5)
    assert candidates_of(OFF, [first, second, third], 8) == []
    assert chosen_setting(OFF, [first, second, third]) == Setting(True, 4, 8)


def test_no_threads_are_compared_on_two_cores() -> None:
    assert thread_candidates(OFF, 1) == thread_candidates(OFF, 2) == []


def test_configured_threads_are_not_compared() -> None:
    default = Setting(False, 3, 3)
    first = Comparison(present=default, candidate=Setting(True, 3, 3), verdict="stay", rounds=5)
    assert candidates_of(default, [], 8) == [Setting(True, 3, 3)]
    assert candidates_of(default, [first], 8) == []


def test_the_minimum_gain_is_inclusive_in_the_verdict() -> None:
    result, _ = measure(lambda p, s: seconds_of(p) * (1 - GAIN_MIN - 0.001 if s == ON else 1.0))
    assert result.verdict == "change"
