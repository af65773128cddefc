"""The measurement of all stages, with a fake clock and a model of given times."""

from __future__ import annotations

import pytest

from inferd.backends import ModelSpec
from inferd.backends.llama.measuring.requests import Variant
from inferd.backends.tuning_choice import Probe, Setting
from inferd.daemon.tuning.measured_stages import (
    QUICK_ROUNDS,
    TuneResult,
    measure_attention,
    measure_model,
)
from inferd.daemon.tuning.stages import SHARES
from tests.daemon.tuning.given_times import GivenTimes, opened

SPEC = ModelSpec(name="m")
OFF = Variant(flash_attn=False)
QUICK_S = 5.0


def measure(runner: GivenTimes, seconds: float = 60.0, present: Variant = OFF) -> TuneResult:
    progress: list[float] = []
    found = measure_model(
        runner, opened(), SPEC, present, 4, seconds, lambda _, done: progress.append(done),
        clock=runner.clock,
    )  # fmt: skip
    assert progress == sorted(progress) and max(progress, default=0.0) <= 1.0
    return found


def flash_is_faster(probe: Probe, variant: Variant) -> float:
    factor = 0.8 if variant.flash_attn else 1.0
    factor *= {0: 1.0, 4: 1.0, 3: 0.9, 2: 1.2}[variant.threads]
    return factor * (0.7 if variant.ubatch == 256 else 1.0)


def test_each_stage_begins_with_the_choice_of_the_previous_ones() -> None:
    runner = GivenTimes(flash_is_faster)
    found = measure(runner)
    assert found.chosen == Setting(True, 3, 4, 256)
    assert [result.stage.name for result in found.stages] == list(SHARES)
    micro = found.stages[3].stage.variants[0]
    assert (micro.flash_attn, micro.threads, micro.ubatch) == (True, 3, 0)


def test_types_of_kv_states_are_measured_with_their_loss_and_never_chosen() -> None:
    runner = GivenTimes(lambda _, v: 0.5 if v.cache_type_v == "q4_0" else 1.0)
    found = measure(runner)
    assert found.chosen == OFF.setting
    assert {name: loss.other_top for name, loss in found.stages[-1].losses.items()} == {
        "q8_0": 0.0,
        "q4_0": 0.02,
    }
    assert found.stages[-1].comparisons[1].ratio == pytest.approx(0.5)


@pytest.mark.parametrize("factor", [1.0, 100.0, 100_000.0])
def test_a_measurement_ends_within_its_time(factor: float) -> None:
    runner = GivenTimes(lambda _, __: factor, losses_s=factor)
    found = measure(runner, 30.0)
    assert found.seconds <= 30.0 + 1e-6
    assert found.chosen == OFF.setting


def test_a_decided_stage_leaves_its_time_to_later_ones() -> None:
    runner = GivenTimes(lambda _, v: 1.5 if v.flash_attn else 1.0)
    found = measure(runner, 100.0)
    assert found.stages[1].stage.seconds > 0.1 * 100.0


def test_one_core_has_no_stage_of_threads() -> None:
    runner = GivenTimes(lambda _, __: 1.0)
    found = measure_model(
        runner, opened(), SPEC, OFF, 1, 60.0, lambda _, __: None, clock=runner.clock
    )
    assert [r.stage.name for r in found.stages] == ["flash-attn", "micro-batch", "kv"]


def test_a_quick_measurement_of_attention_is_decided_by_few_short_steps() -> None:
    runner = GivenTimes(lambda _, v: 0.8 if v.flash_attn else 1.0)
    result = measure_attention(runner, opened(), OFF, runner.now + QUICK_S, runner.clock)
    assert result is not None and result.chosen.flash_attn
    assert max(probe.tokens for probe, _ in runner.runs) == 64
    assert len(runner.runs) == QUICK_ROUNDS * 2 * len(opened().probes)


def test_a_quick_measurement_without_enough_time_has_no_result() -> None:
    runner = GivenTimes(lambda _, v: 8.0 if v.flash_attn else 10.0)
    assert measure_attention(runner, opened(), OFF, runner.now + QUICK_S, runner.clock) is None
    assert runner.now <= 100.0 + QUICK_S
