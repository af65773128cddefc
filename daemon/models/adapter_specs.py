"""A model's adapters in its configuration, in estimates and in descriptions: pure functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ...backends import AdapterSpec, ModelSpec
from ...scheduler import messages as m
from ..config.model_settings import AdapterConfig, ModelConfig
from ..workers.worker import Worker


def adapter_specs_of(config: ModelConfig) -> tuple[AdapterSpec, ...]:
    """Return the adapters that a worker of *config* loads."""
    return tuple(adapter_spec(name, adapter) for name, adapter in config.adapters.items())


def adapter_spec(name: str, adapter: AdapterConfig) -> AdapterSpec:
    """Return what a worker loads for one adapter."""
    return AdapterSpec(name=name, path=str(adapter.file), scale=adapter.scale)


def inherit_adapters(config: ModelConfig, before: ModelConfig) -> ModelConfig:
    """Return *config* with the adapters that a name had *before* a swap: they stay with the name,
    except those that the new model has under the same names.
    """
    return msgspec.structs.replace(config, adapters=before.adapters | config.adapters)


def describe_adapters(config: ModelConfig, worker: Worker | None) -> list[dict[str, Any]]:
    """Return the description of a model's adapters in `models`; *worker* has the model loaded."""
    reports = {} if worker is None else worker.client.adapters
    return [_describe(name, a, reports.get(name)) for name, a in config.adapters.items()]


def _describe(name: str, adapter: AdapterConfig, report: m.AdapterReport | None) -> dict[str, Any]:
    info = report.info if report is not None else None
    return {
        "name": name,
        "file": str(adapter.file),
        "scale": adapter.scale,
        "size_bytes": adapter_bytes(adapter.file),
        "id": info.id if info is not None else "",
        "error": report.error if report is not None else None,
    }


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Return *spec* in the form in which its memory is estimated: adapters' sizes are known."""
    return msgspec.structs.replace(spec, adapters=())


def with_adapters(report: m.MemoryEstimate, spec: ModelSpec) -> m.MemoryEstimate:
    """Return *report* with the memory of the adapters of *spec*. They lie beside the layers, on
    whatever device these are; so they count on the host and on each device.
    """
    size = sum(adapter_bytes(Path(adapter.path)) for adapter in spec.adapters)
    if not size:
        return report
    need = report.need
    more = msgspec.structs.replace(
        need,
        weights=need.weights + size,
        devices={device: taken + size for device, taken in need.devices.items()},
    )
    return m.MemoryEstimate(report.shape, more, report.devices)


def adapter_bytes(file: Path) -> int:
    """Return the memory that an adapter takes: its file's size, as its header is small."""
    try:
        return os.stat(file).st_size
    except OSError:
        return 0
