"""Images and sounds of requests: their way into the user's media store and back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from anyio import to_thread

from ...backends.errors import BackendError, InferdError, InvalidArgument, NotFound
from ...backends.media import MediaKind
from ...backends.media_types import check_content
from ...ipc import messages as w
from ...ipc.chat_messages import (
    MediaPart,
    PassedData,
    checked_messages,
    media_parts,
    tokens_max_of,
)
from ...ipc.server.connection import Request
from ...ipc.server.descriptors import content_size, read_content
from ...ipc.server.request_bytes import COPIES, REQUEST_BYTES
from ...sessions.media_store import MediaLease, MediaStore
from ..core import Daemon
from .session_operations import named_session

SHOWN_MARK = "<__media__>"
"""The mark of an image or a sound in a rendered prompt that a client gets, as in llama-server."""


@asynccontextmanager
async def stored_messages(
    daemon: Daemon,
    request: Request,
    messages: list[dict[str, Any]],
    tokens_max: Callable[[], int],
) -> AsyncIterator[list[dict[str, Any]]]:
    """Check chat messages, and yield them with their images and sounds in the user's media store.
    At the end of the context, the store deletes those that no session holds. An image whose part
    has no bound has at most *tokens_max* tokens, which is called only for images.

    :raises InvalidArgument: a message has another shape, or a content is of another kind.
    :raises TooLarge: there are too many contents, or one is too large.
    :raises QuotaExceeded: the user's contents would become too large.
    """
    checked = checked_messages(messages)
    parts = list(media_parts(checked))
    if not parts:
        yield checked
        return
    stored = [_with_own_parts(message) for message in checked]
    with daemon.media_store.lease(request.owner.user) as lease:
        for part in parts:
            with _located(part.error_data()):
                stored[part.message]["content"][part.position] = await _store_part(
                    daemon, request, lease, part, tokens_max
                )
        with _placed(parts):
            yield stored


def _with_own_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message | {"content": list(content)} if isinstance(content, list) else message


async def _store_part(
    daemon: Daemon,
    request: Request,
    lease: MediaLease,
    part: MediaPart,
    tokens_max: Callable[[], int],
) -> dict[str, Any]:
    """Return the stored form of a part, whose bytes the request then holds no more."""
    fields, data = part.fields, part.fields["data"]
    kind: MediaKind = fields["type"]
    if isinstance(data, PassedData):
        content = await _read_passed(daemon, request, data.fd)
        counted = len(content)
    else:
        content, counted = data, (COPIES + 1) * len(data)
    stored = await add_media(lease, content, kind)
    fields["data"] = b""
    # A turn may last long, and a user may have many: their images are in the store, not in memory.
    request.charge.shrink(max(0, min(counted, request.charge.size - REQUEST_BYTES)))
    if kind == "image":
        stored["tokens_max"] = tokens_max_of(fields) or tokens_max()
    if fields.get("alt"):
        stored["alt"] = fields["alt"]
    return stored


async def add_media(lease: MediaLease, content: bytes, kind: MediaKind) -> dict[str, Any]:
    """Put a content into the store, and return its part of a message.

    :raises InvalidArgument: it is not of this kind.
    :raises TooLarge: it is too large.
    :raises QuotaExceeded: the user's contents would become too large.
    """
    media_type = check_content(content, kind)
    sha256 = await lease.add(content, kind)
    return {
        "type": kind,
        "sha256": sha256.hex(),
        "bytes": len(content),
        "media_type": media_type,
        "tokens_max": 0,
    }


async def _read_passed(daemon: Daemon, request: Request, descriptor: int) -> bytes:
    """Return the content of a passed descriptor, and close it. Its size is counted before it is
    read.
    """
    user, bytes_max = request.connection.user, daemon.media_store.item_bytes_max
    size = await user.run(content_size, descriptor, bytes_max)
    request.charge.grow(size)
    content = await user.run(read_content, descriptor, size)
    request.close_descriptors((descriptor,))
    return content


@contextmanager
def _located(place: dict[str, Any]) -> Iterator[None]:
    """Add the place of a part to the data of errors that concern it."""
    try:
        yield
    except InferdError as exc:
        exc.data |= place
        raise


@contextmanager
def _placed(parts: Sequence[MediaPart]) -> Iterator[None]:
    """Add the place to an error that names an item of the request."""
    try:
        yield
    except InferdError as exc:
        item = exc.data.get("item")
        if isinstance(item, int) and 0 <= item < len(parts):
            exc.data |= parts[item].error_data()
        raise


async def session_media(daemon: Daemon, request: Request) -> w.SessionMediaResult:
    """Return a part of an image or a sound in a session's messages."""
    p: w.SessionMediaParams = request.params
    if p.offset < 0:
        raise InvalidArgument(f"the offset is {p.offset}", hint="use 0 or more")
    session = named_session(daemon, request, p)
    parts = (part.fields for part in media_parts(session.history.client_messages))
    part = next((part for part in parts if part["sha256"] == p.sha256), None)
    if part is None:
        raise NotFound(
            f"the session has no image and no sound with the hash {p.sha256[:64]!r}",
            hint="the messages of the session have the hashes",
        )
    store, user = daemon.media_store, session.owner.user
    data, size = await to_thread.run_sync(
        _read_stored, store, user, bytes.fromhex(p.sha256), p.offset
    )
    request.charge.grow(len(data))
    return w.SessionMediaResult(data=data, size=size, media_type=part["media_type"])


def _read_stored(store: MediaStore, user: int, sha256: bytes, offset: int) -> tuple[bytes, int]:
    descriptor = store.open_content(user, sha256)
    try:
        size = os.fstat(descriptor).st_size
        return (os.pread(descriptor, w.PART_BYTES, offset) if offset < size else b""), size
    except OSError as exc:
        raise BackendError(f"a stored content cannot be read: {exc.strerror}") from exc
    finally:
        os.close(descriptor)


def shown_prompt(text: str, marks: Sequence[str]) -> str:
    """Return a rendered prompt as clients get it, with the same mark for each image and sound."""
    for mark in marks:
        text = text.replace(mark, SHOWN_MARK)
    return text
