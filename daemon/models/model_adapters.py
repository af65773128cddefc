"""Adapters that are added to a model and removed from it while it runs.

A change applies to the model's name, as a swap does: it is stored in the same file, until the
configuration of the model changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import anyio
import msgspec
import structlog

from ...backends import AdapterSpec
from ...backends.adapter_keys import ADAPTERS_MAX, SCALE_MAX, is_scale
from ...backends.errors import InferdError, InvalidArgument, NotFound, UnsupportedOperation
from ...scheduler import messages as m
from ..config.model_settings import AdapterConfig, check_model_name
from ..config.settings import Config
from ..residency.budget import MemoryBudget
from ..workers.worker import Worker
from .adapter_specs import adapter_bytes, adapter_spec
from .model import ManagedModel

log = structlog.get_logger()
FILE_CHARACTERS_MAX = 1000


class AdapterHost(Protocol):
    """The part of the registry that adapters use."""

    budget: MemoryBudget

    @property
    def config(self) -> Config:
        """The configuration in force."""

    def persist_settings(self, model: ManagedModel) -> None:
        """Store what was set for a model at run time."""


async def add_adapter(
    registry: AdapterHost, model: ManagedModel, name: str, file: str, scale: float
) -> m.AdapterReport | None:
    """Add an adapter from a file of the models directory to a model. Return the worker's report;
    None while the model is not loaded: then the adapter is checked with the next load.

    :raises InvalidArgument: the name or the file cannot be.
    :raises LoadFailed: it is not an adapter for this model; nothing has changed.
    :raises OutOfMemory: there is no memory for it; nothing has changed.
    """
    config = AdapterConfig(file=_inside(registry.config.models_dir, file), scale=_scale(scale))
    async with model.changing:
        _check_new(model, name)
        worker, report = await _settled(model), None
        if worker is not None:
            report = await _load(registry, worker, adapter_spec(name, config))
        _change(registry, model, model.config.adapters | {name: config})
    log.info("adapter.added", model=model.name, adapter=name, file=file, scale=scale)
    return report


def _check_new(model: ManagedModel, name: str) -> None:
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


async def _settled(model: ManagedModel) -> Worker | None:
    """Wait for a load under way; return the worker of a model that is loaded."""
    worker = model.worker
    if worker is not None and not worker.unloading:
        await worker.loaded.wait()
    return model.loaded


async def _load(registry: AdapterHost, worker: Worker, spec: AdapterSpec) -> m.AdapterReport:
    size = adapter_bytes(Path(spec.path))
    registry.budget.reserve_more(worker, size)
    try:
        with anyio.CancelScope(shield=True):  # else the worker has it, and nobody knows of it
            await worker.client.add_adapter(spec)
    except InferdError:
        registry.budget.release_bytes(worker, size)
        raise
    finally:
        registry.budget.reservations.note_loaded(worker)
    return worker.client.adapters[spec.name]


def _change(registry: AdapterHost, model: ManagedModel, adapters: dict[str, AdapterConfig]) -> None:
    model.config = msgspec.structs.replace(model.config, adapters=adapters)
    registry.persist_settings(model)


async def remove_adapter(
    registry: AdapterHost, model: ManagedModel, name: str, *, force: bool
) -> None:
    """Remove an adapter from a model; with *force* the turns that use it fail.

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


async def _unload(registry: AdapterHost, worker: Worker, name: str, *, force: bool) -> None:
    report = worker.client.adapters.get(name)
    if report is None or report.info is None:
        worker.client.adapters.pop(name, None)
        return
    others = [r.info for n, r in worker.client.adapters.items() if n != name]
    if report.info not in others:  # else another name has the same file
        with anyio.CancelScope(shield=True):
            await worker.client.remove_adapter(report.info.id, force=force)
    worker.client.adapters.pop(name, None)
    registry.budget.release_bytes(worker, adapter_bytes(Path(report.spec.path)))
    registry.budget.reservations.note_loaded(worker)
