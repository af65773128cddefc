"""A whole measurement of a model whose costs are given, with a clock that advances by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inferd.backends.tuning_choice import PROBES, Probe, Sample, Setting
from inferd.scheduler.policy.tuning import (
    SAMPLES_MAX,
    SECONDS_MAX,
    Comparison,
    Measurement,
    Outcome,
    reason_text,
)

OFF, ON = Setting(False), Setting(True)
Cost = Callable[[Probe, Setting], float]


def outcome_of(measurement: Measurement, cost: Cost) -> Outcome:
    """Run *measurement* to its end."""
    while measurement.outcome is None:
        probe, setting = measurement.next_run()
        seconds = cost(probe, setting)
        measurement.add_time(seconds)
        if measurement.outcome is None:
            measurement.add_sample(Sample(setting, probe.name, seconds), {})
    return measurement.outcome


def test_the_faster_attention_is_chosen_with_its_reason() -> None:
    measurement = Measurement(OFF, PROBES)
    outcome = outcome_of(measurement, lambda _, s: 0.02 if s == OFF else 0.015)
    assert outcome.chosen == ON
    assert outcome.reason == (
        "with flash attention, its steps take 0.75 of the time (0.75 to 0.75 in 5 rounds)"
    )
    assert outcome.ratios["decode-1"] == 0.75
    assert measurement.spent_s < SECONDS_MAX


def test_the_ratios_state_flash_attention_whatever_the_default() -> None:
    outcome = outcome_of(Measurement(ON, PROBES), lambda _, s: 0.02 if s == OFF else 0.01)
    assert outcome.chosen == ON
    assert outcome.ratios["decode-1"] == 0.5
    assert outcome.reason.startswith("without flash attention, its steps take 2.00 of the time")


def test_threads_are_measured_with_the_chosen_attention() -> None:
    def cost(probe: Probe, setting: Setting) -> float:
        seconds = 0.01 if setting.flash_attn else 0.02
        return seconds * (0.5 if setting.threads == 4 and probe.tokens == 1 else 1.0)

    outcome = outcome_of(Measurement(OFF, PROBES, cores=8), cost)
    assert outcome.chosen == Setting(True, 4, 8)
    assert "with 4 threads for single tokens" in outcome.reason
    assert outcome.reason.count(";") == 2  # attention, 7 threads, 4 threads


def test_probes_without_a_share_are_dropped_after_the_first_round() -> None:
    run = []

    def cost(probe: Probe, setting: Setting) -> float:
        run.append(probe.name)
        return 1e-6 if probe.name == "prompt" else 0.01

    outcome_of(Measurement(OFF, PROBES), cost)
    assert run.count("prompt") == 2 < run.count("decode-4")


def test_time_without_samples_ends_the_measurement_with_the_default() -> None:
    measurement = Measurement(OFF, PROBES)
    for _ in range(int(2 * SECONDS_MAX / 0.05) - 1):
        measurement.add_time(0.05)
    assert measurement.outcome is None
    measurement.add_time(0.1)
    assert measurement.outcome is not None and measurement.outcome.chosen == OFF
    assert "not certain" in measurement.outcome.reason


def test_the_samples_are_bounded() -> None:
    measurement = Measurement(OFF, PROBES[:1])
    count = 0

    def cost(_: Probe, setting: Setting) -> float:
        nonlocal count
        count += 1
        is_odd = (count - 1) // 2 % 2
        return 1e-6 if setting == OFF else 1e-4 if is_odd else 1e-8  # never certain

    assert outcome_of(measurement, cost).chosen == OFF
    assert count <= SAMPLES_MAX + 2


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"verdict": "change", "ratio": 0.8, "low": 0.7, "high": 0.9}, "in 5 rounds)"),
        ({"verdict": "stay", "ratio": 0.97, "low": 0.96, "high": 0.98}, "a gain below 5%"),
        ({"verdict": "stay", "ratio": 0.9, "low": 0.7, "high": 1.1}, "which is not certain"),
    ],
)
def test_the_reason_states_how_certain_it_is(fields: dict[str, object], end: str) -> None:
    comparison = Comparison(present=OFF, candidate=ON, rounds=5, **fields)  # type: ignore[arg-type]
    assert reason_text(comparison).endswith(end)
