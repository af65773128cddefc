"""Adapters that come and go while their model runs."""

from __future__ import annotations

from ...ipc import messages as w
from ...ipc.server.server import Request
from ..core import CallTable, Daemon
from ..models import model_adapters as adapters

__all__ = ("CALLS",)


async def add_adapter(daemon: Daemon, request: Request) -> w.AddAdapterResult:
    """Give a model another adapter, for an operator."""
    daemon.check_open()
    p: w.AddAdapterParams = request.params
    registry = daemon.registry
    model = registry.get(p.name, request.connection.peer.uid)
    report = await adapters.add(registry, model, p.adapter, p.file, p.scale)
    if report is None or report.info is None:
        return w.AddAdapterResult()
    return w.AddAdapterResult(loaded=True, id=report.info.id, size_bytes=report.info.size_bytes)


async def remove_adapter(daemon: Daemon, request: Request) -> w.Empty:
    """Take an adapter from a model, for an operator."""
    p: w.RemoveAdapterParams = request.params
    registry = daemon.registry
    model = registry.get(p.name, request.connection.peer.uid)
    await adapters.remove(registry, model, p.adapter, force=p.force)
    return w.Empty()


CALLS: CallTable = {"add_adapter": add_adapter, "remove_adapter": remove_adapter}
