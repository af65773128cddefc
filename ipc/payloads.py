"""Conversion of calls' arguments to the form that is sent: tensors, memfds, JSON, spans."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from ..backends.errors import InferdError, InvalidArgument, InvalidEncoding, TooLarge
from ..backends.shared_memory import sealed_memory
from ..wire.frames import FRAME_BYTES_MAX, pack_frame
from .chat_messages import MEDIA_PARTS_MAX
from .media_parts import Audio, Content, Image, Media, as_media, in_descriptors
from .messages import (
    TENSOR_BYTES_MAX,
    AnswersParams,
    Infill,
    StreamParams,
    TemplateParams,
    Tensor,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

Message: TypeAlias = Mapping[str, Any]
"""A chat message: `role`, and `content` as a text or a list of parts: texts, images, sounds."""
Prompt: TypeAlias = str | Image | Audio | Infill | Sequence[str | Image | Audio | Message | int]
"""A text or an image, a list of texts, images and sounds, which is one message, a list of
messages, or one of token ids, which are added to the history unchanged; or a place in a file, whose
text is filled in. (Type checkers infer the
type of a list with different items only from one sequence.)
"""
MessagesParams: TypeAlias = StreamParams | AnswersParams | TemplateParams
"""The params of calls that take messages."""
M = TypeVar("M", bound=MessagesParams)
Config: TypeAlias = Mapping[str, Any] | str | bytes
"""Parameters: a mapping, or its JSON text."""
TensorLike: TypeAlias = "Tensor | str | Buffer"

ENVELOPE_BYTES = 4096
"""Bytes of a frame reserved for everything except its tensors."""
_THREAD_BYTES_MIN = 1 << 20
"""A memfd of this size or more is written in a thread."""


def _to_plain_type(value: Any) -> Any:
    """Return *value*, a handle, reply, mapping or sequence, as a type that msgpack encodes."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise InvalidArgument(f"a {type(value).__name__} cannot be sent: {value!r:.80}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain_type)
_json = msgspec.json.Encoder(enc_hook=_to_plain_type)


_ENCODING_ERRORS = (RecursionError, OverflowError, TypeError, UnicodeEncodeError)


def _encoding_error(exc: Exception) -> InvalidArgument:
    """Return the error for a value that an encoder has refused with *exc*."""
    if isinstance(exc, RecursionError):
        return InvalidArgument("a value contains itself, or nests too deep to be sent")
    return InvalidArgument(f"a value cannot be sent: {exc}")


def pack_message(message: Any) -> bytes:
    """Return *message* as a frame, with handles, replies and mappings as plain types.

    :raises InvalidArgument: a value cannot be encoded.
    """
    try:
        return pack_frame(message, _encoder)
    except _ENCODING_ERRORS as exc:
        raise _encoding_error(exc) from None


def json_text(config: Config | None) -> str:
    """Return *config* as JSON text; None becomes an empty text."""
    if config is None or isinstance(config, str):
        return config or ""
    if not isinstance(config, bytes):
        try:
            return _json.encode(config).decode()
        except _ENCODING_ERRORS as exc:
            raise _encoding_error(exc) from None
    try:
        return config.decode()
    except UnicodeDecodeError as exc:
        raise InvalidEncoding(f"the configuration is not UTF-8: {exc}", hint="send JSON") from None


def as_tensor(value: TensorLike) -> Tensor:
    """Return *value* as a tensor: text or a buffer becomes a tensor of type u8."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, str):
        data = value.encode()
    else:
        try:
            data = bytes(memoryview(value))
        except TypeError:
            raise InvalidArgument(
                f"a {type(value).__name__} is not a tensor", hint="pass text, a buffer or a Tensor"
            ) from None
    return Tensor(data=data, dimensions=[len(data)], type="u8")


def turn_input(prompt: Prompt | None) -> dict[str, Any]:
    """Return the fields of a turn's params that have its prompt; none without one."""
    if prompt is None:
        return {}
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Infill):
        return {"infill": prompt}
    if isinstance(prompt, Media):
        return {"messages": [{"role": "user", "content": [prompt]}]}
    if isinstance(prompt, Sequence):
        if any(isinstance(each, Media) for each in prompt) and all(
            isinstance(each, str | Media) for each in prompt
        ):
            return {"messages": [{"role": "user", "content": list(prompt)}]}
        tokens = [each for each in prompt if isinstance(each, int) and not isinstance(each, bool)]
        if tokens and len(tokens) == len(prompt):
            return {"prompt_tokens": tokens}
        messages = [dict(m) for m in prompt if isinstance(m, Mapping)]
        if len(messages) == len(prompt):
            return {"messages": messages}
    raise InvalidArgument(
        f"a {type(prompt).__name__} is not a prompt",
        hint='pass text, messages such as [{"role": "user", "content": "…"}], token ids, or'
        " texts and images in a list",
    )


def traceparent_of(given: str | None) -> str:
    """Return *given*, or else the W3C `traceparent` of OpenTelemetry's current span, or else "".

    OpenTelemetry is not imported here: a program that has not imported it has no current span.
    """
    if given is not None:
        return given
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"


async def open_file(
    run_in_thread: Callable[..., Awaitable[int]], path: str | os.PathLike[str]
) -> int:
    """Return a descriptor of one of the user's files, opened for reading.

    :raises InvalidArgument: it cannot be read.
    """
    try:
        return await run_in_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise InvalidArgument(
            f"{os.fspath(path)} cannot be read: {exc.strerror}",
            hint="check the path and its permissions",
        ) from None


def _read_file(descriptor: int) -> bytes:
    """Return the bytes of a file, which a frame has room for."""
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(FRAME_BYTES_MAX)


class Payload:
    """A frame's tensors, images and sounds, and descriptors of those that do not fit. Close it
    after sending.

    *run_in_thread* runs a function that takes long.
    """

    def __init__(self, run_in_thread: Callable[..., Awaitable[Any]]) -> None:
        self.descriptors: list[int] = []
        self._opened: list[int] = []
        """Descriptors that are not passed with the frame."""
        self._run_in_thread = run_in_thread
        self._bytes_left = FRAME_BYTES_MAX - ENVELOPE_BYTES

    async def pack_tensor(self, value: TensorLike) -> Tensor:
        """Return *value* as a tensor for the frame, with its bytes or with the index of a memfd.

        :raises TooLarge: the tensor exceeds even the bound of a tensor in a memfd.
        """
        tensor = as_tensor(value)
        size = len(tensor.data)
        if size > TENSOR_BYTES_MAX:
            raise TooLarge(
                f"a tensor of {size} bytes; the limit is {TENSOR_BYTES_MAX}",
                hint="split it; scale down the images in a prompt",
                data={"bytes": size, "tensor_bytes_max": TENSOR_BYTES_MAX},
            )
        if size <= self._bytes_left:
            self._bytes_left -= size
            return tensor
        return msgspec.structs.replace(tensor, data=b"", fd=await self.add_memfd(tensor.data))

    async def add_memfd(self, data: bytes) -> int:
        """Write *data* to a memfd and return its index among the frame's descriptors."""
        if len(data) < _THREAD_BYTES_MIN:
            self.descriptors.append(sealed_memory([data]))
        else:
            self.descriptors.append(await self._run_in_thread(sealed_memory, [data]))
        return len(self.descriptors) - 1

    async def pack_messages(self, params: M) -> M:
        """Return the params of a call, with the images and sounds in its messages as bytes, or as
        indices of descriptors.

        :raises InvalidArgument: a file cannot be read.
        :raises TooLarge: they are too many, or have too many bytes for one frame.
        """
        messages = [dict(message) for message in params.messages or ()]
        found: list[tuple[dict[str, Any], Content]] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list | tuple):
                message["content"] = [await self._open_part(part, found) for part in content]
        packed = msgspec.structs.replace(params, messages=messages)
        left = FRAME_BYTES_MAX - ENVELOPE_BYTES - len(pack_message(packed))
        passed = in_descriptors([content.size for _, content in found], left) if found else ()
        for index, (fields, content) in enumerate(found):
            if index in passed:
                fields["data"] = {"fd": await self._pass_content(content)}
            elif content.descriptor >= 0:
                fields["data"] = await self._run_in_thread(_read_file, content.descriptor)
            else:
                fields["data"] = content.data
        return packed

    async def _open_part(self, part: Any, found: list[tuple[dict[str, Any], Content]]) -> Any:
        """Return a part of a content as a map; an image or a sound is opened and added to *found*,
        and its data follows later.
        """
        if isinstance(part, str):
            return {"type": "text", "text": part}
        media = as_media(part)
        if media is None:
            return part
        if len(found) >= MEDIA_PARTS_MAX:
            raise TooLarge(
                f"a request has at most {MEDIA_PARTS_MAX} images and sounds",
                hint="send the others with the next message",
                data={"item": len(found), "media_parts_max": MEDIA_PARTS_MAX},
            )
        try:
            content = await self._run_in_thread(media[1].open)
        except InferdError as exc:
            exc.data["item"] = len(found)
            raise
        if content.descriptor >= 0:
            self._opened.append(content.descriptor)
        fields = media[0] | {"data": b""}
        found.append((fields, content))
        return fields

    async def _pass_content(self, content: Content) -> int:
        if content.descriptor < 0:
            return await self.add_memfd(content.data)
        self._opened.remove(content.descriptor)
        self.descriptors.append(content.descriptor)
        return len(self.descriptors) - 1

    def close(self) -> None:
        """Close the descriptors; the kernel duplicated them for the socket."""
        for descriptors in (self.descriptors, self._opened):
            while descriptors:
                os.close(descriptors.pop())
