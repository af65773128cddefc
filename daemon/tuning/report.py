"""The results of a measurement for people and as JSON, and the record of its choice, by pure
functions; and the short measurement right after a model was downloaded, before its first load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ...backends.engine_options import is_quantized
from ...backends.library import LLAMA_COMMIT
from ...backends.llama.measuring.requests import Variant
from ...backends.model_spec import ModelSpec
from ...backends.tuning_choice import (
    ChosenSetting,
    CpuFacts,
    ModelShape,
    Setting,
    TuningRecord,
    choose_setting,
)
from ...scheduler.policy.tuning import FIRST_MIX, Comparison
from ..models.tuning_records import TuningRecords
from ..residency.machine import MachineMemory
from .measured_stages import MeasuringProcess, TuneResult, measure_attention
from .stages import ROUNDS_MIN, StageResult, kv_name

TITLES = {
    "flash-attn": "Flash attention",
    "threads": "Threads for one token",
    "threads-batch": "Threads for several tokens",
    "micro-batch": "Micro-batches of a prompt of 512 tokens",
    "kv": "Types of KV states, with flash attention",
}
HEADS = {
    "decode-1": "1 STREAM",
    "decode-4": "4 STREAMS",
    "decode-16": "16 STREAMS",
    "prompt": "PROMPT",
    "deep-1": "1 DEEP",
    "deep-step": "16 TOKENS DEEP",
}
"""The columns of the probes, by their names."""
CLOSE = 0.1
"""The width of an interval that says enough about a gain of about 5 %."""
Judgement = Literal["first", "faster", "slower", "no gain", "open"]
JUDGEMENTS: dict[Judgement, str] = {
    "first": "in force",
    "faster": "faster",
    "slower": "slower",
    "no gain": "no gain of 5 %",
    "open": "not decided in this time",
}


def judgement_of(comparison: Comparison) -> Judgement:
    """Return how a variant compares with the first one."""
    if comparison.verdict == "change":
        return "faster"
    if comparison.rounds < 2 or comparison.verdict == "continue":
        return "open"
    if comparison.low > 1.0:
        return "slower"
    return "no gain" if comparison.low > 0.95 or comparison.high < 1.0 else "open"


def table_of_stage(result: StageResult, cores: int) -> tuple[list[str], list[list[object]]]:
    """Return the heads and rows of a stage's table."""
    probes = [name for name in HEADS if any(name in times for times in result.times)]
    heads = ["SETTING", *(HEADS[name] for name in probes), "TIME"]
    heads += ["KL", "OTHER TOP"] if result.losses else []
    rows: list[list[object]] = []
    for n, variant in enumerate(result.stage.variants):
        times = result.times[n]
        row: list[object] = [variant_text(result.stage.name, variant, cores)]
        row += [_ms_text(times.get(name)) for name in probes]
        comparison = result.comparisons[n - 1] if n else None
        row.append("1" if comparison is None else interval_text(comparison))
        if result.losses:
            loss = result.losses.get(kv_name(variant))
            exact = "0" if comparison is None else None
            row.append(f"{loss.divergence:.2g}" if loss else exact)
            row.append(f"{loss.other_top:.1%}" if loss else exact)
        row.append(JUDGEMENTS["first" if comparison is None else judgement_of(comparison)])
        rows.append(row)
    return [*heads, "RESULT"], rows


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def variant_text(stage: str, variant: Variant, cores: int) -> str:
    """Return the part of a variant that its stage compares, as a user would set it."""
    match stage:
        case "flash-attn":
            return f"flash-attn {'on' if variant.flash_attn else 'off'}"
        case "threads":
            return f"threads {variant.threads or cores}"
        case "threads-batch":
            return f"threads-batch {variant.threads_batch or variant.threads or cores}"
        case "micro-batch":
            return f"{variant.ubatch} tokens" if variant.ubatch else "as by default"
        case _:
            return kv_name(variant)


def _ms_text(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.3g} ms"


def interval_text(comparison: Comparison) -> str | None:
    """Return a ratio with its interval, or None without two rounds."""
    if comparison.rounds < 2:
        return None
    return f"{comparison.ratio:.2f} ({comparison.low:.2f}–{comparison.high:.2f})"


def setting_text(setting: Setting, cores: int) -> str:
    """Return a setting in words."""
    threads = setting.threads or cores
    parts = [
        f"flash-attn {'on' if setting.flash_attn else 'off'}",
        f"threads {threads}",
        f"threads-batch {setting.threads_batch or threads}",
    ]
    return ", ".join([*parts, f"micro-batch {setting.ubatch}"] if setting.ubatch else parts)


def reason_of(results: Sequence[StageResult], *, requested: bool = True) -> str:
    """Return the reason for a choice, which loads and `inferd show` print."""
    parts = []
    for result in results:
        if result.stage.name == "flash-attn" and result.comparisons[0].rounds >= 2:
            comparison = result.comparisons[0]
            kind = "with" if result.stage.variants[1].flash_attn else "without"
            parts.append(f"{kind} flash attention {interval_text(comparison)} of the time")
        elif result.stage.name != "kv" and result.chosen != result.stage.variants[0]:
            comparison = result.comparisons[result.stage.variants.index(result.chosen) - 1]
            text = variant_text(result.stage.name, result.chosen, 0)
            parts.append(f"{text}: {interval_text(comparison)}")
    how = "measured by `inferd tune`" if requested else "measured after the download"
    return f"{how}: {'; '.join(parts) or 'the time was too short'}"


def is_attention_decided(measurement: TuneResult) -> bool:
    """Return whether the time was long enough to compare both kinds of attention: beyond doubt, or
    so closely that the doubt does not matter.
    """
    return all(
        judgement_of(comparison) != "open"
        or (comparison.rounds >= ROUNDS_MIN and comparison.high - comparison.low < CLOSE)
        for result in measurement.stages
        if result.stage.name == "flash-attn"
        for comparison in result.comparisons
    )


def record_of(
    measurement: TuneResult,
    shape: ModelShape,
    cpu: str,
    build: str,
    measured_at: float,
    *,
    requested: bool = True,
) -> TuningRecord:
    """Return the record by which the next loads of models of this *shape* use the choice."""
    ratios: dict[str, float] = {}
    for result in measurement.stages:
        if result.stage.name == "flash-attn":
            ratios = _ratios_of_flash(result)
    return TuningRecord(
        shape=shape,
        cpu=cpu,
        build=build,
        chosen=measurement.chosen,
        reason=reason_of(measurement.stages, requested=requested),
        ratios=ratios,
        measured_at=measured_at,
        requested=requested,
    )


def _ratios_of_flash(result: StageResult) -> dict[str, float]:
    """Return by probe the time with flash attention as a share of that without it."""
    comparison = result.comparisons[0]
    if result.stage.variants[1].flash_attn:
        return dict(comparison.probes)
    return {probe: round(1 / ratio, 3) for probe, ratio in comparison.probes.items()}


def document_of(measurement: TuneResult) -> dict[str, Any]:
    """Return the results as JSON."""
    return {
        "seconds": round(measurement.seconds, 1),
        "present": measurement.present,
        "chosen": measurement.chosen,
        "steps": FIRST_MIX,
        "stages": [_stage_document(result) for result in measurement.stages],
    }


def _stage_document(result: StageResult) -> dict[str, Any]:
    variants = []
    for n, variant in enumerate(result.stage.variants):
        entry: dict[str, Any] = {"setting": variant, "seconds": result.times[n]}
        if n:
            comparison = result.comparisons[n - 1]
            found = comparison.rounds >= 2
            entry |= {
                "rounds": comparison.rounds,
                "time": comparison.ratio if found else None,
                "interval": [comparison.low, comparison.high] if found else None,
                "result": judgement_of(comparison),
            }
        loss = result.losses.get(kv_name(variant))
        variants.append(entry | ({"loss": msgspec.structs.asdict(loss)} if loss else {}))
    return {"name": result.stage.name, "variants": variants}


SECONDS_MAX = 5.0
"""The time of the whole measurement, with the load."""


def present_choice(
    spec: ModelSpec, shape: ModelShape, cpu: CpuFacts, records: TuningRecords
) -> ChosenSetting:
    """Return the setting with which a load of *spec* would compute now."""
    attention = spec.options.get("flash-attn", "auto")
    if is_quantized(shape.cache_type_v):
        attention = "on"
    configured = None if attention == "auto" else Setting(attention == "on")
    known = records.of_machine(cpu.key, LLAMA_COMMIT)
    return choose_setting(configured, shape, cpu, LLAMA_COMMIT, known)


def variant_of(setting: Setting, shape: ModelShape) -> Variant:
    """Return *setting* with the types of KV states that are configured."""
    return Variant(
        flash_attn=setting.flash_attn,
        threads=setting.threads,
        threads_batch=setting.threads_batch,
        ubatch=setting.ubatch,
        cache_type_k=shape.cache_type_k,
        cache_type_v=shape.cache_type_v,
    )


def measure_at_once(
    spec: ModelSpec, cpu: CpuFacts, records: TuningRecords, seconds_max: float = SECONDS_MAX
) -> TuningRecord | None:
    """Compare both kinds of attention within *seconds_max*, and store the choice; return its
    record. Return None if the time is too short, or if the choice is made already.

    :raises InferdError: the model cannot be measured.
    :raises OSError: the record cannot be stored.
    """
    begin = time.monotonic()
    with MeasuringProcess(seconds_max) as process:
        opened = process.open_model(spec, MachineMemory().free_bytes())
        choice = present_choice(spec, opened.shape, cpu, records)
        if choice.source in ("configured", "measured"):
            return None
        present = variant_of(choice.setting, opened.shape)
        result = measure_attention(process, opened, present, begin + seconds_max)
    if result is None:
        return None
    measurement = TuneResult(
        present=present,
        chosen=result.chosen.setting,
        stages=[result],
        seconds=time.monotonic() - begin,
    )
    if not is_attention_decided(measurement):
        return None
    record = record_of(
        measurement, opened.shape, cpu.key, LLAMA_COMMIT, time.time(), requested=False
    )
    records.store(record)
    return record
