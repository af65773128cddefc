"""Descriptions of models, as the calls `models` and `show` return them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from ...backends.encoder_prompts import ctx_size_trained
from ...backends.engine_options import cache_share_max
from ...backends.gguf import FileFacts
from ...backends.gguf.facts import NUMBER_MAX
from ...backends.memory import MemoryNeed
from ...backends.tuning_choice import ChosenSetting
from ...ipc.messages import ModelInfo, ShownModel
from ..residency.machine import has_gpus
from .model import ManagedModel
from .model_files import files_in_use, modified_at, signature_of, size_bytes
from .registry import Registry
from .specs import CTX_SIZE_DEFAULT, adapter_bytes, spec_of, with_adapters, without_adapters


def describe_model(registry: Registry, model: ManagedModel, facts: FileFacts | None) -> ModelInfo:
    """Return the description of a model whose file has these *facts*, if they are known."""
    worker, file, loaded = model.worker, model.config.file, model.loaded
    passed = model.passed_file
    need = registry.reservations.of_worker(worker)
    return ModelInfo(
        name=model.name,
        state=model.state.value,
        backend=model.config.backend,
        file=str(file) if file is not None else "",
        swapped_to=model.swapped_to,
        size_bytes=size_bytes(file) if passed is None else passed.size_bytes,
        modified_at=modified_at(file),
        leases=len(model.leases),
        tasks=(len(worker.client.tasks) if worker is not None else 0) + len(model.evicted_turns),
        pid=worker.pid if worker is not None else 0,
        slots=loaded.info.slots if loaded is not None else model.slots_configured,
        progress=worker.progress if worker is not None else 0.0,
        load_s=model.load_s,
        idle_s=model.idle_s,
        expires_s=_expires_s(model),
        keep_alive_s=model.keep_alive_s,
        pinned=model.pinned,
        resident_bytes=worker.resident_bytes if worker is not None else 0,
        memory=_memory(need) if need is not None else None,
        adapters=_describe_adapters(model),
        error=model.error.to_wire() if model.error is not None else None,
        info=asdict(loaded.info) if loaded is not None else None,
        setting=_setting(registry, model),
        need_bytes=_need_bytes(registry, model, facts),
    )


def show_model(
    registry: Registry, model: ManagedModel, facts: FileFacts | None, file_error: str | None
) -> ShownModel:
    """Return the description of a model with the *facts* of its file, or the reason why its header
    cannot be read.
    """
    return ShownModel(
        **asdict(describe_model(registry, model, facts)),
        options=model.options(),
        file_info=facts,
        file_error=file_error,
        estimate=_estimate_memory(registry, model, facts),
    )


def _estimate_memory(
    registry: Registry, model: ManagedModel, facts: FileFacts | None
) -> dict[str, Any] | None:
    """Return the memory that the next load needs: as llama.cpp has estimated it for an earlier
    load, or else by the file's *facts*, as far as they are known. Return None if nothing is known.
    """
    spec = spec_of(model, registry.config, registry.tuner)
    signature = signature_of(files_in_use(model.config.file))
    for estimate in registry.loader.estimates.estimates_of(without_adapters(spec), signature)[:1]:
        shape, need = estimate.shape, with_adapters(estimate, spec).need
        return {"slots": shape.slots, "ctx_size": shape.ctx_size} | _memory(need)
    if facts is None:
        return None
    trained = ctx_size_trained(facts.architecture, facts.ctx_size_trained or CTX_SIZE_DEFAULT)
    ctx_size = spec.ctx_size or min(trained, CTX_SIZE_DEFAULT)
    kv_bytes = facts.kv_token_bytes_max
    if kv_bytes is not None:
        kv_bytes = round(kv_bytes * cache_share_max(spec.options)) * ctx_size * spec.slots
    weights = size_bytes(model.config.file) + sum(
        adapter_bytes(adapter.file) for adapter in model.config.adapters.values()
    )
    known = {
        "slots": spec.slots,
        "ctx_size": ctx_size,
        "weights": weights,
        "context": None if kv_bytes is None or kv_bytes > NUMBER_MAX else kv_bytes,
    }
    return dict.fromkeys(_memory(MemoryNeed())) | known


def _need_bytes(registry: Registry, model: ManagedModel, facts: FileFacts | None) -> int | None:
    """Return the memory of the host that the next load needs, with all slots and full contexts.
    Return None if it is not known, or if the model has a process.
    """
    if model.worker is not None:
        return None
    found = _estimate_memory(registry, model, facts)
    if found is None:
        return None
    total: int | None = found["total"]
    if total is not None:
        return total
    if found["context"] is None or (has_gpus() and model.options().get("n-gpu-layers") != 0):
        return None  # devices may hold any part of it
    return int(found["weights"] + found["context"])


def _memory(need: MemoryNeed) -> dict[str, Any]:
    return asdict(need) | {"total": need.total}


def _setting(registry: Registry, model: ManagedModel) -> dict[str, Any] | None:
    """Return the setting of a loaded model, and that of its next load, with their reasons."""
    worker = model.loaded
    if worker is None or worker.tuning is None:
        return None
    next_choice = registry.tuner.next_choice(worker.tuning)
    return _choice(worker.tuning.chosen) | {"next_load": _choice(next_choice)}


def _choice(choice: ChosenSetting) -> dict[str, Any]:
    return asdict(choice.setting) | {"source": choice.source, "reason": choice.reason}


def _expires_s(model: ManagedModel) -> float | None:
    """Return the seconds until the model expires, or None if it does not."""
    if model.worker is None or model.busy or model.keep_alive_s < 0:
        return None
    return max(0.0, model.keep_alive_s - model.idle_s)


def _describe_adapters(model: ManagedModel) -> list[dict[str, Any]]:
    reports = {} if model.loaded is None else model.loaded.client.adapters
    found = []
    for name, adapter in model.config.adapters.items():
        report = reports.get(name)
        info = report.info if report is not None else None
        found.append(
            {
                "name": name,
                "file": str(adapter.file),
                "scale": adapter.scale,
                "size_bytes": adapter_bytes(adapter.file),
                "id": info.id if info is not None else "",
                "error": report.error if report is not None else None,
            }
        )
    return found
