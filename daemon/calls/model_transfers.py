"""Calls that copy a model's file from one daemon to another, or from a client's descriptor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog

from ...backends.errors import InvalidArgument, UnsupportedOperation
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ..config.model_settings import check_model_name
from ..core import Daemon
from ..models.transfers import PassedModel, check_single_file
from ..pull.part import NOTE_NAME
from .models import check_passed_file

log = structlog.get_logger()
NOTES_MAX = 8


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


async def add_model(daemon: Daemon, request: Request) -> w.AddModelResult:
    """Copy the file that was passed to the models directory, unless it is there already. Without a
    descriptor, return what is there.
    """
    daemon.check_open()
    p: w.AddModelParams = request.params
    imports, folder = daemon.model_imports, daemon.config.models_dir
    file = folder / f"{check_model_name(p.name)}.gguf"
    _check_served(daemon, p.name, file)
    _check_notes(p.notes)
    with_hash = p.with_hash or (p.fd >= 0 and bool(p.sha256))
    exists, size, sha256 = await imports.find_file(file, with_hash=with_hash)
    if exists and p.fd >= 0 and (not sha256 or p.sha256.lower() != sha256):
        raise InvalidArgument(
            f"{file} exists already{', with other contents' if sha256 else ''}",
            hint=f"choose another name, or remove it: `inferd rm {p.name} --models-dir {folder}`",
        )
    if exists or p.fd < 0:
        return w.AddModelResult(file=str(file), size_bytes=size, sha256=sha256)
    user = request.connection.user
    status = await user.run(check_passed_file, p.fd)
    transfer = f"descriptor-{daemon.new_handle():x}"
    found = imports.begin(transfer, p.name, folder, status.st_size, request.connection)
    passed = PassedModel(p.fd, status.st_size, p.sha256, p.notes)
    report = _ProgressReport(request) if p.progress else lambda fraction: None
    await imports.add_passed(found, transfer, passed, user, report)
    log.info("model.added", model=p.name, bytes=status.st_size, uid=request.uid)
    return w.AddModelResult(
        file=str(file), size_bytes=status.st_size, sha256=found.sha256, added=True
    )


class _ProgressReport:
    """Sends the copied fraction of a file whenever it has grown by a hundredth."""

    def __init__(self, request: Request):
        self._request, self._sent = request, 0.0

    def __call__(self, fraction: float) -> None:
        if fraction >= min(1.0, self._sent + 0.01):
            self._sent = fraction
            self._request.emit(w.ProgressEvent(progress=fraction))


def _check_served(daemon: Daemon, name: str, file: Path) -> None:
    """Check that the configuration gives *name* to no other file.

    :raises InvalidArgument: it is the name of another model.
    """
    model = daemon.config.models.get(name)
    if model is not None and (model.backend != "llama" or model.file not in (None, file)):
        raise InvalidArgument(
            f"the configuration gives the name {name} to another model", hint="choose another name"
        )


def _check_notes(notes: Mapping[str, bytes]) -> None:
    if len(notes) > NOTES_MAX or not all(map(NOTE_NAME.fullmatch, notes)):
        raise InvalidArgument(
            f"notes are at most {NOTES_MAX} texts, named as licences, notices or terms are",
            hint="LICENSE, NOTICE or …_TERMS",
        )


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
