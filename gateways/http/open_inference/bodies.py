"""Bodies of inferences: JSON, and JSON before binary tensors, both of which may be compressed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ....backends.errors import InvalidArgument, TooLarge
from ..exchange import Exchange
from ..exchange.exchange import HttpRefusal
from ..limits import TENSORS_BYTES_MAX, TEXTS_BYTES_MAX

HEADER_LENGTH = "inference-header-content-length"
"""The header with the bytes of the JSON, after which the binary tensors follow."""
JSON_BYTES_MAX = TEXTS_BYTES_MAX
"""The most bytes of JSON, whose numbers take many times their bytes of memory."""
THREAD_BYTES_MIN = 64 << 10
"""A body of this size or more is read and written in a thread."""
COMPRESSED_BYTES_MIN = 1024
"""A shorter response is not compressed."""
_LEVEL = 1
_EXPANSION_MAX = 1032
"""The most bytes that one byte of deflate's data stands for."""
_AUTOMATIC = 32 + zlib.MAX_WBITS
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Body(NamedTuple):
    """The fields of a request, the JSON of each input's data (None without), the binary data of all
    inputs, and the bytes of the body.
    """

    fields: dict[str, Any]
    data: list[Raw | None]
    binary: memoryview
    size: int


async def read_body(exchange: Exchange) -> Body:
    """Return the parts of a request's body.

    :raises InvalidArgument: it is not JSON, or not as long as its header says.
    :raises TooLarge: it has too many bytes.
    :raises HttpRefusal: it has another compression than gzip and deflate.
    """
    body = exchange.body
    assert isinstance(body, bytes), "paths of tensors have no images"
    encoding = exchange.headers.get("content-encoding", "identity").strip().lower()
    length = exchange.headers.get(HEADER_LENGTH)
    size = len(body)
    if encoding != "identity":
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise HttpRefusal(
                415,
                f"a body with the content encoding {encoding[:100]!r} is not read",
                hint="use gzip or deflate, or send it without Content-Encoding",
            )
        size = min(len(body) * _EXPANSION_MAX, TENSORS_BYTES_MAX)
        await exchange.take_memory(size)
    if size < THREAD_BYTES_MIN:
        return _read(body, encoding, length)
    found = await exchange.run_in_thread(_read, body, encoding, length)
    exchange.shrink_memory(found.size)
    return found


def _read(body: bytes, encoding: str, length: str | None) -> Body:
    if encoding != "identity":
        body = _decompressed(body)
    end = len(body)
    if length is not None:
        end = int(length) if length.isdecimal() and len(length) < 12 else -1
        if not 0 < end <= len(body):
            raise InvalidArgument(
                f"the header {HEADER_LENGTH.title()} is {length[:20]!r}, and the body has"
                f" {len(body)} bytes",
                hint="set it to the bytes of the JSON with which the body begins",
            )
    if end > JSON_BYTES_MAX:
        raise TooLarge(
            f"the JSON of the request has {end} bytes; {JSON_BYTES_MAX} are allowed",
            hint="send tensors in the binary form (binary_data_size)",
            data={"bytes": end, "json_bytes_max": JSON_BYTES_MAX},
        )
    fields, data = _split(body[:end] if end < len(body) else body)
    return Body(fields, data, memoryview(body)[end:], len(body))


def _decompressed(body: bytes) -> bytes:
    decompressor = zlib.decompressobj(_AUTOMATIC)
    try:
        found = decompressor.decompress(body, TENSORS_BYTES_MAX + 1)
    except zlib.error as exc:
        raise InvalidArgument(
            f"the body cannot be decompressed: {exc}", hint="compress it by gzip or zlib"
        ) from None
    if len(found) > TENSORS_BYTES_MAX:
        raise TooLarge(
            f"the body has more than {TENSORS_BYTES_MAX} bytes once it is decompressed",
            hint="send less",
            data={"body_bytes_max": TENSORS_BYTES_MAX},
        )
    if not decompressor.eof:
        raise InvalidArgument("the compressed body is cut off", hint="send all of it")
    return found


def _split(head: bytes) -> tuple[dict[str, Any], list[Raw | None]]:
    """Return the fields of a request, and the data of its inputs, which are not decoded."""
    try:
        fields: dict[str, Any] = dict(msgspec.json.decode(head, type=dict[str, Raw]))
        data: list[Raw | None] = []
        for name, raw in fields.items():
            fields[name] = _inputs(raw, data) if name == "inputs" else msgspec.json.decode(raw)
    except msgspec.ValidationError:
        raise InvalidArgument("the request is not an object", hint="send a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidArgument(
            f"the request is not JSON: {exc}", hint="send a JSON object"
        ) from None
    return fields, data


def _inputs(raw: Raw, data: list[Raw | None]) -> Any:
    """Return the inputs without their data, which are added to *data*."""
    try:
        inputs = msgspec.json.decode(raw, type=list[dict[str, Raw]])
    except msgspec.ValidationError:  # the table of fields names the mistake
        return msgspec.json.decode(raw)
    found = []
    for fields in inputs:
        data.append(fields.pop("data", None))
        found.append({name: msgspec.json.decode(value) for name, value in fields.items()})
    return found


async def send_body(exchange: Exchange, head: Any, binary: Sequence[bytes], size: int) -> None:
    """Send a response: JSON, and the binary tensors if there are any, compressed if the client
    accepts that. *size* is that of all tensors.
    """
    coding = _accepted(exchange.headers)
    write = exchange.run_in_thread if size >= THREAD_BYTES_MIN else _at_once
    length, data, is_compressed = await write(_written, head, binary, coding)
    headers = [(b"vary", b"accept-encoding")]
    if is_compressed:
        headers.append((b"content-encoding", coding.encode()))
    if binary:
        headers.append((HEADER_LENGTH.encode(), str(length).encode()))
    kind = b"application/octet-stream" if binary else b"application/json"
    await exchange.send_whole(data, content_type=kind, headers=headers)


async def _at_once(function: Any, *args: Any) -> Any:
    return function(*args)


def _written(head: Any, binary: Sequence[bytes], coding: str) -> tuple[int, bytes, bool]:
    """Return the length of the JSON, the body, and whether it is compressed."""
    text = msgspec.json.encode(head)
    data = b"".join((text, *binary))
    if not coding or len(data) < COMPRESSED_BYTES_MIN:
        return len(text), data, False
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOWS[coding])
    return len(text), compressor.compress(data) + compressor.flush(), True


def _accepted(headers: Mapping[str, str]) -> str:
    """Return the compression that a client accepts, or an empty text. It has to name it."""
    for item in headers.get("accept-encoding", "").lower().split(","):
        coding, _, weight = item.partition(";")
        if coding.strip() in _WINDOWS and weight.replace(" ", "").rstrip("0.") != "q=":
            return coding.strip()
    return ""
