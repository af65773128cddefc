"""Descriptions of models, as the calls `models` and `show` return them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from ..residency.budget import MemoryBudget
from ..residency.model_files import size_bytes
from .model import ManagedModel
from .specs import adapter_bytes


def describe_model(model: ManagedModel, budget: MemoryBudget) -> dict[str, Any]:
    """Return the description of a model, whose memory is reserved in *budget*."""
    worker, file, loaded = model.worker, model.config.file, model.loaded
    passed = model.passed_file
    need = budget.reservations.of_worker(worker)
    return {
        "name": model.name,
        "state": model.state.value,
        "backend": model.config.backend,
        "file": str(file) if file is not None else "",
        "size_bytes": size_bytes(file) if passed is None else passed.size_bytes,
        "leases": len(model.leases),
        "tasks": (len(worker.client.tasks) if worker is not None else 0) + len(model.evicted_turns),
        "pid": worker.pid if worker is not None else 0,
        "progress": worker.progress if worker is not None else 0.0,
        "idle_s": model.idle_s,
        "expires_s": _expires_s(model),
        "keep_alive_s": model.keep_alive_s,
        "pinned": model.pinned,
        "resident_bytes": worker.resident_bytes if worker is not None else 0,
        "memory": asdict(need) | {"total": need.total} if need is not None else None,
        "adapters": _describe_adapters(model),
        "error": model.error.to_wire() if model.error is not None else None,
        "info": asdict(loaded.info) if loaded is not None else None,
    }


def _expires_s(model: ManagedModel) -> float | None:
    """Return the seconds until the model expires; None: it does not."""
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
