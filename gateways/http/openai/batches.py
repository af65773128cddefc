"""OpenAI's `/v1/files` for batches, and `/v1/batches`, which are the daemon's jobs and their files.

A file is passed on to the daemon as it arrives. It and its batches belong to the caller's user and
label at the daemon, as sessions do: another key of the same name and user has them too.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal

import anyio
from msgspec import Meta, Struct

from ....backends.errors import InferdError, InvalidArgument, NotFound, UnsupportedOperation
from ....ipc import messages as w
from ....ipc.client import AsyncClient, JobFileInfo, JobInfo
from ....ipc.names import Priority
from ..exchange import Exchange
from ..fields import PRIORITY_FIELD, FieldTable, honoured, ignored
from ..limits import CLOSE_S_MAX
from ..multipart import FormReader
from .forms import list_page

LISTED_MAX = 10_000
_WINDOW = re.compile(r"([1-9]\d{0,3})([hd])")
_SECONDS = {"h": 3600.0, "d": 86_400.0}
_STATES = {"waiting": "in_progress", "running": "in_progress"}
JSON_LINES = b"application/jsonl"


class BatchRequest(Struct, kw_only=True):
    """The fields of a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    priority: Priority | None = None


class ListQuery(Struct, kw_only=True):
    """A part of a list."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = 20


class FilesQuery(ListQuery, kw_only=True):
    """A part of the list of files."""

    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


BATCHES = FieldTable(
    "/v1/batches",
    [
        honoured("input_file_id", "a file of `/v1/files`, with one request in each line"),
        honoured("endpoint", "the `url` of all lines"),
        honoured(
            "completion_window",
            "hours or days, such as `24h` or `7d`, after which the rest is given up",
        ),
        honoured("metadata", "returned in the batch"),
        PRIORITY_FIELD,
        ignored("output_expires_after", "results are kept as long as the daemon's settings say"),
    ],
    kind=BatchRequest,
)
_AFTER = honoured("after", "the id of an entry: those after it")
_LIMIT = honoured("limit", "20 if absent")
LIST_BATCHES = FieldTable("/v1/batches", [_AFTER, _LIMIT], kind=ListQuery, method="GET")
LIST_FILES = FieldTable(
    "/v1/files",
    [
        _AFTER,
        _LIMIT,
        honoured("order", "`asc`, or `desc` (the default): the latest first"),
        honoured("purpose", "only files with this purpose"),
    ],
    kind=FilesQuery,
    method="GET",
)


# Files.


async def create_file(exchange: Exchange) -> None:
    """Upload a file with the requests of a batch."""
    form = FormReader(exchange.headers.get("content-type", ""))
    async with exchange.turns.pool.lease(exchange.caller) as client:
        upload = _Upload(client)
        try:
            async for data in exchange.body_parts():
                for part in form.add(data):
                    await upload.add(part.data, form.file_name or "")
            form.check_end()
            check_purpose(form.fields.get("purpose", ""))
            file = await upload.finish(form.file_name or "")
        except BaseException:
            await upload.give_up()
            raise
    await exchange.send_json(file_object(file))


class _Upload:
    """A file on its way to the daemon, in parts of its size."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self._params = w.UploadFileParams()
        self._pending = bytearray()

    async def add(self, data: bytes, name: str) -> None:
        self._pending += data
        while len(self._pending) > w.JOB_PART_BYTES_MAX:
            await self._send(name, w.JOB_PART_BYTES_MAX)

    async def finish(self, name: str) -> JobFileInfo:
        """Send the rest, and return the file."""
        self._params.end = True
        return await self._send(name, len(self._pending))

    async def _send(self, name: str, size: int) -> JobFileInfo:
        self._params.name, self._params.data = name[:200], bytes(self._pending[:size])
        del self._pending[:size]
        file = await self._client.jobs.upload_part(self._params)
        self._params.file, self._params.offset = file["id"], file["bytes"]
        return file

    async def give_up(self) -> None:
        """Have the daemon delete an upload that has not ended."""
        if self._params.file and self._client.connected:
            with anyio.move_on_after(CLOSE_S_MAX, shield=True), suppress(InferdError):
                await self._client.jobs.delete_file(self._params.file)


def check_purpose(purpose: str) -> None:
    """Check the purpose of a file.

    :raises UnsupportedOperation: it is not that of a batch.
    """
    if purpose != "batch":
        raise UnsupportedOperation(
            f"the purpose {purpose[:50]!r} of a file", hint="only `batch` is supported"
        )


def file_object(file: JobFileInfo) -> dict[str, Any]:
    """Return a file in OpenAI's form."""
    is_input, expires_at = file["purpose"] == "input", file["expires_at"]
    return {
        "id": file["id"],
        "object": "file",
        "bytes": file["bytes"],
        "created_at": int(file["created_at"]),
        "expires_at": None if expires_at is None else int(expires_at),
        "filename": file["name"] or f"{file['id']}.jsonl",
        "purpose": "batch" if is_input else "batch_output",
        "status": "processed",
    }


async def list_files(exchange: Exchange) -> None:
    """Answer with the caller's files."""
    query = LIST_FILES.read_query(exchange.query)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        found = await client.jobs.files()
    shown = [file_object(file) for file in found if not _is_of_response(file)]
    if query.purpose is not None:
        shown = [each for each in shown if each["purpose"] == query.purpose]
    if query.order == "asc":
        shown.reverse()
    await exchange.send_json(list_page(shown, query.after, query.limit, "entry"))


def _is_of_response(file: JobFileInfo) -> bool:
    """Return whether a file belongs to a response in the background."""
    return file["name"].startswith("resp_") or file["job"].startswith("resp_")


async def show_file(exchange: Exchange) -> None:
    """Answer with one file."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        file = await client.jobs.file(exchange.params["file"])
    await exchange.send_json(file_object(file))


async def read_content(exchange: Exchange) -> None:
    """Answer with the content of a file."""
    file_id = exchange.params["file"]
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await client.jobs.file(file_id)  # before the response begins
        await exchange.send_parts(_content(client, file_id), JSON_LINES, [])


async def _content(client: AsyncClient, file_id: str) -> AsyncIterator[bytes]:
    offset = 0
    while data := (await client.jobs.read_file(file_id, offset)).data:
        yield data
        offset += len(data)


async def delete_file(exchange: Exchange) -> None:
    """Delete a file; results are deleted with their batch, by age and for newer ones."""
    file_id = exchange.params["file"]
    async with exchange.turns.pool.lease(exchange.caller) as client:
        file = await client.jobs.file(file_id)
        if file["job"]:
            await _delete_results(client, file["job"])
        else:
            await client.jobs.delete_file(file_id)
    await exchange.send_json({"id": file_id, "object": "file", "deleted": True})


async def _delete_results(client: AsyncClient, job_id: str) -> None:
    """Delete the batch that has written a file.

    :raises InvalidArgument: it has not ended.
    """
    job = await client.jobs.get(job_id)
    if job["state"] in _STATES:
        raise InvalidArgument("the batch has not ended", hint="cancel it first")
    await client.jobs.delete(job_id)


# Batches.


def window_s(window: str) -> float:
    """Return the seconds of a completion window.

    :raises InvalidArgument: it has another form.
    """
    found = _WINDOW.fullmatch(window)
    if found is None or (seconds := int(found[1]) * _SECONDS[found[2]]) > 30 * 86_400:
        raise InvalidArgument(
            f"the completion_window {window[:50]!r} is not in hours or days",
            hint="such as 24h; 30d at most",
            data={"param": "completion_window"},
        )
    return seconds


async def create_batch(exchange: Exchange) -> None:
    """Submit the requests of a file."""
    request, _ = exchange.read_fields(BATCHES)
    caller, priority = exchange.caller, request.priority or "low"
    caller.check_priority(priority)
    try:
        async with exchange.turns.pool.lease(caller) as client:
            job = await client.jobs.submit_file(
                request.input_file_id,
                endpoint=request.endpoint,
                priority=priority,
                expires=window_s(request.completion_window),
                metadata=request.metadata,
                models=caller.models,
            )
    except InferdError as exc:
        raise BATCHES.name_field(exc) from None
    await exchange.send_json(batch_object(job))


def batch_object(job: JobInfo) -> dict[str, Any]:
    """Return a job in OpenAI's form."""
    state = job["state"]
    ended_at = None if job["ended_at"] is None else int(job["ended_at"])
    expires_at, started_at = job["expires_at"], job["started_at"]
    error = {"code": "failed", "message": job["error"], "line": None, "param": None}
    window = "24h"
    if expires_at is not None:
        hours = round((expires_at - job["created_at"]) / 3600)
        window = f"{hours}h"
    return {
        "id": job["id"],
        "object": "batch",
        "endpoint": job["endpoint"],
        "errors": {"object": "list", "data": [error]} if job["error"] else None,
        "input_file_id": job["input_file"],
        "completion_window": window,
        "status": _STATES.get(state, state),
        "output_file_id": job["output_file"] if job["completed"] else None,
        "error_file_id": job["error_file"] if job["failed"] else None,
        "created_at": int(job["created_at"]),
        "in_progress_at": None if started_at is None else int(started_at),
        "expires_at": None if expires_at is None else int(expires_at),
        "finalizing_at": None,
        "completed_at": ended_at if state == "completed" else None,
        "failed_at": ended_at if state == "failed" else None,
        "expired_at": ended_at if state == "expired" else None,
        "cancelling_at": ended_at if state == "cancelled" else None,
        "cancelled_at": ended_at if state == "cancelled" else None,
        "request_counts": {
            "total": job["requests"],
            "completed": job["completed"],
            "failed": job["failed"],
        },
        "metadata": job["metadata"] or None,
    }


def _is_batch(job: JobInfo) -> bool:
    """Return whether a job is a batch, and not a response in the background."""
    return not job["id"].startswith("resp_")


async def list_batches(exchange: Exchange) -> None:
    """Answer with the caller's batches, the latest first."""
    query = LIST_BATCHES.read_query(exchange.query)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        found = [batch_object(job) for job in await client.jobs.list() if _is_batch(job)]
    await exchange.send_json(list_page(found, query.after, query.limit, "entry"))


async def show_batch(exchange: Exchange) -> None:
    """Answer with one batch."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await exchange.send_json(batch_object(await _find(client, exchange)))


async def cancel_batch(exchange: Exchange) -> None:
    """Give up the requests of a batch that have not ended."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        job = await _find(client, exchange)
        await exchange.send_json(batch_object(await client.jobs.cancel(job["id"])))


async def _find(client: AsyncClient, exchange: Exchange) -> JobInfo:
    job = await client.jobs.get(exchange.params["batch"])
    if not _is_batch(job):
        raise NotFound(f"there is no batch {job['id']!r}", hint="it is a response")
    return job
