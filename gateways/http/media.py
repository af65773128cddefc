"""The images and sounds of one request: checked and counted while its messages are read, and then
decoded from base64, which is a text or, in a long body, a view of its bytes.

The gateway fetches nothing: an image is in the request itself. The daemon finds out whether its
bytes are an image.
"""

from __future__ import annotations

import binascii
import os
import re
import time
from base64 import b64encode
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from io import BytesIO
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint

from ...backends.errors import InferdError, InvalidArgument, TooLarge, UnsupportedOperation
from ...backends.media import media_parts
from ...backends.shared_memory import sealed_memory
from ...ipc.chat_messages import ALT_CHARACTERS_MAX, MEDIA_PARTS_MAX
from ...ipc.client import AsyncClient, Audio, Image, Infill, SessionMediaResult
from ...ipc.media_parts import INLINE_BYTES_MAX
from ...ipc.payloads import Prompt
from .fields import field_error

Part = dict[str, Any]
Base64: TypeAlias = str | memoryview
_SLICE = 1 << 18
"""Characters that are decoded at once, which takes 1 to 2 ms, and with the interpreter's lock."""
_SLICE_BYTES = _SLICE // 4 * 3
_URI_HEAD_MAX = 200
_SHOWN = 60
_DATA = "data:"
_HINT = "send the image itself, as a data URI: data:image/png;base64,…"
_DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}
_FORMAT = re.compile(r"[a-z0-9.+-]{1,20}", re.ASCII)


class RequestMedia:
    """The images and sounds of a request, in the order in which they were read."""

    def __init__(self) -> None:
        self._places: dict[int, str] = {}
        """The places of parts in the request, by the parts' ids. The turn keeps the parts."""
        self._encoded: list[tuple[str, Part]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def add_url(self, place: str, url: Any, detail: Any = None, alt: Any = None) -> Part:
        """Return the part for an image that is a data URI; *alt* is a text that describes it.

        :raises InvalidArgument: it is not a data URI of an image in base64.
        :raises UnsupportedOperation: it is the address of an image elsewhere.
        :raises TooLarge: the request has too many images.
        """
        if not isinstance(url, Base64) or not len(url):
            raise field_error(place, f"{place} has no image", hint=_HINT)
        begin = url[:_URI_HEAD_MAX]
        begin = begin if isinstance(begin, str) else str(begin, "latin-1")
        if begin[: len(_DATA)].lower() != _DATA:
            raise _elsewhere(place, begin)
        head, comma, _ = begin[len(_DATA) :].partition(",")
        kind, *more = head.lower().split(";")
        if not comma or not more or more[-1].strip() != "base64":
            raise field_error(
                place, f"{place}: {begin[:_SHOWN]!r} is not a data URI in base64", hint=_HINT
            )
        part = self.add_image(place, url[len(_DATA) + len(head) + 1 :], kind.strip(), detail)
        if alt:
            if not isinstance(alt, str) or len(alt) > ALT_CHARACTERS_MAX:
                raise field_error(f"{place}.alt", f"{place}.alt is not a short text")
            part["alt"] = alt
        return part

    def add_image(self, place: str, text: Any, media_type: str = "", detail: Any = None) -> Part:
        """Return the part for an image in base64, as *media_type* names it, if that is known.

        :raises InvalidArgument: the type is not that of an image, or *detail* is unknown.
        :raises TooLarge: the request has too many images.
        """
        if media_type and not media_type.startswith("image/"):
            raise field_error(
                place, f"{place}: the type {media_type[:_SHOWN]!r} is not an image's", hint=_HINT
            )
        part: Part = {"type": "image"}
        if detail is not None:
            if detail not in _DETAILS:
                names = ", ".join(_DETAILS)
                raise field_error(place, f"{place}: detail {str(detail)[:40]!r} is none of {names}")
            part["detail"] = _DETAILS[detail]
        return self._add(place, text, part, media_type)

    def add_sound(self, place: str, text: Any, form: Any) -> Part:
        """Return the part for a sound in base64, in a format such as `wav`.

        :raises InvalidArgument: the format is not a name.
        :raises TooLarge: the request has too many images and sounds.
        """
        if not isinstance(form, str) or _FORMAT.fullmatch(form) is None:
            raise field_error(
                place, f"{place} has no format", hint="name the format of the sound: wav or mp3"
            )
        return self._add(place, text, {"type": "audio"}, f"audio/{form}")

    def _add(self, place: str, text: Any, part: Part, media_type: str) -> Part:
        if not isinstance(text, Base64) or not len(text):
            raise field_error(place, f"{place} is empty", hint="send the bytes in base64")
        if len(self._places) == MEDIA_PARTS_MAX:
            raise TooLarge(
                f"the request has more than {MEDIA_PARTS_MAX} images and sounds",
                hint="send fewer",
                data={"param": place, "media_parts_max": MEDIA_PARTS_MAX},
            )
        if media_type:
            part["media_type"] = media_type
        part["data"] = text
        self._places[id(part)] = place
        self._encoded.append((place, part))
        return part

    async def decode(self, run_in_thread: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Decode all parts; many bytes with *run_in_thread*.

        :raises InvalidArgument: a part is not base64.
        """
        if sum(len(part["data"]) for _, part in self._encoded) > _SLICE:
            await run_in_thread(self._decode_all)
        else:
            self._decode_all()

    def _decode_all(self) -> None:
        while self._encoded:
            place, part = self._encoded[0]
            part["data"] = _decoded(place, part["data"])
            del self._encoded[0]

    def name_item(self, error: InferdError, messages: Any) -> InferdError:
        """Return *error*, whose message and `data.param` then name the place in the request of the
        part that the daemon's error is about. *messages* are those that the daemon got.
        """
        item = error.data.get("item")
        if not self._places or not isinstance(item, int):
            return error
        parts = list(media_parts(messages))
        if not 0 <= item < len(parts) or id(parts[item]) not in self._places:
            return error
        before, place = error.data.get("param"), self._places[id(parts[item])]
        if isinstance(before, str) and error.message.startswith(f"{before}: "):
            error.message = error.message.removeprefix(f"{before}: ")
        error.message = f"{place}: {error.message}"  # not all APIs have a field for it
        error.data["param"] = place
        del error.data["item"]  # it is named once
        return error


async def rest_of_content(
    client: AsyncClient, session_id: str, sha256: str, first: SessionMediaResult
) -> AsyncIterator[bytes]:
    """Yield an image or a sound in the messages of a session, in parts: the *first* one, with which
    `session_media` has begun, and then each when it is wanted.

    :raises NotFound: the session was deleted meanwhile.
    """
    data, offset = first.data, 0
    while data:
        yield data
        offset += len(data)
        if offset >= first.size:
            return
        part = await client.session_media(sha256, session_id=session_id, offset=offset)
        data = part.data


@asynccontextmanager
async def in_sealed_memory(prompt: Prompt) -> AsyncIterator[Prompt]:
    """Yield a prompt for several turns at once. Its large contents are in sealed memory, which each
    turn passes to the daemon; otherwise each would have a copy of them until it is sent.
    """
    with ExitStack() as stack:
        if isinstance(prompt, str | Image | Audio | Infill) or not any(media_parts(prompt)):
            yield prompt
            return
        messages: list[dict[str, Any]] = []
        for message in prompt:
            assert isinstance(message, Mapping), "only messages have parts"
            messages.append({**message})
            if isinstance(parts := message["content"], list):
                messages[-1]["content"] = [await _sealed(part, stack) for part in parts]
        yield messages


async def _sealed(part: Part, stack: ExitStack) -> Part | Image | Audio:
    data = part.get("data", b"")
    if len(data) <= INLINE_BYTES_MAX:
        return part
    with anyio.CancelScope(shield=True):  # else nobody would close the descriptor
        descriptor = await anyio.to_thread.run_sync(sealed_memory, [data])
        stack.callback(os.close, descriptor)
    path, alt = f"/proc/self/fd/{descriptor}", part.get("alt", "")
    if part["type"] == "audio":
        return Audio(path, alt=alt)
    return Image(path, detail=part.get("detail"), alt=alt)


async def in_base64(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the base64 of bytes in *parts*."""
    left = b""
    async for part in parts:
        data = left + part
        whole = len(data) // 3 * 3
        for start in range(0, whole, _SLICE_BYTES):
            yield b64encode(data[start : min(start + _SLICE_BYTES, whole)])
            await checkpoint()
        left = data[whole:]
    yield b64encode(left)


def _elsewhere(place: str, url: str) -> UnsupportedOperation:
    scheme, colon, _ = url[:_SHOWN].partition("://")
    data = {"param": place}
    if colon and scheme.isalnum():
        return UnsupportedOperation(
            f"{place}: {url[:_SHOWN]!r}: the gateway fetches nothing", hint=_HINT, data=data
        )
    return UnsupportedOperation(
        f"{place}: {url[:_SHOWN]!r} is not a data URI", hint=_HINT, data=data
    )


def _decoded(place: str, text: Base64) -> bytes:
    """Return the bytes of base64, with its padding and without other characters."""
    if len(text) % 4 or text[-3:-2] in ("=", b"="):
        raise _not_base64(place, "its length is wrong, or it has more after its end")
    found = BytesIO()  # its value is not copied again
    for start in range(0, len(text), _SLICE):
        if start:
            if found.tell() % 3:
                raise _not_base64(place, "it has more after its end")
            time.sleep(0)  # else the event loop waits 5 ms for the interpreter's lock
        try:
            found.write(binascii.a2b_base64(text[start : start + _SLICE], strict_mode=True))
        except ValueError as exc:
            raise _not_base64(place, str(exc)) from None
    return found.getvalue()


def _not_base64(place: str, problem: str) -> InvalidArgument:
    return field_error(
        place,
        f"{place} is not base64: {problem}",
        hint="encode the bytes in base64, with padding and without line breaks",
    )
