"""The setting of a load by records, by models of similar shape, and by the CPU's family."""

from __future__ import annotations

import msgspec
import pytest

from inferd.backends.tuning_choice import (
    DEFAULT_REASON,
    RULES,
    CpuFacts,
    ModelShape,
    Setting,
    TuningRecord,
    choose_setting,
    read_cpu,
    shape_distance,
    shape_of,
    this_cpu,
)

OFF, ON = Setting(False), Setting(True)
SHAPE = ModelShape(
    architecture="llama", layers=30, embedding=576, heads=9, kv_heads=3, head_k=64, head_v=64,
    size_bytes=145_000_000,
)  # fmt: skip
ZEN4 = CpuFacts("AuthenticAMD", 25, 17, 1, "AMD EPYC", 2)
UNKNOWN = CpuFacts("Unknown", 1, 1, 1, "a CPU", 2)
BUILD = "0c1e57098"


def record(chosen: Setting = ON, **changes: object) -> TuningRecord:
    fields = {"shape": SHAPE, "cpu": ZEN4.key, "build": BUILD, "chosen": chosen, "reason": "0.9"}
    return TuningRecord(**(fields | changes))  # type: ignore[arg-type]


def test_a_configured_setting_precedes_a_record() -> None:
    choice = choose_setting(OFF, SHAPE, ZEN4, BUILD, [record(ON)])
    assert (choice.setting, choice.source) == (OFF, "configured")


def test_a_record_of_this_shape_precedes_one_of_a_like_shape() -> None:
    near = msgspec.structs.replace(SHAPE, layers=31)
    records = [record(OFF, shape=near, measured_at=2.0), record(Setting(True, 3, 4), reason="r")]
    choice = choose_setting(None, SHAPE, ZEN4, BUILD, records)
    assert (choice.setting, choice.source, choice.reason) == (Setting(True, 3, 4), "measured", "r")


def test_a_like_shape_gives_its_attention_but_not_its_threads() -> None:
    near = msgspec.structs.replace(SHAPE, layers=32, architecture="qwen2")
    far = msgspec.structs.replace(SHAPE, layers=45)
    records = [record(OFF, shape=far), record(Setting(True, 3, 4), shape=near)]
    choice = choose_setting(None, SHAPE, ZEN4, BUILD, records)
    assert (choice.setting, choice.source) == (ON, "like")
    assert "qwen2, 32 layers" in choice.reason and "0.9" in choice.reason


@pytest.mark.parametrize(
    "changes", [{"cpu": "another"}, {"build": "another"}, {"cpu": UNKNOWN.key}]
)
def test_records_of_another_cpu_or_build_do_not_count(changes: dict[str, str]) -> None:
    choice = choose_setting(None, SHAPE, UNKNOWN, "b", [record(ON, **changes)])
    assert (choice.setting, choice.source, choice.reason) == (OFF, "default", DEFAULT_REASON)


def test_the_rule_of_a_family_states_its_source() -> None:
    choice = choose_setting(None, SHAPE, ZEN4, BUILD, [])
    assert (choice.setting, choice.source) == (ON, "rule")
    assert "Zen 4" in choice.reason and "SmolLM2" in choice.reason
    assert all(reason for _, reason in RULES.values())


@pytest.mark.parametrize(
    "changes",
    [{"head_k": 128}, {"cache_type_k": "q8_0"}, {"layers": 61}, {"size_bytes": 0}, {"kv_heads": 9}],
)
def test_shapes_that_are_not_alike(changes: dict[str, object]) -> None:
    assert shape_distance(SHAPE, msgspec.structs.replace(SHAPE, **changes)) is None


def test_equal_shapes_have_no_distance() -> None:
    assert shape_distance(SHAPE, SHAPE) == 0.0


def test_the_shape_is_read_from_a_header() -> None:
    values = {
        "general.architecture": "llama", "llama.block_count": 30, "llama.embedding_length": 576,
        "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3,
    }  # fmt: skip
    assert shape_of(values, 145_000_000, {}) == SHAPE
    garbage = {"general.architecture": 7, "7.block_count": "x", "7.embedding_length": -1}
    assert shape_of(garbage, 1, {}).layers == 0


def test_the_cpu_is_read_from_its_description() -> None:
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n"
    text += "model name\t: AMD EPYC\nstepping\t: 1\n\nprocessor\t: 1\ncpu family\t: 9\n"
    assert read_cpu(text, 2) == ZEN4
    arm = read_cpu("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\nCPU architecture: 8\n", 4)
    assert (arm.vendor, arm.family, arm.model) == ("0x41", 8, 0xD0C)
    assert read_cpu("", 1).vendor == "" and read_cpu("model: ?\n", 1).model == 0


def test_this_machine_has_a_key() -> None:
    assert this_cpu(3).key.endswith("3 cores")
