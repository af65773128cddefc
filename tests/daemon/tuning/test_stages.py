"""The stages of a measurement: their variants, the order of their runs, and their choice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from inferd.backends.llama.measuring.requests import Variant
from inferd.backends.tuning_choice import PROBES, Sample, Setting
from inferd.daemon.tuning.stages import (
    LONG_PROMPT,
    ROUNDS_MIN,
    Stage,
    is_decided,
    kv_name,
    result_of,
    runs_of,
    stage_of,
)

OFF = Variant(flash_attn=False)


def stage(name: str, chosen: Variant = OFF, **facts: Any) -> Stage:
    known: dict[str, Any] = {
        "cores": 8, "batch_size": 512, "ctx_size": 4096, "cache_types": ["f16", "q8_0", "q4_0"],
        "seconds": 10.0,
    }  # fmt: skip
    return stage_of(name, chosen, PROBES, **(known | facts))


def test_attention_is_compared_with_the_other_kind_by_all_probes() -> None:
    found = stage("flash-attn")
    assert [v.flash_attn for v in found.variants] == [False, True]
    assert found.probes == list(PROBES)


@pytest.mark.parametrize(
    ("cores", "chosen", "numbers"),
    [(1, OFF, []), (2, OFF, [1]), (8, OFF, [7, 4]), (8, Variant(True, 4), [8, 7])],
)
def test_threads_are_compared_by_steps_of_one_token(
    cores: int, chosen: Variant, numbers: list[int]
) -> None:
    found = stage("threads", chosen, cores=cores)
    assert [v.threads for v in found.variants[1:]] == numbers
    assert {p.name for p in found.probes} == {"decode-1", "deep-1"}
    assert {v.threads_batch for v in found.variants[1:]} <= {chosen.threads or cores}


def test_threads_of_several_tokens_are_compared_by_the_other_steps() -> None:
    found = stage("threads-batch", Variant(True, 4, 8))
    assert [v.threads_batch for v in found.variants] == [8, 7, 4]
    assert {v.threads for v in found.variants} == {4}
    assert not {p.name for p in found.probes} & {"decode-1", "deep-1"}


def test_micro_batches_are_at_most_a_batch() -> None:
    assert [v.ubatch for v in stage("micro-batch", batch_size=128).variants] == [0, 64, 128]
    assert stage("micro-batch").probes == [LONG_PROMPT]
    assert stage("micro-batch", ctx_size=256).probes == []


def test_only_types_that_fit_the_models_heads_are_compared() -> None:
    found = stage("kv")
    assert [kv_name(v) for v in found.variants] == ["f16", "q8_0", "q4_0"]
    assert all(v.flash_attn for v in found.variants)
    assert all(p.depth for p in found.probes)
    assert len(stage("kv", cache_types=["f16"]).variants) == 1


def test_a_quantized_type_of_values_has_no_other_attention() -> None:
    chosen = Variant(True, cache_type_v="q8_0")
    assert stage("flash-attn", chosen).variants == [chosen]
    assert {v.cache_type_v for v in stage("threads", chosen).variants} == {"q8_0"}
    assert kv_name(stage("kv", chosen).variants[0]) == "f16"


def test_each_round_runs_each_probe_with_each_variant_who_take_turns_in_going_first() -> None:
    found = stage("micro-batch")
    runs = list(runs_of(found, 5))
    assert Counter(number for number, *_ in runs) == dict.fromkeys(range(1, 6), 5)
    firsts = [variant for _, _, variant in runs[::5]]
    assert {v.ubatch for v in firsts} == {0, 64, 128, 256, 512}


def test_runs_by_probe_end_one_probe_before_the_next() -> None:
    found = stage("flash-attn")
    names = [probe.name for _, probe, _ in runs_of(found, 3, by_probe=True)]
    assert names == [p.name for p in PROBES for _ in range(3 * 2)]
    rounds = Counter((n, p.name) for n, p, _ in runs_of(found, 3, by_probe=True))
    assert set(rounds.values()) == {2}


def samples(found: Stage, rounds: int, factors: dict[Variant, float]) -> list[Sample]:
    return [
        Sample(v, p.name, factors.get(v, 1.0) * (1 + 0.001 * n))
        for n, p, v in runs_of(found, rounds)
    ]


def test_the_fastest_variant_is_chosen_if_it_is_faster_beyond_doubt() -> None:
    found = stage("micro-batch")
    _, _, small, large, _ = found.variants
    result = result_of(found, samples(found, ROUNDS_MIN, {small: 0.9, large: 0.8}), 1.0)
    assert result.chosen == large
    assert is_decided(result)
    assert [round(t["prompt"], 1) for t in result.times] == [1.0, 1.0, 0.9, 0.8, 1.0]


def test_a_gain_of_less_than_five_percent_changes_nothing() -> None:
    found = stage("flash-attn")
    result = result_of(found, samples(found, ROUNDS_MIN, {found.variants[1]: 0.97}), 1.0)
    assert result.chosen == found.variants[0]
    assert is_decided(result)


def test_a_stage_with_few_rounds_is_not_decided() -> None:
    found = stage("flash-attn")
    few = samples(found, ROUNDS_MIN - 1, {found.variants[1]: 0.5})
    assert not is_decided(result_of(found, few, 1.0))
    assert result_of(found, [], 1.0).chosen == found.variants[0]


def test_a_variant_has_a_setting_without_its_types() -> None:
    variant = Variant(True, 2, 3, 64, "q8_0", "q4_0")
    assert variant.setting == Setting(True, 2, 3, 64)
    assert type(variant.setting) is Setting
