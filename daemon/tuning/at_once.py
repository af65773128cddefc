"""The short measurement right after a model was downloaded, before its first load."""

from __future__ import annotations

import time

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
from ..models.tuning_records import TuningRecords
from ..residency.machine import MachineMemory
from .measured_stages import MeasuringProcess, TuneResult, measure_attention
from .report import is_attention_decided, record_of

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
