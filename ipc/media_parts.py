"""Images and sounds that a program sends in messages: their sources, and the form that is sent."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from ..backends.errors import InvalidArgument, TooLarge
from ..backends.media import MediaKind, is_media
from .chat_messages import ALT_CHARACTERS_MAX, DETAILS, MEDIA_TOKENS_MAX

if TYPE_CHECKING:
    from typing_extensions import Buffer

CONTENT_BYTES_MAX = 256 << 20
"""Bytes that are read from a pipe; the daemon's bound is usually lower."""
INLINE_BYTES_MAX = 64 << 10
"""Larger contents are sent in descriptors, which the daemon reads apart from its loop."""
PASSED_MAX = 16
"""Descriptors of one request: as many as the daemon holds before it has read their frame."""
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
Detail: TypeAlias = Literal["auto", "low", "high"]


class PillowImage(Protocol):
    """An image of Pillow (`PIL.Image.Image`), which is sent as PNG."""

    @property
    def mode(self) -> str:
        """Its pixel format."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        """Write it to a file."""

    def convert(self, mode: str) -> Any:
        """Return it with another pixel format."""


Source: TypeAlias = "str | os.PathLike[str] | Buffer"


class Content(NamedTuple):
    """The content of a part: its *size*, and its *data* or a *descriptor* of its file."""

    size: int
    data: bytes = b""
    descriptor: int = -1


class Media:
    """An image or a sound from a file, or from the bytes of one."""

    kind: ClassVar[MediaKind]

    def __init__(self, source: Source | PillowImage, alt: str = ""):
        if not isinstance(alt, str) or len(alt) > ALT_CHARACTERS_MAX:
            raise InvalidArgument(f"alt is not a text of up to {ALT_CHARACTERS_MAX} characters")
        self.alt = alt
        self._source = source if self._is_pillow(source) else _path_or_bytes(source, self.kind)

    def _is_pillow(self, source: object) -> bool:
        return False

    def __repr__(self) -> str:
        source = self._source
        shown = repr(source) if isinstance(source, str) else f"<{type(source).__name__}>"
        return f"{type(self).__name__}({shown})"

    def fields(self) -> dict[str, Any]:
        """Return the fields of its part, without `data`."""
        return {"type": self.kind} | ({"alt": self.alt} if self.alt else {})

    def open(self) -> Content:
        """Return its content; the caller closes the descriptor. This may wait for a file.

        :raises InvalidArgument: the file cannot be read.
        """
        source: Any = self._source
        if isinstance(source, str):
            return open_path(source)
        data = source if isinstance(source, bytes) else _png(source)
        return Content(len(data), data)


class Image(Media):
    """An image in a message: a PNG, JPEG, WebP, GIF (its first frame) or BMP file, its bytes, or an
    image of Pillow.

    *tokens_max* bounds the tokens that the image takes in the context, by scaling it down; *detail*
    `low` is a low bound. *alt* describes it for pages, and for models that read no images.
    """

    kind = "image"

    def __init__(
        self,
        source: Source | PillowImage,
        *,
        detail: Detail | None = None,
        tokens_max: int = 0,
        alt: str = "",
    ):
        super().__init__(source, alt)
        if detail not in (None, *DETAILS):
            raise InvalidArgument(f"the detail is {detail!r}", hint=f"use {', '.join(DETAILS)}")
        if not 0 <= tokens_max <= MEDIA_TOKENS_MAX:
            raise InvalidArgument(
                f"tokens_max is {tokens_max}", hint=f"use 1 … {MEDIA_TOKENS_MAX}, or 0 for no bound"
            )
        self.detail, self.tokens_max = detail, tokens_max

    def _is_pillow(self, source: object) -> bool:
        return all(hasattr(source, name) for name in ("mode", "save", "convert"))

    def fields(self) -> dict[str, Any]:
        """Return the fields of its part, without `data`."""
        own = {"detail": self.detail, "tokens_max": self.tokens_max}
        return super().fields() | {name: value for name, value in own.items() if value}


class Audio(Media):
    """A sound in a message: a WAV, MP3 or FLAC file, or its bytes."""

    kind = "audio"

    def __init__(self, source: Source, *, alt: str = ""):
        super().__init__(source, alt)


def _path_or_bytes(source: Any, kind: str) -> str | bytes:
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        return path if isinstance(path, str) else os.fsdecode(path)
    if isinstance(source, bytes):
        return source
    try:
        return bytes(memoryview(source))
    except TypeError:
        noun = "an image" if kind == "image" else "a sound"
        more = ", or an image of Pillow" if kind == "image" else ""
        raise InvalidArgument(
            f"a {type(source).__name__} is not {noun}", hint=f"pass a path or bytes{more}"
        ) from None


def _png(image: Any) -> bytes:
    """Return an image of Pillow as PNG, turned as its EXIF data say, which PNG readers ignore."""
    from PIL import ImageOps  # the program has it, as it has made the image

    image = ImageOps.exif_transpose(image)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGBA" if image.mode in ("PA", "La", "RGBa") else "RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def open_path(path: str) -> Content:
    """Return the content of a file, as a descriptor, or of a pipe, as bytes.

    :raises InvalidArgument: it cannot be read, or is neither.
    :raises TooLarge: more than `CONTENT_BYTES_MAX` bytes come from the pipe.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                content = Content(status.st_size, descriptor=descriptor)
                descriptor = -1
                return content
            if stat.S_ISDIR(status.st_mode):
                raise InvalidArgument(f"{path} is a directory", hint="name a file")
            data = _read_all(descriptor, path)
            return Content(len(data), data)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    except OSError as exc:
        raise InvalidArgument(
            f"{path} cannot be read: {exc.strerror}", hint="check the path and its permissions"
        ) from None
    except ValueError:  # a zero byte in the path
        raise InvalidArgument(f"{path!r} is not a path", hint="check the path") from None


def _read_all(descriptor: int, path: str) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read(CONTENT_BYTES_MAX + 1)
    if len(data) > CONTENT_BYTES_MAX:
        raise TooLarge(
            f"{path} has more than {CONTENT_BYTES_MAX} bytes", hint="send a smaller file"
        )
    return data


def has_parts(messages: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return whether a message has parts, among which may be images or sounds."""
    return any(isinstance(m.get("content"), list | tuple) for m in messages or ())


def as_media(part: Any) -> tuple[dict[str, Any], Media] | None:
    """Return the fields of a part without its data, and the image or sound; None for other parts,
    and for those whose data is not a buffer.
    """
    if isinstance(part, Media):
        return part.fields(), part
    if not is_media(part):
        return None
    data = part.get("data")
    if not isinstance(data, bytes | bytearray | memoryview):
        return None
    fields = {key: value for key, value in part.items() if key != "data"}
    return fields, Image(data) if part["type"] == "image" else Audio(data)


def in_descriptors(sizes: Sequence[int], bytes_left: int) -> frozenset[int]:
    """Return the indices of the contents to send in descriptors: those above `INLINE_BYTES_MAX`,
    the largest first, and then others until the rest fits into *bytes_left* of the frame.

    :raises TooLarge: the rest does not fit.
    """
    largest = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    left = sum(sizes)
    chosen: list[int] = []
    for index in largest[:PASSED_MAX]:
        if left <= bytes_left and sizes[index] <= INLINE_BYTES_MAX:
            break
        chosen.append(index)
        left -= sizes[index]
    if left > bytes_left:
        raise TooLarge(
            f"the images and sounds of the request have {sum(sizes)} bytes; beside the"
            f" {PASSED_MAX} largest there are {left}, and the frame takes {bytes_left}",
            hint="send some of them with the next message",
            data={"bytes": left, "frame_bytes_max": bytes_left},
        )
    return frozenset(chosen)
