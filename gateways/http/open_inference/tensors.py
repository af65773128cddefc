"""Tensors of inferences: the data of inputs, and outputs as JSON, binary or classes."""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ....backends.errors import InferdError, InvalidArgument, TooLarge
from ....backends.tensors import (
    FLOATS,
    STRING,
    STRINGS_MAX,
    pack_strings,
    too_many_strings,
    unpack_strings,
)
from ....ipc.client import Tensor
from ....ipc.client.arrays import (
    element_bytes,
    numbers_of,
    pack_numbers,
    strings_of,
    type_name_of,
)
from ..fields import field_error
from ..limits import TENSORS_BYTES_MAX, TEXTS_BYTES_MAX
from ..shared_memory import RegionPart
from .bodies import Body
from .fields import InferInput, InferOutput, InferRequest, OutputParameters, RequestParameters

DATATYPES = {
    "BOOL": "bool", "UINT8": "u8", "UINT16": "u16", "UINT32": "u32", "UINT64": "u64",
    "INT8": "i8", "INT16": "i16", "INT32": "i32", "INT64": "i64", "FP16": "fp16", "FP32": "fp32",
    "FP64": "fp64", "BF16": "bf16", "BYTES": STRING,
}  # fmt: skip
"""The names of types by the protocol's."""
DATATYPE_OF = {kind: name for name, kind in DATATYPES.items()}
TEXTS = DATATYPE_OF[STRING]
_ONLY_BINARY = ("fp16", "bf16")
_NESTING = b"[] \t\r\n"
SLICE_BYTES = 256 << 10
"""JSON is read and written in slices of about this size. Between them the event loop runs, and only
the numbers of one slice are objects, which take many times their bytes.
"""
_SLICE_NUMBERS = SLICE_BYTES // 8
_NUMBERS: Mapping[bool, Any] = {
    is_float: msgspec.json.Decoder(list[float] if is_float else list[int | bool])
    for is_float in (True, False)
}


def read_inputs(
    request: InferRequest, body: Body, shared: Mapping[int, bytes]
) -> list[tuple[str, Tensor]]:
    """Return the inputs of a request. *shared* are the data of those in shared memory, by their
    numbers.

    :raises InvalidArgument: the data of an input do not have its type or shape.
    """
    found, start = [], 0
    for number, (given, data) in enumerate(zip(request.inputs, body.data, strict=True)):
        size = given.parameters.binary_data_size if given.parameters is not None else None
        kind = _type_of(given, number)
        _check_size(given, kind)
        if (size is not None) + (data is not None) + (number in shared) > 1:
            place = "shared memory" if number in shared else "binary_data_size"
            raise field_error(
                f"inputs.{number}.data", f"the input {_shown(given)} has data and {place}"
            )
        if number in shared:
            tensor = _from_shared(given, kind, shared[number])
        elif size is None:
            tensor = _from_json(given, kind, data)
        else:
            tensor = _from_binary(given, kind, body.binary[start : start + size], size)
            start += size
        found.append((given.name, tensor))
    if start < len(body.binary):
        raise InvalidArgument(
            f"{len(body.binary) - start} bytes follow the binary data of the inputs",
            hint="state the bytes of each input in its parameter binary_data_size",
        )
    return found


def _shown(given: InferInput) -> str:
    return repr(given.name[:100])


def _type_of(given: InferInput, number: int) -> str:
    if given.datatype not in DATATYPES:
        raise field_error(
            f"inputs.{number}.datatype",
            f"the input {_shown(given)} has the unknown type {given.datatype[:100]!r}",
            hint=f"send one of {', '.join(DATATYPES)}",
        )
    return DATATYPES[given.datatype]


def _check_size(given: InferInput, kind: str) -> None:
    if kind == STRING:
        if math.prod(given.shape) > STRINGS_MAX:
            raise too_many_strings()
        return
    size = math.prod(given.shape) * element_bytes(kind)
    if size > TENSORS_BYTES_MAX:
        raise TooLarge(
            f"the input {_shown(given)} has {size} bytes; {TENSORS_BYTES_MAX} are allowed",
            hint="send a smaller tensor",
            data={"bytes": size, "tensor_bytes_max": TENSORS_BYTES_MAX},
        )


def _from_binary(given: InferInput, kind: str, data: memoryview, size: int) -> Tensor:
    if kind == STRING and len(data) == size:
        return _from_packed(given, bytes(data))
    wanted = math.prod(given.shape) * element_bytes(kind) if kind != STRING else size
    if size != wanted or len(data) != size:
        raise InvalidArgument(
            f"the input {_shown(given)} has binary_data_size {size}, of which {len(data)} bytes"
            f" arrived; its shape and type need {wanted}",
            hint="send the elements of all inputs after the JSON, in their order",
        )
    return Tensor(data=bytes(data), dimensions=given.shape, type=kind)


def _from_shared(given: InferInput, kind: str, data: bytes) -> Tensor:
    if kind == STRING:
        return _from_packed(given, data)
    wanted = math.prod(given.shape) * element_bytes(kind)
    if len(data) != wanted:
        raise InvalidArgument(
            f"the input {_shown(given)} has shared_memory_byte_size {len(data)}; its shape and type"
            f" need {wanted}",
            hint="state the bytes of its elements",
        )
    return Tensor(data=data, dimensions=given.shape, type=kind)


def _from_json(given: InferInput, kind: str, data: Raw | None) -> Tensor:
    if data is None or bytes(data) == b"null":
        raise InvalidArgument(
            f"the input {_shown(given)} has no data",
            hint="send `data`, or binary data with binary_data_size",
        )
    if kind in _ONLY_BINARY:
        raise InvalidArgument(
            f"the input {_shown(given)} is of type {given.datatype}, which JSON does not have",
            hint="send it as binary data with binary_data_size",
        )
    packed, wanted = bytearray(), math.prod(given.shape)
    if kind == STRING:
        return _from_packed(given, pack_strings(_strings_in(given, bytes(data))))
    try:
        for numbers in _numbers_in(bytes(data), kind):
            packed += pack_numbers(numbers, kind)
    except (msgspec.DecodeError, OverflowError, ValueError, struct.error):
        raise InvalidArgument(
            f"the data of the input {_shown(given)} are not numbers of {given.datatype}",
            hint="send a list of numbers, or of lists of numbers",
        ) from None
    count = len(packed) // element_bytes(kind)
    if count != wanted:
        raise _wrong_count(given, count)
    return Tensor(data=bytes(packed), dimensions=given.shape, type=kind)


def _wrong_count(given: InferInput, count: int) -> InvalidArgument:
    return InvalidArgument(
        f"the input {_shown(given)} has {count} elements; its shape {given.shape[:16]} has"
        f" {math.prod(given.shape)}",
        hint="send as many elements as the shape has",
    )


def _from_packed(given: InferInput, data: bytes) -> Tensor:
    """Return a tensor of strings, each after its length.

    :raises InvalidArgument: there are more or less strings than its shape has.
    """
    try:
        count = len(unpack_strings(data))
    except ValueError as exc:
        raise InvalidArgument(
            f"the data of the input {_shown(given)} are not strings: {exc}",
            hint="send each string after its length, 4 bytes with the lowest first",
        ) from None
    if count != math.prod(given.shape):
        raise _wrong_count(given, count)
    return Tensor(data=data, dimensions=given.shape, type=STRING)


def _strings_in(given: InferInput, text: bytes) -> list[bytes]:
    """Return the strings of a JSON list. Rows may be lists of their own.

    :raises InvalidArgument: it has something else.
    """
    try:
        level = msgspec.json.decode(text, type=list[Any])
        for _ in given.shape:
            if any(isinstance(part, list) for part in level):
                rows = (part if isinstance(part, list) else [part] for part in level)
                level = [one for row in rows for one in row]
        return [msgspec.convert(one, str).encode() for one in level]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidArgument(
            f"the data of the input {_shown(given)} are not strings",
            hint="send a list of strings, or of lists of strings; bytes that are not UTF-8 as"
            " binary data with binary_data_size",
        ) from None


def _numbers_in(text: bytes, kind: str) -> Iterator[list[Any]]:
    """Yield the numbers of a JSON list in slices. Rows may be lists of their own.

    :raises msgspec.DecodeError: it has something else.
    """
    decoder = _NUMBERS[kind in FLOATS]
    if not text.startswith(b"["):
        decoder.decode(text)  # an error
    flat = text.translate(None, _NESTING)
    start = 0
    while start < len(flat):
        end = flat.find(b",", start + SLICE_BYTES)
        end = len(flat) if end < 0 else end
        yield decoder.decode(b"[%b]" % flat[start:end])
        start = end + 1


def _numbers_text(numbers: Sequence[Any]) -> Raw:
    """Return numbers as a JSON list, written in slices."""
    parts = [
        msgspec.json.encode(list(numbers[at : at + _SLICE_NUMBERS]))[1:-1]
        for at in range(0, len(numbers), _SLICE_NUMBERS)
    ]
    return Raw(b"[%b]" % b",".join(parts))


class Outputs(NamedTuple):
    """The outputs of a response, the binary data of those that have any, and the data that belong
    into shared memory.
    """

    outputs: list[dict[str, Any]]
    binary: list[bytes]
    shared: list[tuple[RegionPart, bytes]]


def write_outputs(
    request: InferRequest,
    found: Sequence[tuple[str, Tensor]],
    places: Mapping[int, RegionPart],
) -> Outputs:
    """Return the requested ones of the outputs that were *found*, or all. Those with *places* in
    shared memory, by their numbers, belong there.

    :raises InvalidArgument: the model has no such output, or JSON does not have its type, or it is
        larger than its place.
    :raises TooLarge: they are too large for JSON or classes.
    """
    parameters = request.parameters or RequestParameters()
    by_name, texts_bytes, binary_bytes = dict(found), 0, 0
    written = Outputs([], [], [])
    outputs = request.outputs or [InferOutput(name=name) for name, _ in found]
    for number, wanted in enumerate(outputs):
        if wanted.name not in by_name:
            raise no_output(wanted.name, list(by_name))
        options = wanted.parameters or OutputParameters()
        is_binary = parameters.binary_data_output
        if options.binary_data is not None:
            is_binary = options.binary_data
        tensor, place = by_name[wanted.name], places.get(number)
        if place is not None:
            _share_output(written, wanted.name, tensor, place)
            continue
        if not is_binary or options.classification:
            texts_bytes += len(tensor.data)
        else:  # an output may be requested many times
            binary_bytes += len(tensor.data)
        _check_response(wanted.name, texts_bytes, binary_bytes)
        _write_output(written, wanted.name, tensor, options, is_binary=is_binary)
    return written


def _share_output(written: Outputs, name: str, tensor: Tensor, place: RegionPart) -> None:
    size = len(tensor.data)
    if size > place.size:
        raise InvalidArgument(
            f"the output {name[:100]!r} has {size} bytes; its place in shared memory has"
            f" {place.size}",
            hint=f"pass a shared_memory_byte_size of {size}",
            data={"bytes": size, "bytes_max": place.size},
        )
    parameters: dict[str, Any] = {
        "shared_memory_region": place.region.name,
        "shared_memory_byte_size": size,
    }
    if place.offset:
        parameters["shared_memory_offset"] = place.offset
    written.outputs.append(_described(name, tensor) | {"parameters": parameters})
    written.shared.append((place, tensor.data))


def _described(name: str, tensor: Tensor) -> dict[str, Any]:
    datatype = DATATYPE_OF[type_name_of(tensor)]
    return {"name": name, "datatype": datatype, "shape": list(tensor.dimensions)}


def _check_response(name: str, texts_bytes: int, binary_bytes: int) -> None:
    """Check the bytes of the outputs in JSON and as classes, whose texts take much more memory and
    time, and those of the others.

    :raises TooLarge: they are too many.
    """
    for kind, size, size_max, hint in (
        ("in JSON and as classes", texts_bytes, TEXTS_BYTES_MAX, "as binary data (binary_data)"),
        ("in the response", binary_bytes, TENSORS_BYTES_MAX, "once, or fewer of them"),
    ):
        if size > size_max:
            raise TooLarge(
                f"the outputs {kind} have {size} bytes with {name[:100]!r}; {size_max} are allowed",
                hint=f"request them {hint}",
                data={"bytes": size, "bytes_max": size_max},
            )


def no_output(name: str, names: Sequence[str]) -> InferdError:
    """Return the error for an output that a model does not have."""
    shown = ", ".join(repr(each[:100]) for each in names[:16])
    return InvalidArgument(f"the model has no output {name[:100]!r}", hint=f"its outputs: {shown}")


def _write_output(
    written: Outputs, name: str, tensor: Tensor, options: OutputParameters, *, is_binary: bool
) -> None:
    kind, shape = type_name_of(tensor), list(tensor.dimensions)
    output = _described(name, tensor)
    written.outputs.append(output)
    if options.classification and kind == STRING:
        raise InvalidArgument(
            f"the output {name[:100]!r} is of type {TEXTS}, which has no classes",
            hint="request it without the parameter classification",
        )
    if options.classification:
        rows = _classes(tensor, options.classification)
        output["datatype"] = TEXTS
        output["shape"] = [*(shape[:1] if len(shape) > 1 else ()), len(rows[0]) if rows else 0]
        texts = [text for row in rows for text in row]
        data = b"".join(struct.pack("<I", len(text)) + text.encode() for text in texts)
    elif is_binary:
        data = tensor.data
    elif kind in _ONLY_BINARY:
        raise InvalidArgument(
            f"the output {name[:100]!r} is of type {DATATYPE_OF[kind]}, which JSON does not have",
            hint="request it with the parameter binary_data",
        )
    if is_binary:
        output["parameters"] = {"binary_data_size": len(data)}
        written.binary.append(data)
    elif options.classification:
        output["data"] = texts
    elif kind == STRING:
        output["data"] = _texts(name, tensor)
    else:
        output["data"] = _numbers_text(numbers_of(tensor))


def _texts(name: str, tensor: Tensor) -> list[str]:
    try:
        return [one.decode() for one in strings_of(tensor)]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"the output {name[:100]!r} has bytes that are not UTF-8, which JSON does not have",
            hint="request it with the parameter binary_data",
        ) from None


def _classes(tensor: Tensor, count: int) -> list[list[str]]:
    """Return the largest values with their indices, as texts: of a tensor with several dimensions
    those of each element of the first one.
    """
    values = numbers_of(tensor)
    rows = tensor.dimensions[0] if len(tensor.dimensions) > 1 else 1
    width = len(values) // rows if rows else 0
    is_float = type_name_of(tensor) in FLOATS
    found = []
    for row in range(rows):
        part = values[row * width : (row + 1) * width]
        # A value that is not a number comes last.
        best = heapq.nlargest(
            count, range(width), key=lambda at: (part[at] == part[at], part[at], -at)
        )
        found.append([f"{part[at]:f}:{at}" if is_float else f"{int(part[at])}:{at}" for at in best])
    return found
