"""inferd's own calls on contexts, models and the daemon, as the asynchronous client's methods."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, Unpack, cast

from ...backends.errors import Busy, InvalidArgument, OutOfMemory
from ...backends.shared_memory import new_shared_memory
from ...wire.frames import FRAME_BYTES_MAX
from .. import messages as w
from ..names import Priority
from ..payloads import ENVELOPE_BYTES, Message, open_file
from .buffers import Buffer
from .caller import as_event
from .parameters import Options, Parameters
from .results import (
    DeletionInfo,
    ModelInfo,
    ParameterInfo,
    SessionInfo,
    ShownModel,
    StateInfo,
    Stats,
    TaskInfo,
    UsageInfo,
)
from .texts import Rendered
from .turn_settings import with_parameters
from .wasi_calls import AsyncWasiCalls, ProgressCallback

_PART_BYTES = FRAME_BYTES_MAX - ENVELOPE_BYTES
UsageColumn: TypeAlias = Literal["user", "model", "label", "key", "hour", "day"]


class AsyncOperations(AsyncWasiCalls):
    """The calls that wasi-nn does not have."""

    async def free_tensors(self, tensors: Sequence[int], *, timeout: float | None = None) -> None:
        """Free the tensors with these handles that stay in the daemon; unknown ones are ignored."""
        for begin in range(0, len(tensors), w.FREED_MAX):
            part = list(tensors[begin : begin + w.FREED_MAX])
            params = w.FreeTensorsParams(tensors=part)
            await self._call("free_tensors", params, w.Empty, timeout)

    async def buffer(self, size: int, *, timeout: float | None = None) -> Buffer:
        """Return a new buffer of *size* bytes that the client shares with the processes of graphs.

        :raises QuotaExceeded: the user's buffers are too many or too large.
        """
        if size < 1:
            raise InvalidArgument(f"a buffer of {size} bytes", hint="pass a number from 1 on")
        try:
            descriptor = new_shared_memory(size)
            try:
                memory = mmap.mmap(descriptor, size)
                found = await self._call(
                    "register_buffer",
                    w.RegisterBufferParams(fd=0),
                    w.BufferResult,
                    timeout,
                    descriptors=[descriptor],
                )
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise OutOfMemory(
                f"there is no memory for a buffer of {size} bytes: {exc.strerror}",
                hint="make a smaller one",
            ) from None
        return Buffer(found.buffer, memory, self._open_connection)

    async def register_buffer(
        self, size: int = 0, *, fd: int | None = None, timeout: float | None = None
    ) -> w.BufferResult:
        """Register a memfd of fixed size, or a buffer that the daemon makes; return its handle.
        `buffer` does both for programs that use NumPy.
        """
        params = w.RegisterBufferParams(fd=-1 if fd is None else 0, size=size)
        descriptors = [] if fd is None else [fd]
        return await self._call(
            "register_buffer", params, w.BufferResult, timeout, descriptors=descriptors
        )

    async def write_buffer(
        self, buffer: int, offset: int, data: bytes, *, timeout: float | None = None
    ) -> None:
        """Write a part of a buffer; more bytes than a frame has room for are sent in parts."""
        for begin in range(0, len(data), _PART_BYTES):
            part = data[begin : begin + _PART_BYTES]
            params = w.WriteBufferParams(buffer=buffer, offset=offset + begin, data=part)
            await self._call("write_buffer", params, w.Empty, timeout)

    async def read_buffer(
        self, buffer: int, offset: int, size: int, *, timeout: float | None = None
    ) -> bytes:
        """Return a part of a buffer."""
        parts = []
        for begin in range(0, size, w.BUFFER_PART_BYTES_MAX):
            params = w.ReadBufferParams(
                buffer=buffer,
                offset=offset + begin,
                size=min(size - begin, w.BUFFER_PART_BYTES_MAX),
            )
            part = await self._call("read_buffer", params, w.ReadBufferResult, timeout)
            parts.append(part.data)
        return b"".join(parts)

    async def free_buffers(
        self, buffers: Sequence[Buffer | int], *, timeout: float | None = None
    ) -> None:
        """Free buffers; the daemon ignores unknown ones."""
        handles = [one if isinstance(one, int) else one.handle for one in buffers]
        for begin in range(0, len(handles), w.BUFFERS_FREED_MAX):
            params = w.FreeBuffersParams(buffers=handles[begin : begin + w.BUFFERS_FREED_MAX])
            await self._call("free_buffers", params, w.Empty, timeout)

    async def open_channel(self, graph: int, *, timeout: float | None = None) -> socket.socket:
        """Return a socket to the process of a graph, which takes the frames of a channel.
        `AsyncClient.graph` uses one by itself.

        :raises InferdError: there is no channel; use `compute`.
        """
        try:
            own, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:
            raise Busy(
                f"there is no socket for a channel: {exc.strerror}",
                hint="close files, or use the calls of the connection",
            ) from None
        try:
            with passed:
                params = w.OpenChannelParams(graph=graph, fd=0)
                descriptors = [passed.fileno()]
                await self._call(
                    "open_channel", params, w.Empty, timeout, descriptors=descriptors, retries=0
                )
        except BaseException:
            own.close()
            raise
        return own

    async def cancel(
        self,
        context: int | None = None,
        *,
        request: int | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Cancel a context's turn, or a request by its id; return whether there was one.

        With the rights `see-all` and `manage` it may be a turn of another user.
        """
        params = w.CancelParams(request=request, context=context)
        return (await self._call("cancel", params, w.CancelResult, timeout)).cancelled

    async def park(self, context: int, *, timeout: float | None = None) -> bool:
        """Park a context's turn: waiting tasks get its slot, and it continues in the next free one.

        Return whether it will be parked. With the rights `see-all` and `manage` it may be a turn of
        another user.
        """
        params = w.ContextParams(context=context)
        return (await self._call("park", params, w.ParkResult, timeout)).parked

    async def end_reasoning(
        self, context: int, *, timeout: float | None = None
    ) -> w.EndReasoningResult:
        """End the present thought of a context's turn, so that its answer begins now.

        Return whether it ends (`ended`), else the `reason`. With the rights `see-all` and `manage`
        it may be a turn of another user.
        """
        params = w.ContextParams(context=context)
        return await self._call("end_reasoning", params, w.EndReasoningResult, timeout)

    async def reset(
        self, context: int, system: str | None = None, *, timeout: float | None = None
    ) -> None:
        """Clear a context's history, and begin it with *system* if that is given."""
        params = w.SystemParams(context=context, system=system)
        await self._call("reset", params, w.Empty, timeout)

    async def fork_session(
        self,
        context: int,
        n: int = 1,
        *,
        session_ids: Sequence[str] = (),
        priority: Priority | None = None,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> w.ForkResult:
        """Make *n* branches of a context's present state, all or none of them.

        *session_ids* are the branches' ids, if they are to have any. If too many contexts are open,
        the call waits for places in the class *priority*, by default the context's, for at most
        *queue_timeout* seconds; without *queue_timeout* it fails at once.
        """
        params = w.ForkParams(
            context=context, n=n, session_ids=list(session_ids), priority=priority or ""
        )
        if queue_timeout:
            params.queue_timeout_s = queue_timeout
        return await self._call("fork_session", params, w.ForkResult, timeout)

    async def rewind(
        self,
        context: int,
        *,
        turns: int | None = None,
        tokens: int | None = None,
        timeout: float | None = None,
    ) -> w.RewindResult:
        """Drop the last *turns* of a context's history, or all but its first *tokens* tokens."""
        params = w.RewindParams(context=context, turns=turns, tokens=tokens)
        return await self._call("rewind", params, w.RewindResult, timeout)

    async def history(
        self,
        context: int | None = None,
        *,
        session_id: str | None = None,
        timeout: float | None = None,
    ) -> w.HistoryResult:
        """Return the messages of a session, with the answer so far, and its turns.

        The session is named by its context or, wherever it is open, by its id. `turns` has the
        number of messages before each turn that `rewind` can remove.
        """
        params = w.HistoryParams(context=context, session_id=session_id)
        return await self._call("history", params, w.HistoryResult, timeout)

    async def session_media(
        self,
        sha256: str,
        context: int | None = None,
        *,
        session_id: str | None = None,
        offset: int | None = None,
        timeout: float | None = None,
    ) -> w.SessionMediaResult:
        """Return the whole `data` of an image or a sound in the messages of a session, by its hash,
        with its `media_type`. With *offset*, return only a part of it from there on, of at most
        512 KiB, which is empty at the end; `size` is that of the whole.

        The session is named as in `history`, whose messages have the hashes.
        """
        params = w.SessionMediaParams(
            context=context, session_id=session_id, sha256=sha256, offset=offset or 0
        )
        parts: list[bytes] = []
        while True:
            part = await self._call("session_media", params, w.SessionMediaResult, timeout)
            if offset is not None:
                return part
            parts.append(part.data)
            params.offset += len(part.data)
            if not part.data or params.offset >= part.size:
                return w.SessionMediaResult(
                    data=b"".join(parts), size=params.offset, media_type=part.media_type
                )

    async def delete_session(
        self,
        context: int | None = None,
        *,
        session_id: str | None = None,
        undo_s: float = 0.0,
        timeout: float | None = None,
    ) -> bool:
        """Delete a session and its stored data; return whether there was one.

        The session is named by its context or, wherever it is open, by its id. Within *undo_s*
        seconds, `restore_session` restores one that was named by its id.
        """
        params = w.DeleteSessionParams(context=context, session_id=session_id, undo_s=undo_s)
        return (await self._call("delete_session", params, w.DeleteSessionResult, timeout)).deleted

    async def restore_session(
        self, session_id: str, *, timeout: float | None = None
    ) -> SessionInfo:
        """Restore a session that was deleted with *undo_s*, and return it as `sessions` does."""
        params = w.SessionIdParams(session_id=session_id)
        result = await self._call("restore_session", params, w.SessionResult, timeout)
        return cast("SessionInfo", result.session)

    async def update_session(
        self,
        session_id: str,
        *,
        title: str | None = None,
        kept: bool | None = None,
        priority: Priority | None = None,
        options: Mapping[str, Any] | None = None,
        unset: Sequence[str] = (),
        timeout: float | None = None,
    ) -> SessionInfo:
        """Change a session, open or dormant, and return it as `sessions` does.

        An empty *title* is replaced by the first words of the first message. A *kept* session is
        not deleted while it is dormant. The parameters *unset* lose the session's own value.
        """
        params = w.UpdateSessionParams(
            session_id=session_id,
            title=title,
            kept=kept,
            priority=priority or "",
            options=dict(options or {}),
            unset=list(unset),
        )
        result = await self._call("update_session", params, w.SessionResult, timeout)
        return cast("SessionInfo", result.session)

    async def list_deletions(
        self, *, clear: bool = False, timeout: float | None = None
    ) -> list[DeletionInfo]:
        """Return notes on the user's sessions that the daemon has deleted by itself, the latest
        first. With *clear* the notes are deleted.
        """
        params = w.ListDeletionsParams(clear=clear)
        result = await self._call("list_deletions", params, w.ListDeletionsResult, timeout)
        return cast("list[DeletionInfo]", result.deletions)

    async def save_state(
        self, context: int, name: str, *, replace: bool = False, timeout: float | None = None
    ) -> w.SaveStateResult:
        """Save a context's present state as *name*, with which other contexts can begin.

        The state is kept over restarts, until it is deleted. With *replace* the name may be in use.
        """
        params = w.SaveStateParams(context=context, name=name, replace=replace)
        return await self._call("save_state", params, w.SaveStateResult, timeout)

    async def list_states(self, *, timeout: float | None = None) -> list[StateInfo]:
        """Return the user's named states."""
        result = await self._call("list_states", w.Empty(), w.ListStatesResult, timeout)
        return cast("list[StateInfo]", result.states)

    async def delete_state(self, name: str, *, timeout: float | None = None) -> bool:
        """Delete a named state; return whether there was one. Contexts that began with it stay."""
        params = w.DeleteStateParams(name=name)
        return (await self._call("delete_state", params, w.DeleteStateResult, timeout)).deleted

    async def add_model(
        self,
        name: str,
        path: str | os.PathLike[str] | None = None,
        *,
        sha256: str = "",
        notes: Mapping[str, bytes] | None = None,
        with_hash: bool = False,
        on_progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> w.AddModelResult:
        """Copy one of the user's own files to the daemon's models directory, for all users (right
        `manage`). The daemon gets its descriptor, not its path.

        Nothing is replaced. Without a *path* nothing is changed; the result is the file that the
        daemon has under this name, *with_hash* also its hash. *notes* are texts to keep beside the
        file, such as its licence.
        """
        params = w.AddModelParams(
            name=name,
            sha256=sha256,
            notes={} if notes is None else dict(notes),
            with_hash=with_hash,
            progress=on_progress is not None,
        )
        if path is None:
            return await self._call("add_model", params, w.AddModelResult, timeout)
        fd = await open_file(self._driver.run_in_thread, path)
        try:
            params.fd = 0
            return await self._call(
                "add_model",
                params,
                w.AddModelResult,
                timeout,
                descriptors=[fd],
                on_event=on_progress
                and (lambda event: on_progress(as_event(event, w.ProgressEvent).progress)),
            )
        finally:
            os.close(fd)

    async def copy_model(
        self, name: str, to: str, *, sha256: str = "", timeout: float | None = None
    ) -> w.CopyModelResult:
        """Copy a model's file, and its projector, to the node *to* of a fleet, from a node that has
        them (for operators).

        The file must have the hash *sha256*, if that is given. Nothing is copied to a node that has
        the files.
        """
        params = w.CopyModelParams(name=name, to=to, sha256=sha256)
        return await self._call("copy_model", params, w.CopyModelResult, timeout)

    async def export_model(
        self,
        name: str,
        transfer: str,
        *,
        offset: int = 0,
        projector: bool = False,
        timeout: float | None = None,
    ) -> w.ExportModelResult:
        """Return the next part of a model's file, or of its *projector*, to be imported at another
        daemon (right `manage`).

        The part at 0 begins the *transfer*, an id of the caller's choice; the last part has the
        file's hash. A model without a projector has one of 0 bytes.
        """
        params = w.ExportModelParams(
            name=name, transfer=transfer, offset=offset, projector=projector
        )
        return await self._call("export_model", params, w.ExportModelResult, timeout)

    async def import_model(
        self,
        name: str,
        transfer: str,
        data: bytes,
        size: int,
        *,
        offset: int = 0,
        sha256: str = "",
        projector: bool = False,
        timeout: float | None = None,
    ) -> w.ImportModelResult:
        """Write the next part of a file that `export_model` has returned (right `manage`).

        With the last part, the file must have the hash *sha256*; then the model can be loaded. A
        *projector* is written before the model, in the same transfer.
        """
        params = w.ImportModelParams(
            name=name,
            transfer=transfer,
            data=data,
            size=size,
            offset=offset,
            sha256=sha256,
            projector=projector,
        )
        return await self._call("import_model", params, w.ImportModelResult, timeout)

    async def end_model_transfer(self, transfer: str, *, timeout: float | None = None) -> None:
        """End the export or the incomplete import of a model's file (right `manage`).

        The file of an incomplete import is removed.
        """
        params = w.EndModelTransferParams(transfer=transfer)
        await self._call("end_model_transfer", params, w.Empty, timeout)

    async def export_session(
        self,
        session_id: str,
        transfer: str,
        *,
        uid: int | None = None,
        label: str = "",
        peer: str = "",
        offset: int = 0,
        timeout: float | None = None,
    ) -> w.ExportResult:
        """Return the next part of a dormant session, to be imported at another daemon (right
        `manage`).

        The part at 0 begins the *transfer*, an id of the caller's choice. Until the transfer ends,
        the session cannot be opened. *uid* is the session's user, *peer* the caller's name for the
        other daemon.
        """
        params = w.ExportParams(
            session_id=session_id, transfer=transfer, uid=uid, label=label, peer=peer, offset=offset
        )
        return await self._call("export_session", params, w.ExportResult, timeout)

    async def import_session(
        self,
        session_id: str,
        transfer: str,
        data: bytes,
        size: int,
        *,
        on_behalf_of: str = "",
        label: str = "",
        peer: str = "",
        offset: int = 0,
        timeout: float | None = None,
    ) -> w.ImportResult:
        """Send the next part of a session that `export_session` has returned (right `manage`).

        With the last part the session has arrived; `end_transfer` then makes it usable.
        """
        params = w.ImportParams(
            session_id=session_id,
            transfer=transfer,
            data=data,
            size=size,
            on_behalf_of=on_behalf_of,
            label=label,
            peer=peer,
            offset=offset,
        )
        return await self._call("import_session", params, w.ImportResult, timeout)

    async def end_transfer(
        self,
        transfer: str,
        outcome: Literal["keep", "release", "drop"],
        *,
        timeout: float | None = None,
    ) -> None:
        """End a session's move at this daemon (right `manage`).

        With the *outcome* `keep` the session stays here, and with `release` it leaves. With `drop`
        its copy or record here is deleted.
        """
        params = w.EndTransferParams(transfer=transfer, outcome=outcome)
        await self._call("end_transfer", params, w.Empty, timeout)

    async def read_copy(
        self,
        session_id: str,
        *,
        on_behalf_of: str = "",
        label: str = "",
        timeout: float | None = None,
    ) -> w.ReadCopyResult:
        """Return a whole session, open or dormant, for `store_copy` at another daemon (right
        `manage`).
        """
        params = w.ReadCopyParams(session_id=session_id, on_behalf_of=on_behalf_of, label=label)
        return await self._call("read_copy", params, w.ReadCopyResult, timeout)

    async def store_copy(
        self,
        session_id: str,
        stream: str,
        number: int,
        data: bytes,
        *,
        size: int | None = None,
        on_behalf_of: str = "",
        label: str = "",
        peer: str = "",
        offset: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Apply a change to a copy of a session that is on another daemon, *peer* (right `manage`).

        A change of more than `PART_BYTES` is sent in parts; *size* is that of all parts.
        `end_transfer` of the stream makes the copy an ordinary session, or deletes it.
        """
        params = w.StoreCopyParams(
            session_id=session_id,
            stream=stream,
            number=number,
            data=data,
            size=len(data) if size is None else size,
            on_behalf_of=on_behalf_of,
            label=label,
            peer=peer,
            offset=offset,
        )
        await self._call("store_copy", params, w.Empty, timeout)

    async def exchange_served(
        self,
        elsewhere: Mapping[str, Mapping[str, int]] | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, dict[str, int]]:
        """Report the tokens that other daemons have computed, by model and user; they count in the
        users' fair shares here. Return the tokens computed here so far (right `delegate`).
        """
        models = {name: dict(users) for name, users in (elsewhere or {}).items()}
        params = w.ExchangeServedParams(elsewhere=models)
        return (await self._call("exchange_served", params, w.ExchangeServedResult, timeout)).served

    async def set_options(
        self,
        context: int,
        options: Options | dict[str, Any] | None = None,
        *,
        priority: Priority | None = None,
        note: bytes | None = None,
        timeout: float | None = None,
        **parameters: Unpack[Parameters],
    ) -> None:
        """Set parameters and a priority for a context's next turns.

        A *note* is stored with the session, as long as this exists, and `history` returns it; an
        empty one deletes the stored one.
        """
        params = w.OptionsParams(
            context=context,
            options=with_parameters(options, parameters),
            priority=priority or "",
            note=note,
        )
        await self._call("set_options", params, w.Empty, timeout)

    async def parameters(
        self, context: int, *, timeout: float | None = None
    ) -> list[ParameterInfo]:
        """Return every parameter in force for a context."""
        params = w.ContextParams(context=context)
        result = await self._call("parameters", params, w.ParametersResult, timeout)
        return cast("list[ParameterInfo]", result.parameters)

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """Return the models."""
        result = await self._call("models", w.ModelsParams(), w.ModelsResult, timeout)
        return cast("list[ModelInfo]", result.models)

    async def files_not_offered(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        """Return the files of the models directory that are not offered as models, each with its
        `file` and the `reason`.
        """
        params = w.ModelsParams(all_files=True)
        result = await self._call("models", params, w.ModelsResult, timeout)
        return result.not_offered

    async def show(self, name: str, *, timeout: float | None = None) -> ShownModel:
        """Return the description of a model."""
        result = await self._call("show", w.NamesParams(name=name), w.ModelsResult, timeout)
        return cast("ShownModel", result.models[0] if result.models else {})

    async def unload_model(
        self, name: str, *, force: bool = False, timeout: float | None = None
    ) -> None:
        """Unload a model (right `manage`); with *force* even while it is in use."""
        params = w.NamesParams(name=name, force=force)
        await self._call("unload_model", params, w.Empty, timeout)

    async def pin(self, name: str, *, timeout: float | None = None) -> None:
        """Keep a model in memory once it is loaded, even if others need it (right `manage`)."""
        await self._call("pin", w.NameParams(name=name), w.Empty, timeout)

    async def unpin(self, name: str, *, timeout: float | None = None) -> None:
        """Permit the daemon to unload a pinned model again (right `manage`)."""
        await self._call("unpin", w.NameParams(name=name), w.Empty, timeout)

    async def swap(
        self,
        name: str,
        to: str,
        *,
        mode: Literal["migrate", "drain"] = "migrate",
        force: bool = False,
        timeout: float | None = None,
    ) -> w.SwapResult:
        """Replace the model behind *name* by another (right `manage`).

        *to* is a model's name or a file of the models directory. If it is *name* itself, the swap
        ends, and the model's own file is loaded again. Sessions continue; running turns end on the
        old model. With the mode `drain`, or if memory does not hold both, the old model is unloaded
        before the new one is loaded. With *force* the swap is made even if the new model only makes
        embeddings; sessions that generate text then fail. The call waits until the previous swap of
        the name has ended.
        """
        params = w.SwapParams(name=name, to=to, mode=mode, force=force)
        return await self._call("swap", params, w.SwapResult, timeout)

    async def add_adapter(
        self,
        name: str,
        adapter: str,
        file: str,
        *,
        scale: float = 0.0,
        timeout: float | None = None,
    ) -> w.AddAdapterResult:
        """Add an adapter from a *file* in the models directory to a model (right `manage`).

        Requests select adapters with the parameter `lora`; for all others it has this *scale*.
        """
        params = w.AddAdapterParams(name=name, adapter=adapter, file=file, scale=scale)
        return await self._call("add_adapter", params, w.AddAdapterResult, timeout)

    async def remove_adapter(
        self, name: str, adapter: str, *, force: bool = False, timeout: float | None = None
    ) -> None:
        """Remove an adapter from a model (right `manage`); with *force* turns that use it fail."""
        params = w.RemoveAdapterParams(name=name, adapter=adapter, force=force)
        await self._call("remove_adapter", params, w.Empty, timeout)

    async def sessions(
        self,
        *,
        dormant: bool = False,
        all_users: bool = False,
        session_id: str | None = None,
        search: str = "",
        timeout: float | None = None,
    ) -> list[SessionInfo]:
        """Return the user's sessions, with *dormant* also those that are not open.

        With *all_users* (right `see-all`) return those of all users; with *session_id* only those
        with this id, and with *search* those whose title or first message has this text.
        """
        params = w.SessionsParams(
            dormant=dormant, all=all_users, session_id=session_id, search=search
        )
        result = await self._call("sessions", params, w.SessionsResult, timeout)
        return cast("list[SessionInfo]", result.sessions)

    async def list_sessions(
        self, *, search: str = "", timeout: float | None = None
    ) -> w.SessionsResult:
        """Return all sessions of the user as `sessions` does, and the bounds past which dormant
        ones are deleted.
        """
        params = w.SessionsParams(dormant=True, search=search)
        return await self._call("sessions", params, w.SessionsResult, timeout)

    async def queue(
        self, *, all_users: bool = False, timeout: float | None = None
    ) -> list[TaskInfo]:
        """Return the user's waiting and running tasks, with *all_users* (right `see-all`) all."""
        params = w.QueueParams(all=all_users)
        return cast(
            "list[TaskInfo]", (await self._call("queue", params, w.QueueResult, timeout)).tasks
        )

    async def usage(
        self,
        by: Sequence[UsageColumn] = ("model",),
        *,
        since: float = 604_800.0,
        all_users: bool = False,
        timeout: float | None = None,
    ) -> list[UsageInfo]:
        """Return the user's usage of the last *since* seconds, in sums *by* columns.

        With *all_users* (right `see-all`) return that of all users.
        """
        found = await self.usage_and_limits(by, since=since, all_users=all_users, timeout=timeout)
        return cast("list[UsageInfo]", found.usage)

    async def usage_and_limits(
        self,
        by: Sequence[UsageColumn] = ("model",),
        *,
        since: float = 604_800.0,
        all_users: bool = False,
        timeout: float | None = None,
    ) -> w.UsageResult:
        """Return usage as `usage` does, and the limits of the user and of a gateway's key."""
        params = w.UsageParams(by=list(by), since_s=since, all=all_users)
        return await self._call("usage", params, w.UsageResult, timeout)

    async def stats(self, *, timeout: float | None = None) -> Stats:
        """Return the daemon's statistics."""
        return cast("Stats", (await self._call("stats", w.Empty(), w.StatsResult, timeout)).stats)

    async def metrics(self, *, timeout: float | None = None) -> str:
        """Return all metrics in Prometheus's text format."""
        return (await self._call("metrics", w.Empty(), w.MetricsResult, timeout)).text

    async def log_level(
        self, levels: Mapping[str, str] | None = None, *, timeout: float | None = None
    ) -> dict[str, str]:
        """Set the log levels of loggers (right `manage`) and return those of all loggers.

        They apply until the daemon reads its configuration again.
        """
        params = w.LogLevelParams(levels=dict(levels or {}))
        return (await self._call("log_level", params, w.LogLevelResult, timeout)).levels

    async def tokenize(
        self,
        graph: int,
        text: str,
        *,
        special: bool = False,
        bos: bool = False,
        timeout: float | None = None,
    ) -> list[int]:
        """Return a text's token ids; with *special*, special tokens' names become those tokens."""
        params = w.TokenizeParams(graph=graph, text=text, special=special, bos=bos)
        return (await self._call("tokenize", params, w.TokensResult, timeout)).tokens

    async def detokenize(
        self, graph: int, tokens: Sequence[int], *, timeout: float | None = None
    ) -> bytes:
        """Return the bytes of token ids; many of them take several calls."""
        parts = await self._detokenize(graph, tokens, timeout)
        return b"".join(part.text for part in parts)

    async def token_pieces(
        self, graph: int, tokens: Sequence[int], *, timeout: float | None = None
    ) -> list[bytes]:
        """Return the bytes of each token id; those of one token may be incomplete characters."""
        pieces = list[bytes]()
        for part in await self._detokenize(graph, tokens, timeout, sizes=True):
            ends = list(accumulate(part.sizes, initial=0))
            pieces += [part.text[begin:end] for begin, end in pairwise(ends)]
        return pieces

    async def _detokenize(
        self, graph: int, tokens: Sequence[int], timeout: float | None, *, sizes: bool = False
    ) -> list[w.TextResult]:
        found = []
        for start in range(0, max(1, len(tokens)), w.DETOKENIZE_TOKENS_MAX):
            part = list(tokens[start : start + w.DETOKENIZE_TOKENS_MAX])
            params = w.DetokenizeParams(graph=graph, tokens=part, sizes=sizes)
            found.append(await self._call("detokenize", params, w.TextResult, timeout))
        return found

    async def apply_template(
        self,
        graph: int,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        timeout: float | None = None,
    ) -> Rendered:
        """Return the prompt that the model's chat template makes of *messages*.

        *arguments* are the template's own variables, such as `enable_thinking`. Without
        *add_generation_prompt* the prompt ends with the last message, and with
        *continue_final_message* within that, which begins the answer.
        """
        params = w.TemplateParams(
            graph=graph,
            messages=[dict(message) for message in messages],
            tools=[dict(t) for t in tools],
            arguments=dict(arguments or {}),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        result = await self._call("apply_template", params, w.TemplateResult, timeout)
        return Rendered(result.text.decode(), result.tokens)

    async def drain(
        self,
        *,
        stop: bool = False,
        node: str = "",
        undo: bool = False,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> w.DrainResult:
        """Make the daemon finish its turns and refuse new ones; with *stop* it then exits.

        In a fleet, only *node* is drained: it gets no new contexts, and its sessions move to other
        nodes, with a wait of at most *wait* seconds for turns under way. With *undo* the node is
        used again.
        """
        params = w.DrainParams(stop=stop, node=node, undo=undo, wait_s=wait)
        return await self._call("drain", params, w.DrainResult, timeout)
