"""Responses in the background: each is a job of the daemon with one request, whose id is that of
the response, and whose results are the events of its stream.

The events go on with neither client nor gateway, and are read from any of them on. After a kill of
the daemon the response is computed again, with its seed, and continues after the stored events.
"""

from __future__ import annotations

import secrets
from typing import Any

import anyio
import msgspec

from .....backends.errors import ConnectionLost, NotFound, ShuttingDown
from .....ipc import messages as w
from .....ipc.client import AsyncClient, JobInfo
from .....ipc.names import Priority
from ...callers import Caller
from ...exchange import Exchange
from ...exchange.streaming import EVENT_STREAM, STREAM_HEADERS
from ...fields import field_error
from ...limits import RESTART_S_MAX
from ...long_strings import LongBody
from ...turns.runner import SEED_MAX
from ..chat import priority_of
from .fields import RESPONSES, ResponseRequest

WAIT_S = 20.0
"""The time after which a stream without a new event shows that it has not ended."""
RETRY_S = 0.5
_COMMENT = b": waiting\n\n"


def check_background(exchange: Exchange, request: ResponseRequest) -> None:
    """Check that a response can be computed in the background.

    :raises InvalidArgument: it is not to be stored, or is a request of a batch.
    """
    if not request.store:
        raise field_error(
            "store", "a response in the background is stored", "leave `store` out, or `background`"
        )
    if exchange.link.response_id is not None:
        raise field_error(
            "background", "a request of a batch is in the background already", "leave it out"
        )


def line_of(body: bytes | LongBody, response_id: str) -> bytes:
    """Return a request as the line of a job: streamed, and with a seed."""
    raw = body if isinstance(body, bytes) else bytes(body.body)
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    fields["stream"] = msgspec.Raw(b"true")
    seed = b"%d" % secrets.randbelow(SEED_MAX)
    fields.setdefault("seed", msgspec.Raw(seed))
    line = {"custom_id": response_id, "url": RESPONSES.path, "body": fields}
    # A line break in JSON is white space between values: those in strings are escaped.
    return msgspec.json.encode(line).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"


def class_of(request: ResponseRequest, caller: Caller) -> Priority:
    """Return the class of a response in the background, `low` unless the request names another.

    :raises PermissionDenied: the caller may not use the class.
    """
    if request.priority is not None:
        caller.check_priority(request.priority)
    elif request.service_tier in ("auto", "default"):
        return "low"
    return priority_of(request.priority, request.service_tier, caller)


async def submit_response(
    client: AsyncClient, caller: Caller, request: ResponseRequest, response_id: str, line: bytes
) -> JobInfo:
    """Submit the line of a response.

    :raises InferdError: the model does not exist, or the daemon refuses the job.
    """
    await client.show(caller.check_model(request.model))
    params = w.UploadFileParams(name=response_id)
    size = w.JOB_PART_BYTES_MAX
    for start in range(0, len(line), size):
        params.data, params.end = line[start : start + size], start + size >= len(line)
        file = await client.jobs.upload_part(params)
        params.file, params.offset = file["id"], file["bytes"]
    return await client.jobs.submit_file(
        params.file,
        job_id=response_id,
        endpoint=RESPONSES.path,
        priority=class_of(request, caller),
        models=caller.models,
        events=True,
    )


async def find_job(client: AsyncClient, response_id: str) -> JobInfo | None:
    """Return the job of a response of the client's user, or None if there is none."""
    try:
        return await client.jobs.get(response_id)
    except NotFound:
        return None


async def read_whole(client: AsyncClient, file_id: str) -> bytes:
    """Return the content of a file; nothing if it has none."""
    data = bytearray()
    try:
        while part := (await client.jobs.read_file(file_id, len(data))).data:
            data += part
    except NotFound:
        pass
    return bytes(data)


async def read_request(client: AsyncClient, job: JobInfo) -> dict[str, Any]:
    """Return the body of the request of a job."""
    line = msgspec.json.decode(await read_whole(client, job["input_file"]))
    body = line["body"]
    assert isinstance(body, dict), "the daemon has checked it"
    return body


async def read_response(client: AsyncClient, job: JobInfo, begun: dict[str, Any]) -> dict[str, Any]:
    """Return the response of a job in its present state; *begun* is the response without
    an answer."""
    if job["state"] == "completed" and not job["failed"]:
        events = (await read_whole(client, job["output_file"])).rstrip().rpartition(b"\n")[2]
        response = msgspec.json.decode(events)["response"]
        assert isinstance(response, dict), "the last event of a response has it"
        return response
    created_at = int(job["created_at"])
    return {**begun, "created_at": created_at, **await _unfinished(client, job)}


async def _unfinished(client: AsyncClient, job: JobInfo) -> dict[str, Any]:
    """Return the fields of a response without an answer."""
    state = job["state"]
    if state == "completed":
        result = msgspec.json.decode(await read_whole(client, job["error_file"]))
        error = result["response"]["body"]["error"]
        shown = {"code": error.get("code") or "server_error", "message": error["message"]}
        return {"status": "failed", "error": shown}
    if state in ("expired", "failed"):
        message = job["error"] or "the response has expired"
        return {"status": "failed", "error": {"code": "server_error", "message": message}}
    return {"status": {"waiting": "queued", "running": "in_progress"}.get(state, state)}


async def stream_events(
    exchange: Exchange, client: AsyncClient, job: JobInfo, begun: dict[str, Any], after: int
) -> None:
    """Stream the events of a response whose numbers are above *after*, until it has ended."""
    await exchange.start(200, EVENT_STREAM, STREAM_HEADERS)
    offset, last, is_final = 0, -1, False
    while (data := await _next_events(exchange, client, job, offset)) is not None:
        offset += len(data)
        shown = b""
        for line in data.splitlines():
            event = _decode_event(line)
            last, is_final = event.sequence_number, event.type in _FINAL
            if last > after:
                shown += b"event: %s\ndata: %s\n\n" % (event.type.encode(), line)
        await exchange.write(shown or (b"" if data else _COMMENT))
        if is_final:
            break
    if not is_final:  # it was cancelled, or has failed
        response = await read_response(client, await client.jobs.get(job["id"]), begun)
        end = {"type": "response.failed", "sequence_number": max(last, after) + 1}
        text = msgspec.json.encode({**end, "response": response})
        await exchange.write(b"event: response.failed\ndata: %s\n\n" % text)
    await exchange.write(b"", more=False)


class _Event(msgspec.Struct):
    type: str
    sequence_number: int


_decode_event = msgspec.json.Decoder(_Event).decode
_FINAL = ("response.completed", "response.incomplete", "response.failed")


async def _next_events(
    exchange: Exchange, client: AsyncClient, job: JobInfo, offset: int
) -> bytes | None:
    """Return further lines of a job's events, none after `WAIT_S`, or None at their end. A daemon
    that restarts is waited for.

    :raises InferdError: the daemon does not come back.
    """
    until = anyio.current_time() + RESTART_S_MAX
    while True:
        try:
            part = await client.jobs.read_file(job["output_file"], offset, wait=WAIT_S)
        except NotFound:
            return None
        except (ConnectionLost, ShuttingDown):
            if anyio.current_time() > until or exchange.turns.stopping:
                raise
            await anyio.sleep(RETRY_S)
            continue
        if part.data:
            return part.data
        return b"" if part.growing and not exchange.turns.stopping else None
