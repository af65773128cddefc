"""Addition and removal of a model's adapters at run time.

Like a swap, a change applies to the model's name: it is stored in the same file and holds until the
model's configuration changes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import structlog

from ...backends import AdapterSpec
from ...backends.errors import InferdError, InvalidArgument, NotFound, UnsupportedOperation
from ...backends.model_spec import ADAPTERS_MAX, SCALE_MAX, is_scale
from ...scheduler import messages as m
from ..config.model_settings import AdapterConfig, check_model_name
from ..residency.reservations import Reservations
from ..workers.worker import Worker
from .model import ManagedModel
from .registry import Registry
from .specs import adapter_bytes, adapter_spec

log = structlog.get_logger()
ADAPTER_FILE_CHARACTERS_MAX = 1000


async def add_adapter(
    registry: Registry, model: ManagedModel, name: str, file: str, scale: float
) -> m.AdapterReport | None:
    """Add an adapter from a file of the models directory to a model. Return the worker's report, or
    None if the model is not loaded; then the next load checks the adapter.

    :raises InvalidArgument: the name or the file is not valid.
    :raises LoadFailed: the file is not an adapter for this model; nothing has changed.
    :raises OutOfMemory: too little memory is free; nothing has changed.
    """
    config = AdapterConfig(
        file=_adapter_path(registry.config.models_dir, file), scale=_scale(scale)
    )
    async with model.changing:
        _check_new(model, name)
        worker, report = await _wait_for_load(model), None
        if worker is not None:
            report = await _load_adapter(registry.reservations, worker, adapter_spec(name, config))
        _set_adapters(registry, model, model.config.adapters | {name: config})
    log.info("adapter.added", model=model.name, adapter=name, file=file, scale=scale)
    return report


def _check_new(model: ManagedModel, name: str) -> None:
    check_model_name(name)
    if model.passed_file is not None:
        raise UnsupportedOperation(
            "a model of a file outside the models directory takes no adapters",
            hint="put the model into the models directory, or configure it",
        )
    if name in model.config.adapters:
        raise InvalidArgument(
            f"{model.name!r} already has an adapter {name!r}",
            hint="remove it first, or use another name",
        )
    if len(model.config.adapters) >= ADAPTERS_MAX:
        raise InvalidArgument(
            f"{model.name!r} has {ADAPTERS_MAX} adapters, which is the limit", hint="remove some"
        )


def _adapter_path(folder: Path, file: str) -> Path:
    """Return the path of a file in the models directory; links must not lead out of it."""
    if not file or len(file) > ADAPTER_FILE_CHARACTERS_MAX or "\0" in file:
        raise InvalidArgument(f"{file[:100]!r} is not a file name")
    path = folder / file
    try:
        inside = path.resolve(strict=True).is_relative_to(folder.resolve())
        regular = path.is_file()
    except (OSError, RuntimeError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise InvalidArgument(
            f"the models directory has no file {file!r}: {cause}",
            hint=f"put the adapter's file into {folder} or a folder below it",
        ) from None
    if not inside or not regular:
        raise InvalidArgument(
            f"{file!r} is not a file in the models directory",
            hint=f"put the adapter's file into {folder}, or name it in the configuration",
        )
    return path


def _scale(scale: float) -> float:
    if not is_scale(scale):
        bounds = f"{-SCALE_MAX:.0f} … {SCALE_MAX:.0f}"
        raise InvalidArgument(f"a scale of {scale}; the range is {bounds}")
    return float(scale)


async def _wait_for_load(model: ManagedModel) -> Worker | None:
    """Wait for a load under way; return the worker if the model is loaded."""
    worker = model.worker
    if worker is not None and not worker.unloading:
        await worker.loaded.wait()
    return model.loaded


async def _load_adapter(
    reservations: Reservations, worker: Worker, spec: AdapterSpec
) -> m.AdapterReport:
    size = adapter_bytes(Path(spec.path))
    reservations.reserve_more(worker, size)
    try:
        # A cancelled wait would leave an adapter in the worker that `client.adapters` lacks.
        with anyio.CancelScope(shield=True):
            report = await worker.client.add_adapter(spec)
    except InferdError:
        reservations.add_bytes(worker, -size)
        raise
    finally:
        reservations.note_loaded(worker)
    return report


def _set_adapters(
    registry: Registry, model: ManagedModel, adapters: dict[str, AdapterConfig]
) -> None:
    model.config = replace(model.config, adapters=adapters)
    registry.catalog.persist_settings(model)


async def remove_adapter(
    registry: Registry, model: ManagedModel, name: str, *, force: bool
) -> None:
    """Remove an adapter from a model; with *force* the turns that use it fail.

    :raises NotFound: the model has no such adapter.
    :raises Busy: turns use the adapter, and *force* is not given.
    """
    async with model.changing:
        if name not in model.config.adapters:
            raise NotFound(
                f"{model.name!r} has no adapter {name!r}",
                hint=f"it has {', '.join(model.config.adapters) or 'none'}",
            )
        worker = await _wait_for_load(model)
        if worker is not None:
            await _unload_adapter(registry.reservations, worker, name, force=force)
        _set_adapters(
            registry, model, {n: a for n, a in model.config.adapters.items() if n != name}
        )
    log.info("adapter.removed", model=model.name, adapter=name)


async def _unload_adapter(
    reservations: Reservations, worker: Worker, name: str, *, force: bool
) -> None:
    client = worker.client
    report = client.adapters.get(name)
    if report is not None and report.info is not None:
        others = [r.info for n, r in client.adapters.items() if n != name]
        if report.info not in others:  # else another adapter has the same file
            with anyio.CancelScope(shield=True):
                await client.remove_adapter(report.info.id, force=force)
        reservations.add_bytes(worker, -adapter_bytes(Path(report.spec.path)))
        reservations.note_loaded(worker)
    client.adapters.pop(name, None)
