"""Images in the prompts of wasi-nn's guests, written as `<img src="data:image/png;base64,…">`.

A prompt is searched in a time that grows with its length alone. Large ones are searched, and their
images are decoded, by the user's thread and not on the loop.
"""

from __future__ import annotations

import binascii
import re
import string
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeAlias

from ...backends.errors import InferdError, InvalidArgument
from ...ipc.server.connection import Request
from ...sessions import Session
from ..core import Daemon
from .media import add_media
from .tensors import ENDED, info_of

DATA_URLS_CHECKED = 64
"""The data URLs of a prompt that are examined; the rest of the prompt is text."""
TAG_BYTES_CHECKED = 1000
"""The bytes of a tag before its data, and after it."""
LOOP_BYTES_MAX = 64 << 10
"""Larger prompts are searched by the user's thread."""
ENCODED_BYTES_MIN = 100
"""Data that is not base64 and has fewer bytes is an abbreviation in a text, such as `iVBOR...`."""
_MARK = b";base64,"
_TAG = re.compile(rb"<img\b[^<>]*\bsrc\s*=\s*([\"'])data:(image/[\w.+-]{1,64})$", re.IGNORECASE)
_TAG_END = re.compile(rb"[^<>]*>")
_OTHER_TAGS = re.compile(rb"[<>]")
_BASE64 = f"{string.ascii_letters}{string.digits}+/={string.whitespace}".encode()


class PromptImage(NamedTuple):
    """An image in a prompt: its type, and its bytes in base64."""

    media_type: str
    payload: bytes


Pieces: TypeAlias = "list[bytes | PromptImage]"


def split_images(prompt: bytes) -> Pieces:
    """Return the texts and images of a prompt in their order. A tag that is not closed is text, and
    so is one with an abbreviation in place of its data.
    """
    pieces: Pieces = []
    begin = copied = 0
    for _ in range(DATA_URLS_CHECKED):
        mark = prompt.find(_MARK, begin)
        if mark < 0:
            break
        begin = mark + len(_MARK)
        tag_begin = prompt.rfind(b"<", max(copied, mark - TAG_BYTES_CHECKED), mark)
        tag = _TAG.match(prompt[tag_begin:mark]) if tag_begin >= 0 else None
        if tag is None:
            continue
        payload_end = prompt.find(tag[1], begin)
        payload = prompt[begin:payload_end] if payload_end >= 0 else b""
        end = _TAG_END.match(prompt, payload_end + 1, payload_end + 1 + TAG_BYTES_CHECKED)
        if end is None or _is_text(payload):
            continue
        pieces += [prompt[copied:tag_begin], PromptImage(tag[2].decode().lower(), payload)]
        begin = copied = end.end()
    pieces.append(prompt[copied:])
    return [piece for piece in pieces if piece]


def _is_text(payload: bytes) -> bool:
    """Return whether the data of a tag is not an image, but a text about one."""
    if not payload.strip():
        return True
    if not payload.translate(None, _BASE64):
        return False
    return len(payload) < ENCODED_BYTES_MIN or _OTHER_TAGS.search(payload) is not None


def decode_image(number: int, image: PromptImage) -> bytes:
    """Return the bytes of the image with this *number* among those of its prompt.

    :raises InvalidArgument: they are not in base64.
    """
    wrong = image.payload.translate(None, _BASE64)
    try:
        if wrong:  # a2b_base64 would skip it
            raise binascii.Error(f"it has the character {wrong[:1].decode(errors='replace')!r}")
        return binascii.a2b_base64(image.payload)
    except binascii.Error as exc:
        raise InvalidArgument(
            f"the image in the prompt is not base64: {exc}",
            hint="send the whole file in base64, with the characters + and /",
            data={"item": number},
        ) from None


Prompt: TypeAlias = "bytes | Sequence[bytes | dict[str, Any]]"
"""A text, or texts and images in their order; an image is the stored form of a part."""


@asynccontextmanager
async def stored_images(
    daemon: Daemon, request: Request, session: Session, prompt: bytes
) -> AsyncIterator[Prompt]:
    """Put the images of a prompt into the user's media store, for as long as the block runs or a
    session holds them, and yield the prompt with their stored forms.

    :raises InvalidArgument: there is an image, and the model reads none; or an image is damaged.
    :raises TooLarge: an image has too many bytes.
    """
    user = request.connection.user
    large = len(prompt) > LOOP_BYTES_MAX
    pieces = await user.run(split_images, prompt) if large else split_images(prompt)
    images = [piece for piece in pieces if isinstance(piece, PromptImage)]
    if not images or session.active or session.state in ENDED:
        yield prompt
        return
    await _check_reads_images(session, images[0])
    contents = [await user.run(decode_image, *numbered) for numbered in enumerate(images)]
    request.charge.grow(sum(map(len, contents)))
    tokens_max = int(session.settings.parameters.standing("image-tokens-max") or 0)
    with daemon.media_store.lease(request.owner.user) as lease:
        parts = []
        for number, content in enumerate(contents):
            with _numbered(number):
                part = await add_media(lease, content, "image")
            parts.append(part | {"tokens_max": tokens_max})
        following = iter(parts)
        yield [next(following) if isinstance(p, PromptImage) else p for p in pieces]


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Add the number of an image to the data of errors that concern it."""
    try:
        yield
    except InferdError as exc:
        exc.data["item"] = number
        raise


async def _check_reads_images(session: Session, image: PromptImage) -> None:
    info = await info_of(session)
    if info.media_width == 0:
        raise InvalidArgument(  # as in WasmEdge: 6 would be a call that the host lacks
            f"the prompt has an image ({image.media_type}), and the model reads only text",
            hint="use a model with a projector: put its mmproj-*.gguf beside the model's file, or"
            ' name it in the configuration (mmproj = "…")',
            data={"media_type": image.media_type, "item": 0},
        )
