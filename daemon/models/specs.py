"""Values that workers are started with, computed from a model, its files and the configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...backends import AdapterSpec, ModelSpec
from ...backends.engine_options import engine_options_of
from ...scheduler.messages import MemoryEstimate
from ..config.model_settings import AdapterConfig
from ..config.settings import Config
from .model import ManagedModel
from .model_files import files_in_use
from .tuner import Tuner

CTX_SIZE_DEFAULT = 4096
TEMPLATE = {"chat_template": "chat-template", "chat_template_file": "chat-template-file"}
"""Parameters by the fields of a spec."""


def spec_of(model: ManagedModel, config: Config, tuner: Tuner) -> ModelSpec:
    """Return the spec to load: the configured values, or else those that a client requested."""
    options, requested = model.options(), model.requested
    ctx_size = max(options.get("ctx-size", 0), 0)
    if not ctx_size and requested.get("ctx-size", 0) > CTX_SIZE_DEFAULT:
        ctx_size = requested["ctx-size"]
    keeps_threads = bool(options.get("threads", 0) or options.get("threads-batch", 0))
    return ModelSpec(
        name=model.name,
        backend=model.config.backend,
        path=str(model.config.file or ""),
        fd=-1 if model.passed_file is None else model.passed_file.fd,
        slots=model.slots_configured,
        ctx_size=ctx_size,
        batch_size=options.get("batch-size", 512),
        n_gpu_layers=options.get("n-gpu-layers", requested.get("n-gpu-layers", -1)),
        main_gpu=options.get("main-gpu", requested.get("main-gpu", -1)),
        tensor_split=tuple(options.get("tensor-split", requested.get("tensor-split", ()))),
        threads=options.get("threads", 0) or config.cores,
        **_template(model, config),
        tool_format=options.get("tool-format", ""),
        options=_engine_options(model),
        adapters=tuple(adapter_spec(*adapter) for adapter in model.config.adapters.items()),
        tuning=model.kept_tuning or tuner.load_tuning(keeps_threads=keeps_threads),
    )


def _engine_options(model: ManagedModel) -> dict[str, Any]:
    """Return the options of the model's backend."""
    if model.config.backend == "echo":
        return model.config.echo
    return engine_options_of(model.options())


def _template(model: ManagedModel, config: Config) -> dict[str, Any]:
    """Return the configured chat template: the model's own, else the default."""
    for options in (model.config.options, config.defaults):
        if any(name in options for name in TEMPLATE.values()):
            return {field: options.get(name, "") for field, name in TEMPLATE.items()}
    return {}


def conditions_of(model: ManagedModel, spec: ModelSpec) -> tuple[list[Path], object]:
    """Return the files and values that decide whether a load succeeds."""
    return files_in_use(model.config.file), (spec, model.requested.get("ctx-size", 0))


def engine_settings(config: Config) -> dict[str, Any]:
    """Return the part of the configuration that a worker gets."""
    return {
        "reader_lag_s": config.reader_lag_ms / 1000,
        "reader_timeout_s": config.reader_timeout_s,
        "ageing_tokens": config.ageing_tokens,
        "quantum_tokens": config.quantum_tokens,
        "priority_strict": config.priority_strict,
        "step_s_target": config.step_ms_target / 1000,
        "shared_prefix_tokens_min": config.shared_prefix_tokens_min,
        "checkpoint_tokens": config.checkpoint_tokens,
        "checkpoints_max": config.checkpoints_max,
        "shifts_max": config.shifts_max,
        "kv_ram_bytes": config.kv_ram_bytes,
        "kv_shared": config.kv_share == "all",
    }


# Adapters.


def adapter_spec(name: str, adapter: AdapterConfig) -> AdapterSpec:
    """Return the spec by which a worker loads an adapter."""
    return AdapterSpec(name=name, path=str(adapter.file), scale=adapter.scale)


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Return *spec* without adapters, as workers estimate it; `with_adapters` adds their sizes."""
    return replace(spec, adapters=())


def with_adapters(report: MemoryEstimate, spec: ModelSpec) -> MemoryEstimate:
    """Return *report* with the memory of the adapters of *spec*. Adapters lie on the devices of
    their layers, so they count on the host and on each device.
    """
    size = sum(adapter_bytes(Path(adapter.path)) for adapter in spec.adapters)
    devices = {device: used + size for device, used in report.need.devices.items()}
    need = replace(report.need, weights=report.need.weights + size, devices=devices)
    return replace(report, need=need)


def adapter_bytes(file: Path) -> int:
    """Return the memory that an adapter takes: its file's size, because its header is small."""
    try:
        return os.stat(file).st_size
    except OSError:
        return 0
