"""A model's adapters: in its configuration, in memory, added and removed while it runs.

What is added or removed changes what the name means, as a swap does: it is kept in the same file,
until the configuration says something else of the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import structlog

from ...backends import AdapterSpec, ModelSpec
from ...backends.adapter_keys import ADAPTERS_MAX, SCALE_MAX, is_scale
from ...backends.errors import InferdError, InvalidArgument, NotFound, UnsupportedOperation
from ...scheduler import messages as m
from ..config.model_settings import AdapterConfig, ModelConfig, check_model_name

if TYPE_CHECKING:
    from ..workers.worker import Worker
    from .model import Model
    from .registry import Registry

__all__ = (
    "add",
    "describe_adapters",
    "inherited",
    "remove",
    "specs_of",
    "with_adapters",
    "without_adapters",
)

log = structlog.get_logger()
FILE_CHARACTERS_MAX = 1000


def specs_of(config: ModelConfig) -> tuple[AdapterSpec, ...]:
    """Return the adapters that a worker of *config* loads."""
    return tuple(_spec(name, adapter) for name, adapter in config.adapters.items())


def _spec(name: str, adapter: AdapterConfig) -> AdapterSpec:
    return AdapterSpec(name=name, path=str(adapter.file), scale=adapter.scale)


def inherited(config: ModelConfig, before: ModelConfig) -> ModelConfig:
    """Return *config* with the adapters that a name had *before* a swap: they stay with the name,
    but for those that the new model has under the same names.
    """
    return msgspec.structs.replace(config, adapters=before.adapters | config.adapters)


def describe_adapters(model: Model) -> list[dict[str, Any]]:
    """Return what `models` says of them."""
    worker = model.loaded
    reports = {} if worker is None else worker.client.adapters
    return [_describe(n, a, reports.get(n)) for n, a in model.config.adapters.items()]


def _describe(name: str, adapter: AdapterConfig, report: m.AdapterReport | None) -> dict[str, Any]:
    info = report.info if report is not None else None
    return {
        "name": name,
        "file": str(adapter.file),
        "scale": adapter.scale,
        "size_bytes": _size_of(adapter.file),
        "id": info.id if info is not None else "",
        "error": report.error if report is not None else None,
    }


# Memory: a file takes what it has, and its header is small.


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Return *spec* as what it takes is reckoned: without adapters, whose sizes are known."""
    return msgspec.structs.replace(spec, adapters=())


def with_adapters(report: m.MemoryEstimate, spec: ModelSpec) -> m.MemoryEstimate:
    """Return *report* with what the adapters of *spec* take: beside the layers, wherever these are;
    so it is counted on the host and on each device.
    """
    size = sum(_size_of(Path(adapter.path)) for adapter in spec.adapters)
    if not size:
        return report
    need = report.need
    more = msgspec.structs.replace(
        need,
        weights=need.weights + size,
        devices={device: taken + size for device, taken in need.devices.items()},
    )
    return m.MemoryEstimate(report.shape, more, report.devices)


def _size_of(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


# While it runs.


async def add(
    registry: Registry, model: Model, name: str, file: str, scale: float
) -> m.AdapterReport | None:
    """Give a model another adapter, from a file of the models directory. Returns what the worker
    says of it; None while the model is not loaded: then it is checked with the next load.

    :raises InvalidArgument: the name or the file cannot be.
    :raises LoadFailed: it is no adapter for this model; nothing has changed.
    :raises OutOfMemory: there is no memory for it; nothing has changed.
    """
    config = AdapterConfig(file=_inside(registry.config.models_dir, file), scale=_scale(scale))
    async with model.changing:
        _check_new(model, name)
        worker, report = await _settled(model), None
        if worker is not None:
            report = await _load(registry, worker, _spec(name, config))
        _change(registry, model, model.config.adapters | {name: config})
    log.info("adapter.added", model=model.name, adapter=name, file=file, scale=scale)
    return report


def _check_new(model: Model, name: str) -> None:
    check_model_name(name)
    if model.fd >= 0:
        raise UnsupportedOperation(
            "a model that came by a descriptor takes no adapters",
            hint="put the model into the models directory, or configure it",
        )
    if name in model.config.adapters:
        raise InvalidArgument(
            f"{model.name!r} has an adapter {name!r} already",
            hint="remove it first, or take another name",
        )
    if len(model.config.adapters) >= ADAPTERS_MAX:
        raise InvalidArgument(
            f"{model.name!r} has {ADAPTERS_MAX} adapters, which is the limit", hint="remove some"
        )


def _inside(folder: Path, file: str) -> Path:
    """Return the path of a file of the models directory, which links do not lead out of."""
    if not file or len(file) > FILE_CHARACTERS_MAX or "\0" in file:
        raise InvalidArgument(f"{file[:100]!r} is no file's name")
    path = folder / file
    try:
        inside = path.resolve(strict=True).is_relative_to(folder.resolve())
        regular = path.is_file()
    except (OSError, RuntimeError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise InvalidArgument(
            f"the models directory has no file {file!r}: {cause}",
            hint=f"put the adapter's file into {folder}, or below it",
        ) from None
    if not inside or not regular:
        raise InvalidArgument(
            f"{file!r} is no file of the models directory",
            hint=f"put the adapter's file into {folder}, or name it in the configuration",
        )
    return path


def _scale(scale: float) -> float:
    if not is_scale(scale):
        raise InvalidArgument(f"a scale of {scale!r}; it is {-SCALE_MAX:g} … {SCALE_MAX:g}")
    return float(scale)


async def _settled(model: Model) -> Worker | None:
    """Wait for a load under way; return the worker of a model that is loaded."""
    worker = model.worker
    if worker is not None and not worker.leaving:
        await worker.loaded.wait()
    return model.loaded


async def _load(registry: Registry, worker: Worker, spec: AdapterSpec) -> m.AdapterReport:
    size = _size_of(Path(spec.path))
    registry.room.promise(worker, size)
    try:
        with anyio.CancelScope(shield=True):  # else the worker has it, and nobody knows of it
            await worker.client.add_adapter(spec)
    except InferdError:
        registry.room.take_back(worker, size)
        raise
    finally:
        registry.room.loaded(worker)
    return worker.client.adapters[spec.name]


def _change(registry: Registry, model: Model, adapters: dict[str, AdapterConfig]) -> None:
    model.config = msgspec.structs.replace(model.config, adapters=adapters)
    registry.keep(model)


async def remove(registry: Registry, model: Model, name: str, *, force: bool) -> None:
    """Take an adapter from a model; with *force* the turns that use it fail.

    :raises NotFound: it has none of this name.
    :raises Busy: turns use it.
    """
    async with model.changing:
        if name not in model.config.adapters:
            raise NotFound(
                f"{model.name!r} has no adapter {name!r}",
                hint=f"it has {', '.join(model.config.adapters) or 'none'}",
            )
        worker = await _settled(model)
        if worker is not None:
            await _unload(registry, worker, name, force=force)
        rest = {n: a for n, a in model.config.adapters.items() if n != name}
        _change(registry, model, rest)
    log.info("adapter.removed", model=model.name, adapter=name)


async def _unload(registry: Registry, worker: Worker, name: str, *, force: bool) -> None:
    report = worker.client.adapters.get(name)
    if report is None or report.info is None:
        worker.client.adapters.pop(name, None)
        return
    others = [r.info for n, r in worker.client.adapters.items() if n != name]
    if report.info not in others:  # else another name has the same file
        with anyio.CancelScope(shield=True):
            await worker.client.remove_adapter(report.info.id, force=force)
    worker.client.adapters.pop(name, None)
    registry.room.take_back(worker, _size_of(Path(report.spec.path)))
    registry.room.loaded(worker)
