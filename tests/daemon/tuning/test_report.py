"""The results of a measurement as tables, JSON and a record."""

from __future__ import annotations

import msgspec
import pytest

from inferd.backends import ModelSpec
from inferd.backends.llama.measuring.requests import Variant
from inferd.backends.tuning_choice import Probe, Setting
from inferd.daemon.tuning.measured_stages import TuneResult, measure_model
from inferd.daemon.tuning.report import (
    TITLES,
    counted,
    document_of,
    is_attention_decided,
    judgement_of,
    reason_of,
    record_of,
    setting_text,
    table_of_stage,
)
from inferd.daemon.tuning.stages import SHARES
from inferd.scheduler.policy.tuning import Comparison
from tests.daemon.tuning.given_times import SHAPE, GivenTimes, opened

OFF, ON = Variant(flash_attn=False), Setting(flash_attn=True)


def measured(seconds: float = 60.0) -> TuneResult:
    def factor(_: Probe, variant: Variant) -> float:
        return (0.8 if variant.flash_attn else 1.0) * (1.2 if variant.threads == 1 else 1.0)

    runner = GivenTimes(factor)
    return measure_model(
        runner, opened(), ModelSpec(name="m"), OFF, 2, seconds, lambda _, __: None,
        clock=runner.clock,
    )  # fmt: skip


def comparison(verdict: str, ratio: float, low: float, high: float, rounds: int) -> Comparison:
    fields = {"verdict": verdict, "ratio": ratio, "low": low, "high": high, "rounds": rounds}
    settings = {"present": {"flash_attn": False}, "candidate": {"flash_attn": True}}
    return msgspec.convert(settings | fields, Comparison)


@pytest.mark.parametrize(
    ("verdict", "ratio", "low", "high", "rounds", "judgement"),
    [
        ("change", 0.9, 0.89, 0.91, 9, "faster"),
        ("stay", 0.97, 0.96, 0.98, 9, "no gain"),
        ("stay", 1.0, 0.98, 1.02, 9, "no gain"),
        ("stay", 1.2, 1.1, 1.3, 9, "slower"),
        ("stay", 0.9, 0.7, 1.1, 3, "open"),
        ("stay", 1.0, 0.0, 9.9, 0, "open"),
        ("continue", 0.9, 0.89, 0.91, 3, "open"),
    ],
)
def test_a_variant_is_judged_by_its_interval(
    verdict: str, ratio: float, low: float, high: float, rounds: int, judgement: str
) -> None:
    assert judgement_of(comparison(verdict, ratio, low, high, rounds)) == judgement


def test_a_table_has_a_row_for_each_variant() -> None:
    heads, rows = table_of_stage(measured().stages[0], 2)
    assert heads == [
        "SETTING", "1 STREAM", "4 STREAMS", "16 STREAMS", "PROMPT", "1 DEEP", "16 TOKENS DEEP",
        "TIME", "RESULT",
    ]  # fmt: skip
    assert rows == [
        ["flash-attn off", *["10 ms"] * 6, "1", "in force"],
        ["flash-attn on", *["8 ms"] * 6, "0.80 (0.80–0.80)", "faster"],
    ]


def test_types_of_kv_states_have_their_losses_in_the_table() -> None:
    heads, rows = table_of_stage(measured().stages[-1], 2)
    assert heads[-3:] == ["KL", "OTHER TOP", "RESULT"]
    assert [[row[0], *row[-3:-1]] for row in rows] == [
        ["f16", "0", "0"],
        ["q8_0", "0", "0.0%"],
        ["q4_0", "0.1", "2.0%"],
    ]


def test_a_table_without_times_has_no_numbers() -> None:
    _, rows = table_of_stage(measured(seconds=0.001).stages[0], 2)
    assert rows == [
        ["flash-attn off", "1", "in force"],
        ["flash-attn on", None, "not decided in this time"],
    ]


def test_each_stage_has_a_title() -> None:
    assert TITLES.keys() == SHARES.keys()


def test_the_document_states_each_result() -> None:
    found = msgspec.json.decode(msgspec.json.encode(document_of(measured())))
    assert found["chosen"]["flash_attn"] is True and found["present"]["flash_attn"] is False
    assert [stage["name"] for stage in found["stages"]] == list(SHARES)
    first, other = found["stages"][0]["variants"]
    assert "result" not in first
    assert other["result"] == "faster" and other["time"] == pytest.approx(0.8)
    assert other["interval"] == pytest.approx([0.8, 0.8]) and other["rounds"] >= 9
    assert found["stages"][-1]["variants"][2]["loss"]["other_top"] == pytest.approx(0.02)


def test_the_document_of_a_short_measurement_is_json() -> None:
    found = msgspec.json.decode(msgspec.json.encode(document_of(measured(seconds=0.001))))
    assert found["stages"][0]["variants"][1]["interval"] is None


def test_the_record_has_the_choice_and_its_reason() -> None:
    record = record_of(measured(), SHAPE, "a cpu", "a build", 5.0)
    assert (record.shape, record.cpu, record.build, record.measured_at) == (
        SHAPE, "a cpu", "a build", 5.0,
    )  # fmt: skip
    assert record.requested and record.chosen == ON
    assert record.ratios["decode-1"] == pytest.approx(0.8)
    assert record.reason == (
        "measured by `inferd tune`: with flash attention 0.80 (0.80–0.80) of the time"
    )


def test_the_reason_of_a_short_measurement_claims_nothing() -> None:
    reason = reason_of(measured(seconds=0.001).stages)
    assert reason == "measured by `inferd tune`: the time was too short"


@pytest.mark.parametrize(("seconds", "is_decided"), [(60.0, True), (0.001, False)])
def test_a_short_measurement_does_not_decide_on_attention(seconds: float, is_decided: bool) -> None:
    assert is_attention_decided(measured(seconds)) is is_decided


def test_numbers_have_their_nouns() -> None:
    assert [counted(n, "round") for n in (0, 1, 2)] == ["0 rounds", "1 round", "2 rounds"]


def test_a_setting_is_described_by_its_numbers() -> None:
    assert setting_text(OFF, 2) == "flash-attn off, threads 2, threads-batch 2"
    assert setting_text(Setting(True, 3, 4, 64), 8) == (
        "flash-attn on, threads 3, threads-batch 4, micro-batch 64"
    )
