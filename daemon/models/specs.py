"""From a model and the configuration to what its worker is told: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...backends import ModelSpec
from ...ipc.messages import CREDIT_MAX
from ..config.settings import Config
from ..residency.model_files import files_in_use
from .adapter_specs import adapter_specs_of
from .model import ManagedModel

CTX_SIZE_DEFAULT = 4096
TEMPLATE = {"chat_template": "chat-template", "chat_template_file": "chat-template-file"}
"""Parameters by the fields of a spec."""


def spec_of(model: ManagedModel, wanted: Mapping[str, Any], config: Config) -> ModelSpec:
    """Return what is to be loaded: the model as it is configured, with what a client has *wanted*
    where that leaves it open.
    """
    options = model.options()
    ctx_size = max(options.get("ctx-size", 0), 0)
    if not ctx_size and wanted.get("ctx-size", 0) > CTX_SIZE_DEFAULT:
        ctx_size = wanted["ctx-size"]
    return ModelSpec(
        name=model.name,
        backend=model.config.backend,
        path=str(model.config.file or ""),
        fd=model.fd,
        slots=model.slots_configured,
        ctx_size=ctx_size,
        batch_size=options.get("batch-size", 512),
        n_gpu_layers=options.get("n-gpu-layers", wanted.get("n-gpu-layers", -1)),
        main_gpu=options.get("main-gpu", wanted.get("main-gpu", -1)),
        tensor_split=tuple(options.get("tensor-split", wanted.get("tensor-split", ()))),
        threads=options.get("threads", 0) or config.cores,
        **_template(model, config),
        options=model.config.echo,
        adapters=adapter_specs_of(model.config),
    )


def _template(model: ManagedModel, config: Config) -> dict[str, Any]:
    """Return where the configuration has the chat template: a model's own comes first."""
    for options in (model.config.options, config.defaults):
        if any(name in options for name in TEMPLATE.values()):
            return {field: options.get(name, "") for field, name in TEMPLATE.items()}
    return {}


def conditions_of(model: ManagedModel, spec: ModelSpec) -> tuple[list[Path], object]:
    """Return what decides on how a load goes: the files, and what is asked for."""
    return files_in_use(model.config.file), (spec, model.wanted_ctx_size)


def limits_of(config: Config) -> dict[str, Any]:
    """Return what a worker is told of the configuration."""
    return {
        "reader_wait_s": config.reader_lag_ms / 1000,
        "reader_timeout_s": config.reader_timeout_s,
        "credit_max": CREDIT_MAX,
        "ageing_tokens": config.ageing_tokens,
        "quantum_tokens": config.quantum_tokens,
        "step_target_s": config.step_ms_target / 1000,
        "shared_prefix_tokens_min": config.shared_prefix_tokens_min,
        "checkpoint_tokens": config.checkpoint_tokens,
        "shifts_max": config.shifts_max,
        "kv_ram_bytes": config.kv_ram_bytes,
        "kv_shared": config.kv_share == "all",
    }
