"""Calls that copy a model's file from one daemon to another."""

from __future__ import annotations

import structlog

from ....backends.errors import InvalidArgument, UnsupportedOperation
from ....ipc import messages as w
from ....ipc.server.request import Request
from ...core import Daemon
from ...models.transfers.exports import check_single_file

log = structlog.get_logger()


async def export_model(daemon: Daemon, request: Request) -> w.ExportModelResult:
    """Return the next part of a model's file."""
    p: w.ExportModelParams = request.params
    exports, owner = daemon.model_exports, request.connection
    if p.offset:
        export = exports.find(p.transfer, owner)
    else:
        model = daemon.registry.catalog.get(p.name, request.owner.user)
        if model.uid is not None:
            raise UnsupportedOperation(f"the model {p.name!r} came by a descriptor")
        file = daemon.registry.catalog.configuration_of(model).file
        export = exports.begin(p.transfer, check_single_file(p.name, file), owner)
    try:
        data, sha256 = await export.read_part(p.offset)
    except BaseException:
        daemon.registry.start_soon(exports.end, p.transfer, owner)
        raise
    if sha256:
        await exports.end(p.transfer, owner)
    return w.ExportModelResult(data=data, size=export.size, sha256=sha256)


async def import_model(daemon: Daemon, request: Request) -> w.ImportModelResult:
    """Write the next part of a model's file; publish the model with the last one."""
    daemon.check_open()
    p: w.ImportModelParams = request.params
    if p.offset + len(p.data) >= p.size and not p.sha256:
        raise InvalidArgument("the last part of a file has no SHA-256")
    imports, owner = daemon.model_imports, request.connection
    if p.offset:
        found = imports.find(p.transfer, owner)
    else:
        found = imports.begin(p.transfer, p.name, daemon.config.models_dir, p.size, owner)
    arrived = await imports.add_part(found, p.transfer, p.offset, p.data, p.sha256)
    if arrived:
        log.info("model.arrived", model=p.name, bytes=p.size, sha256=p.sha256)
    return w.ImportModelResult(arrived=arrived)


async def end_model_transfer(daemon: Daemon, request: Request) -> w.Empty:
    """End the export or import of a model's file."""
    transfer, owner = request.params.transfer, request.connection
    await daemon.model_exports.end(transfer, owner)
    await daemon.model_imports.end(transfer, owner)
    return w.Empty()


async def copy_model(daemon: Daemon, request: Request) -> w.CopyModelResult:
    """Refuse the call, which only a fleet has."""
    raise InvalidArgument(
        "this is a daemon, and not a fleet with nodes",
        hint="name the socket of `inferd fleet serve`",
    )


CALLS = (export_model, import_model, end_model_transfer, copy_model)
