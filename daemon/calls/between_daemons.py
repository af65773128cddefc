"""Calls between daemons: sessions that move, copies of sessions, files of models, also from a
client's descriptor, and shares of users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import anyio
import msgspec
import structlog
from anyio import to_thread

from ...backends.errors import (
    BackendError,
    InferdError,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from ...ipc import messages as w
from ...ipc.names import check_label
from ...ipc.server.connection import Request
from ...scheduler.kv.file_format import FINGERPRINT, KvDamaged, StateWriter, export_head, read_part
from ...scheduler.kv.store import scoped
from ...scheduler.messages import KvFileAdded
from ...scheduler.owner import Owner
from ...sessions import (
    ExportedSession,
    Hold,
    Session,
    StoredSession,
    Transfer,
    Upload,
    check_id,
    decode_change,
    encode_change,
    name_of_id,
)
from ...sessions.elsewhere.documents import COPIED_MEDIA_BYTES_MAX, MediaHead
from ...sessions.media_store import MediaStore
from .. import copy_streams
from ..config.model_settings import check_model_name
from ..core import Daemon
from ..models.model_files import is_other_model
from ..models.transfers import ImportedPart, PassedModel, check_single_file
from ..pull.part import NOTE_NAME
from ..workers.worker import Worker
from .models import check_passed_file

KV_S_MAX = 10.0
"""Maximum time for the KV state of an exported session to be written to disk."""
_SPARE_BYTES = 1 << 20
"""The part of a frame with a copied session that the facts and the last turn may take."""
log = structlog.get_logger()


async def export_session(daemon: Daemon, request: Request) -> w.ExportResult:
    """Return the next part of a dormant session; the first part begins its transfer."""
    p: w.ExportParams = request.params
    owner = Owner(request.owner.user if p.uid is None else p.uid, p.label)
    if not daemon.connections.access.may_control_turns_of(request.connection, owner):
        raise NotFound(f"there is no dormant session {p.session_id!r}")
    moving = daemon.sessions.moving
    if p.offset == 0:
        transfer = Transfer(p.transfer, p.peer)
        hold = moving.hold_session(owner, p.session_id, transfer, request.connection)
        await _find_kv(daemon, hold)
    else:
        hold = moving.get_hold(p.transfer, request.connection)
    if p.offset > hold.size:
        raise InvalidArgument(f"the exported session has {hold.size} bytes")
    try:
        data = await to_thread.run_sync(_read_part, daemon.media_store, hold, p.offset)
    except (OSError, KvDamaged) as exc:
        if p.offset > 0:
            raise BackendError(f"the session's KV state cannot be read: {exc}") from None
        # The KV state was deleted meanwhile. The caller does not know of it yet, so it is left out.
        log.info("session.exported_without_kv", session=hold.session.name, cause=str(exc))
        moving.remove_kv(hold)
        data = await to_thread.run_sync(_read_part, daemon.media_store, hold, 0)
    except InferdError:
        if p.offset == 0:
            await moving.end_transfer(p.transfer, "keep", request.connection)
        raise
    return w.ExportResult(
        data=data, size=hold.size, on_behalf_of=_name_of_user(daemon, request, hold.session)
    )


def _read_part(store: MediaStore, hold: Hold, offset: int) -> bytes:
    """Return a part of an exported session. This blocks.

    :raises BackendError: an image or a sound cannot be read.
    :raises OSError: its KV state cannot be read.
    :raises KvDamaged: its KV state has another size.
    """
    data = hold.document[offset : offset + w.PART_BYTES]
    at = max(0, offset - len(hold.document))
    for head in hold.media:
        if 0 <= at < head.size and len(data) < w.PART_BYTES:
            data += _read_content(store, hold, head, at, w.PART_BYTES - len(data))
            at = head.size
        at -= head.size
    if hold.kv_file is not None and len(data) < w.PART_BYTES:
        data += read_part(hold.kv_file, at + hold.kv_offset, w.PART_BYTES - len(data))
    return data


def _read_content(
    store: MediaStore, hold: Hold, head: MediaHead, offset: int, bytes_max: int
) -> bytes:
    size = min(bytes_max, head.size - offset)
    descriptor = store.open_content(hold.session.owner.user, head.sha256)
    try:
        data = os.pread(descriptor, size, offset)
    except OSError as exc:
        raise BackendError(f"a stored content cannot be read: {exc.strerror}") from exc
    finally:
        os.close(descriptor)
    if len(data) < size:
        raise BackendError("a stored content has fewer bytes than were stored")
    return data


async def _find_kv(daemon: Daemon, hold: Hold) -> None:
    """Add a held session's KV state to its export, if it is on disk or can be written there."""
    session, registry = hold.session, daemon.registry
    if not session.settings.persist:
        return
    shared = daemon.config.kv_share == "all"
    scope, name = scoped(session.owner.user, session.name, shared=shared)
    client = registry.catalog.find_client(session.model.name, session.owner.user)
    path = None
    try:
        with anyio.move_on_after(KV_S_MAX):
            if client is None:
                path = registry.kv_index.find_session_file(scope, name)
            else:
                file = await client.export_state(
                    session.owner, session.name, session.settings.adapters, session.history.prompt
                )
                folder = registry.kv_index.directory / client.info.fingerprint / str(scope)
                path = folder / file if file else None
            if path is not None:
                head, offset = await to_thread.run_sync(export_head, path)
                daemon.sessions.moving.add_kv(hold, path, head, offset)
    except (OSError, KvDamaged, WorkerCrashed) as exc:
        log.info("session.exported_without_kv", session=session.name, cause=str(exc))


def _name_of_user(daemon: Daemon, request: Request, session: Session) -> str:
    """Return the name of a session's user for the import, or an empty text if it is the caller.

    :raises NotFound: the user's name is not known.
    """
    user = session.owner.user
    if user == request.owner.user:
        return ""
    known = daemon.connections.access.own_user_names.name_of(user)
    found = session.settings.on_behalf_of or known
    if not found:
        raise NotFound(
            f"the session belongs to user {user} of this system, and to no user of a gateway",
            hint="only sessions that a gateway has opened can be moved for their users",
        )
    return found


async def import_session(daemon: Daemon, request: Request) -> w.ImportResult:
    """Take the next part of a session; with the last one, the session has arrived."""
    daemon.check_open()
    p: w.ImportParams = request.params
    check_id(p.session_id)
    check_label(p.label)
    uploads = daemon.uploads
    upload = await uploads.add_part(p.transfer, p.offset, p.data, request.connection)
    try:
        async with upload.lock:
            upload.check_open()
            size = await _take_part(daemon, request, upload)
    except BaseException:
        await uploads.remove(p.transfer, upload)
        raise
    if upload.is_accepted and upload.received >= size:
        await uploads.remove(p.transfer, upload)
    return w.ImportResult(size=size)


async def _take_part(daemon: Daemon, request: Request, upload: Upload) -> int:
    """Write the received bytes of an upload; return the number after which it is complete."""
    p: w.ImportParams = request.params
    if upload.document is None:
        return p.size
    if not upload.is_accepted:
        if upload.exported is None:
            await _begin_arrival(daemon, request, upload, upload.document)
        if not await upload.write_contents(daemon.media_store):
            return p.size
        await _accept(daemon, request, upload)
    if upload.writer is not None:
        await _write_kv(daemon, upload, upload.writer)
    return upload.size


async def _begin_arrival(daemon: Daemon, request: Request, upload: Upload, document: bytes) -> None:
    """Check a session whose document has arrived, before its images and sounds do."""
    p: w.ImportParams = request.params
    exported, user = ExportedSession.decode(document), request.owner.user
    if p.on_behalf_of:
        user = await daemon.connections.access.identify(request.connection, p.on_behalf_of)
    daemon.registry.catalog.get(exported.facts.model, user)  # raises an error if it is unknown
    upload.begin_contents(exported, user, daemon.media_store)
    if exported.media:
        stored = _arriving_session(p, exported, user)
        daemon.sessions.moving.check_arrival(stored, daemon.dormant_lease(stored))


def _arriving_session(p: w.ImportParams, exported: ExportedSession, user: int) -> StoredSession:
    facts = msgspec.structs.replace(
        exported.facts,
        on_behalf_of=p.on_behalf_of,
        transfer=Transfer(p.transfer, p.peer),
    )
    return StoredSession(Owner(user, p.label), p.session_id, time.time(), facts, exported.past)


async def _accept(daemon: Daemon, request: Request, upload: Upload) -> None:
    """Accept a session that has arrived, and prepare the file of its KV state."""
    p: w.ImportParams = request.params
    exported, user = upload.exported, upload.user
    assert exported is not None
    stored = _arriving_session(p, exported, user)
    await daemon.sessions.moving.accept_session(
        stored, daemon.dormant_lease(stored), persist=exported.persist
    )
    upload.note_accepted()
    head, index = exported.kv, daemon.registry.kv_index
    client = daemon.registry.catalog.find_client(stored.facts.model, user)
    is_wanted = client is None or (head and client.info.fingerprint == head.fingerprint)
    if head and is_wanted and index.accepts(head.size) and FINGERPRINT.fullmatch(head.fingerprint):
        shared = daemon.config.kv_share == "all"
        scope, name = scoped(user, name_of_id(p.label, p.session_id), shared=shared)
        upload.writer = StateWriter(index.directory, head, scope, name)
        upload.size += head.size


async def _write_kv(daemon: Daemon, upload: Upload, writer: StateWriter) -> None:
    """Write received bytes of a KV state; publish it once it is complete. If that fails, the
    session arrives without a KV state, and its next turn computes the prompt.
    """
    data, upload.rest = upload.rest, b""
    try:
        if data:
            await to_thread.run_sync(writer.write, data)
        if upload.received < upload.size:
            return
        file = await to_thread.run_sync(writer.finish)
    except (OSError, KvDamaged) as exc:
        log.warning("session.arrived_without_kv", cause=str(exc))
        upload.size = upload.received
        return
    upload.writer, key, fingerprint = None, file.key, file.path.parts[-3]
    daemon.registry.kv_index.add_file(
        fingerprint, key.name, key.owner, key.session, file.size, file.seconds
    )
    for worker in daemon.registry.catalog.ready_workers():
        if worker.client.info.fingerprint == fingerprint:
            worker.client.send_command(KvFileAdded(key.owner, key.name))


async def end_transfer(daemon: Daemon, request: Request) -> w.Empty:
    """End a transfer; return when its outcome is on disk."""
    p: w.EndTransferParams = request.params
    upload = daemon.uploads.find(p.transfer, request.connection)
    if upload is not None and p.outcome == "drop":
        await daemon.uploads.remove(p.transfer, upload)
        if not upload.is_accepted:
            return w.Empty()
    await daemon.sessions.moving.end_transfer(p.transfer, p.outcome, request.connection)
    return w.Empty()


async def read_copy(daemon: Daemon, request: Request) -> w.ReadCopyResult:
    """Return a whole session, to be stored as a copy at another daemon."""
    p: w.ReadCopyParams = request.params
    owner = await _owner(daemon, request, p.on_behalf_of, p.label)
    media = await _read_media(daemon, _stored_session(daemon, owner, p.session_id))
    session = _stored_session(daemon, owner, p.session_id)  # it may be another one by now
    holder, live = daemon.sessions.live.find_id(owner, p.session_id)
    copier = None if live is None else daemon.copies.copier_of(holder)
    if copier is not None:
        stream, data = copier.read_whole(session.recording, media)
        return w.ReadCopyResult(
            stream=stream.id, number=stream.number, data=data, model=session.model.name
        )
    data = encode_change(session.recording.take_copy(whole=True, media=media))
    return w.ReadCopyResult(
        stream=secrets.token_hex(16), number=1, data=data, model=session.model.name
    )


def _stored_session(daemon: Daemon, owner: Owner, session_id: str) -> Session:
    """Return a session that is stored, open or dormant.

    :raises NotFound: there is none.
    """
    _, live = daemon.sessions.live.find_id(owner, session_id)
    session = live or daemon.sessions.dormant.find_session(owner, session_id)
    if session is None or not session.recording.is_stored:
        raise NotFound(f"there is no stored session {session_id!r}")
    return session


async def _read_media(daemon: Daemon, session: Session) -> tuple[bytes, ...]:
    """Return the contents of a session's images and sounds, as many as fit into a copy."""
    contents = sorted(session.contents)
    if not contents:
        return ()
    store, user, found = daemon.media_store, session.owner.user, list[bytes]()
    left = min(
        COPIED_MEDIA_BYTES_MAX, copy_streams.CHANGE_BYTES_MAX - len(session.packed) - _SPARE_BYTES
    )
    for content in contents:
        size = store.size_of(user, content) if store.has(user, content) else 0
        if 0 < size <= left:
            with contextlib.suppress(NotFound):  # it was deleted meanwhile
                found.append(await store.read(user, content))
                left -= size
    return tuple(found)


async def store_copy(daemon: Daemon, request: Request) -> w.Empty:
    """Apply a change to a copy; return when it is in the journal."""
    daemon.check_open()
    p: w.StoreCopyParams = request.params
    check_id(p.session_id)
    check_label(p.label)
    document = await _document(daemon, request)
    if document is None:
        return w.Empty()
    change = decode_change(document)
    owner = await _owner(daemon, request, p.on_behalf_of, p.label)
    stream = Transfer(p.stream, p.peer, copy=True)
    if change.facts is not None:
        facts = msgspec.structs.replace(change.facts, on_behalf_of=p.on_behalf_of)
        change = msgspec.structs.replace(change, facts=facts)
        daemon.registry.catalog.get(facts.model, owner.user)  # raises an error if it is unknown
        model = daemon.dormant_lease(StoredSession(owner, p.session_id, 0.0, facts, b""))
    else:
        model = None
    with daemon.media_store.lease(owner.user) as lease:
        for content in change.media or ():
            # A copy without some images is better than none.
            with contextlib.suppress(QuotaExceeded, TooLarge):
                await lease.add(content, "image")
        await daemon.sessions.copies.write_change(
            owner, p.session_id, stream, p.number, change, model
        )
    return w.Empty()


async def _document(daemon: Daemon, request: Request) -> bytes | None:
    """Return a change once all of its parts have arrived, and None before.

    :raises InvalidArgument: this is not the next part, or the change has another size than
        announced.
    """
    p: w.StoreCopyParams = request.params
    uploads, transfer = daemon.copy_uploads, f"{p.stream}/{p.number}"
    upload = await uploads.add_part(transfer, p.offset, p.data, request.connection)
    if upload.document is None:
        if upload.received >= p.size:
            raise InvalidArgument(f"the parts have {upload.received} bytes, but `size` is {p.size}")
        return None
    await uploads.remove(transfer, upload)
    return upload.document


async def _owner(daemon: Daemon, request: Request, on_behalf_of: str, label: str) -> Owner:
    """Return the owner of a session that the caller names.

    :raises InferdError: the caller may not act on behalf of the user.
    """
    user = request.owner.user
    if on_behalf_of:
        user = await daemon.connections.access.identify(request.connection, on_behalf_of)
    return Owner(user, label)


ANSWER_TIMEOUT_S = 1.0
CALLER = ""
"""The name of the caller's own user."""


async def exchange_served(daemon: Daemon, request: Request) -> w.ExchangeServedResult:
    """Count the tokens that other daemons have computed for users of the calling gateway, and
    return those computed here, without models whose workers do not answer within a second.

    Nothing is stored for the connection: a caller that disconnects leaves only tokens whose weight
    fades.
    """
    p: w.ExchangeServedParams = request.params
    gateway = request.connection.peer.uid
    numbers = daemon.connections.access.delegated_users.numbers_by_name(gateway)
    numbers[CALLER] = gateway
    names = {number: name for name, number in numbers.items()}
    served: dict[str, dict[str, int]] = {}

    async def exchange(name: str, worker: Worker, elsewhere: Mapping[int, int]) -> None:
        # A worker that has just died has computed nothing.
        with anyio.move_on_after(ANSWER_TIMEOUT_S), contextlib.suppress(InferdError):
            totals = await worker.client.exchange_served(elsewhere)
            served[name] = {names[user]: n for user, n in totals.items() if user in names}

    async with anyio.create_task_group() as group:
        for model in daemon.registry.catalog.known():
            worker = model.loaded
            if worker is not None and model.uid is None:
                tokens = p.elsewhere.get(model.name, {})
                known = {numbers[user]: n for user, n in tokens.items() if user in numbers}
                group.start_soon(exchange, model.name, worker, known)
    return w.ExchangeServedResult(served=served)


NOTES_MAX = 8


async def export_model(daemon: Daemon, request: Request) -> w.ExportModelResult:
    """Return the next part of a model's file, or of its projector."""
    p: w.ExportModelParams = request.params
    exports, owner = daemon.model_exports, request.connection
    if p.offset:
        export = exports.find(p.transfer, owner)
    else:
        model = daemon.find_model(request, p.name).model
        if model.uid is not None:
            raise UnsupportedOperation(f"the model {p.name!r} came by a descriptor")
        configured = daemon.registry.catalog.configuration_of(model).file
        file: Path | None = check_single_file(p.name, configured)
        if p.projector:
            file = await daemon.registry.find_projector(model)
        if file is None:
            return w.ExportModelResult(data=b"", size=0)
        export = exports.begin(p.transfer, file, owner)
    try:
        data, sha256 = await export.read_part(p.offset)
    except BaseException:
        daemon.registry.start_soon(exports.end, p.transfer, owner)
        raise
    if sha256:
        await exports.end(p.transfer, owner)
    return w.ExportModelResult(data=data, size=export.size, sha256=sha256)


async def import_model(daemon: Daemon, request: Request) -> w.ImportModelResult:
    """Write the next part of a model's file, or of its projector before it; publish the model with
    the last one.
    """
    daemon.check_open()
    p: w.ImportModelParams = request.params
    if p.offset + len(p.data) >= p.size and not p.sha256:
        raise InvalidArgument("the last part of a file has no SHA-256")
    imports, owner = daemon.model_imports, request.connection
    if p.offset or imports.is_under_way(p.transfer, owner):
        found = imports.find(p.transfer, owner)
    else:
        found = imports.begin(p.transfer, p.name, daemon.config.models_dir, owner)
    part = ImportedPart(p.offset, p.data, p.size, p.sha256, p.projector)
    arrived = await imports.add_part(found, p.transfer, part)
    if arrived:
        event = "model.projector_arrived" if p.projector else "model.arrived"
        log.info(event, model=p.name, bytes=p.size, sha256=p.sha256)
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
    found = imports.begin(transfer, p.name, folder, request.connection)
    passed = PassedModel(p.fd, status.st_size, p.sha256, p.notes)
    report = _ProgressReport(request) if p.progress else lambda fraction: None
    sha256 = await imports.add_passed(found, transfer, passed, user, report)
    log.info("model.added", model=p.name, bytes=status.st_size, uid=request.uid)
    return w.AddModelResult(file=str(file), size_bytes=status.st_size, sha256=sha256, added=True)


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
    table = daemon.config.tables.get(name)
    if table is not None and is_other_model(table, file):
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
