"""inferd's own calls on models: list, unload, pin, swap, and change adapters."""

from __future__ import annotations

import time

from ...ipc import messages as w
from ...ipc.server.server_connection import Request
from ..core import CallTable, Daemon
from ..models.model_adapters import add_adapter as add_model_adapter
from ..models.model_adapters import remove_adapter as remove_model_adapter


async def models(daemon: Daemon, request: Request) -> w.ModelsResult:
    """List the models."""
    uid = request.connection.peer.uid
    return w.ModelsResult(models=[m.describe() for m in daemon.registry.catalog.visible_to(uid)])


async def show(daemon: Daemon, request: Request) -> w.ModelsResult:
    """Describe one model."""
    model = daemon.registry.catalog.get(request.params.name, request.connection.peer.uid)
    return w.ModelsResult(models=[model.describe() | {"options": model.options()}])


async def unload_model(daemon: Daemon, request: Request) -> w.Empty:
    """Unload a model for an operator."""
    p, uid = request.params, request.connection.peer.uid
    await daemon.registry.unload_by_name(p.name, uid, force=p.force)
    return w.Empty()


async def pin(daemon: Daemon, request: Request) -> w.Empty:
    """Pin a model for an operator."""
    daemon.registry.pin_model(request.params.name, request.connection.peer.uid, pinned=True)
    return w.Empty()


async def swap(daemon: Daemon, request: Request) -> w.SwapResult:
    """Swap the model of a name; return once new turns begin on the new one."""
    daemon.check_open()
    p: w.SwapParams = request.params
    uid = request.connection.peer.uid
    catalog = daemon.registry.catalog
    model, config = catalog.get(p.name, uid), catalog.swap_target(p.to, uid)
    began = time.monotonic()
    done = await daemon.swaps.swap(model, config, p.mode)
    daemon.counters.swap_ended(done.mode, time.monotonic() - began)
    return w.SwapResult(
        fingerprint=done.fingerprint, previous_fingerprint=done.before, mode=done.mode
    )


async def unpin(daemon: Daemon, request: Request) -> w.Empty:
    """Unpin a model for an operator."""
    daemon.registry.pin_model(request.params.name, request.connection.peer.uid, pinned=False)
    return w.Empty()


async def add_adapter(daemon: Daemon, request: Request) -> w.AddAdapterResult:
    """Add an adapter to a model for an operator."""
    daemon.check_open()
    p: w.AddAdapterParams = request.params
    registry = daemon.registry
    model = registry.catalog.get(p.name, request.connection.peer.uid)
    report = await add_model_adapter(registry, model, p.adapter, p.file, p.scale)
    if report is None or report.info is None:
        return w.AddAdapterResult()
    return w.AddAdapterResult(loaded=True, id=report.info.id, size_bytes=report.info.size_bytes)


async def remove_adapter(daemon: Daemon, request: Request) -> w.Empty:
    """Remove an adapter from a model for an operator."""
    p: w.RemoveAdapterParams = request.params
    registry = daemon.registry
    model = registry.catalog.get(p.name, request.connection.peer.uid)
    await remove_model_adapter(registry, model, p.adapter, force=p.force)
    return w.Empty()


CALLS: CallTable = {
    "models": models,
    "show": show,
    "unload_model": unload_model,
    "pin": pin,
    "unpin": unpin,
    "swap": swap,
    "add_adapter": add_adapter,
    "remove_adapter": remove_adapter,
}
