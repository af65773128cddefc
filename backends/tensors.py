"""Tensors as models take and return them, wasi-nn's types of their elements, and the check of a
computation's inputs against those that a model declares.

This module does not use numpy: a tensor is its bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from .errors import InvalidArgument, TooLarge
from .params import nearest

TENSOR_TYPES = {"fp16": 0, "fp32": 1, "fp64": 2, "u8": 3, "i32": 4, "i64": 5, "bf16": 6}
"""Types by name; 0 to 5 are WasmEdge's numbers."""
STRING = "string"
OTHER_TYPES = {
    **{"bool": 200, "i8": 201, "i16": 202, "u16": 203, "u32": 204, "u64": 205},
    STRING: 206,
}
"""Types that only have names for clients; the numbers are inferd's own."""
_ALL_TYPES = TENSOR_TYPES | OTHER_TYPES
TYPE_NAMES = {number: name for name, number in _ALL_TYPES.items()}
_ELEMENT_BYTES = {
    **{0: 2, 1: 4, 2: 8, 3: 1, 4: 4, 5: 8, 6: 2},
    **{200: 1, 201: 1, 202: 2, 203: 2, 204: 4, 205: 8},
}
"""Those of all types except strings, whose elements have lengths of their own."""
_NUMBERS_MEAN: Mapping[int, tuple[str, ...]] = {
    2: ("fp64", "u8"),
    3: ("u8", "i32", "bf16"),
    4: ("i32", "u8"),
    5: ("i64", "i32"),
    6: ("bf16", "i64"),
}
"""The types for which hosts and guests have sent a number: those of WasmEdge, of wasi-nn's first
version (fp16, fp32, u8, i32) and of its component model (fp16, fp32, fp64, bf16, u8, i32, i64).
Their sizes differ, so that the bytes of a tensor show which one is meant.
"""
ARRAY_TYPES = {
    "fp16": "<f2", "fp32": "<f4", "fp64": "<f8", "bf16": "<u2", "bool": "|b1",
    "u8": "|u1", "u16": "<u2", "u32": "<u4", "u64": "<u8",
    "i8": "|i1", "i16": "<i2", "i32": "<i4", "i64": "<i8",
}  # fmt: skip
"""NumPy's codes of the types, except strings. It has no bfloat16, of which an array has the bytes.
"""
FLOATS = ("fp16", "fp32", "fp64", "bf16")
STRINGS_MAX = 1 << 16
"""The most elements of a tensor of strings: each is an object while it is read."""
_LENGTH = struct.Struct("<I")
"""In a tensor's data, each string follows its length, as in the Open Inference Protocol."""
SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,))
"""The component model has no tensors without dimensions, so that `[1]` stands for a scalar, too."""
NAMES_SHOWN_MAX, NAME_CHARACTERS_MAX = 16, 100
"""The most names in an error, and the most characters of each."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """The elements in *data*, with the number of their type. Neither is checked: a model refuses
    tensors that do not fit its inputs. The data of an input of a graph may be a view of memory that
    a client can change (`GraphModel.new_computation`).
    """

    data: bytes
    dimensions: tuple[int, ...] = ()
    type: int = TENSOR_TYPES["u8"]

    @property
    def holds_numbers(self) -> bool:
        """Whether it is an array, and not a text. Guests send texts as u8 or, because hosts have
        disagreed on the numbers of types, as another type with the shape [1].
        """
        elements = math.prod(self.dimensions)
        fits = elements * _ELEMENT_BYTES.get(self.type, 0) == len(self.data)
        return fits and elements > 1 and self.type != TENSOR_TYPES["u8"]


NamedTensor: TypeAlias = tuple[str, Tensor]


def number_of(value: int | str, names: dict[str, int], what: str) -> int:
    """Return the number of an enum's value, given by number or name.

    :raises InvalidArgument: there is no such value.
    """
    if isinstance(value, str):
        found = names.get(value.lower().replace("-", "").replace("_", ""))
        if found is not None:
            return found
        raise InvalidArgument(
            f"there is no {what} {value[:50]!r}",
            hint=nearest(value, names) or f"use one of {', '.join(names)}",
        )
    return value


def type_number(kind: int | str) -> int:
    """Return the number of a tensor's type, given by number or name. No number is refused, because
    hosts have disagreed on U8 and I32 (2 and 3, 3 and 4).

    :raises InvalidArgument: there is no type with this name.
    """
    if not isinstance(kind, str):
        return kind
    found = _ALL_TYPES.get(kind)
    return number_of(kind, TENSOR_TYPES, "tensor type") if found is None else found


def spelled_type(kind: int) -> int | str:
    """Return the number of a type, or the name of one that has none for clients."""
    name = TYPE_NAMES.get(kind, "")
    return name if name in OTHER_TYPES else kind


def bytes_of_shape(kind: int, dimensions: Sequence[int]) -> int:
    """Return the bytes of a tensor with these dimensions and this number of its type."""
    return math.prod(dimensions) * _ELEMENT_BYTES.get(kind, 0)


def pack_strings(strings: Iterable[bytes]) -> bytes:
    """Return the data of a tensor of strings."""
    return b"".join(part for one in strings for part in (_LENGTH.pack(len(one)), one))


def unpack_strings(data: bytes) -> list[bytes]:
    """Return the elements of a tensor of strings.

    :raises ValueError: one is cut off.
    :raises TooLarge: there are too many.
    """
    return list(map(bytes, _cut_strings(data)))


def _cut_strings(data: bytes) -> list[bytes]:
    """Return the elements of a tensor of strings, those in a view as views."""
    found, at = list[bytes](), 0
    while at < len(data):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack(data[at:start])[0] if start <= len(data) else len(data) + 1
        if at > len(data):
            raise ValueError("a string is cut off")
        found.append(data[start:at])
        if len(found) > STRINGS_MAX:
            raise too_many_strings()
    return found


def too_many_strings() -> TooLarge:
    """Return the error for a tensor with more strings than one may have."""
    return TooLarge(
        f"a tensor has more than {STRINGS_MAX} strings",
        hint="divide the inputs",
        data={"strings_max": STRINGS_MAX},
    )


class TensorInfo(msgspec.Struct, frozen=True):
    """An input or output of a model: its name, the name of its type, and its dimensions.

    A dimension without a fixed size is a text: its name in the model, or "" if it has none. The
    dimensions are None if the model does not state how many there are.
    """

    name: str
    type: str
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        return f"{self.name[:NAME_CHARACTERS_MAX]!r} ({self.type} {shape_text(self.shape)})"


class DeclaredTensors(NamedTuple):
    """The inputs and outputs that a graph's file declares."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


def shape_text(shape: Sequence[int | str] | None) -> str:
    """Return dimensions for people, with ``?`` for a free one without a name."""
    if shape is None:
        return "of any shape"
    return f"[{', '.join(str(size) if size != '' else '?' for size in shape)}]"


def names_text(tensors: Sequence[TensorInfo]) -> str:
    """Return the names of tensors for people, the first ones of many."""
    names = [repr(one.name[:NAME_CHARACTERS_MAX]) for one in tensors[:NAMES_SHOWN_MAX]]
    return ", ".join(names) + (", …" if len(tensors) > NAMES_SHOWN_MAX else "")


Inputs = Sequence[tuple[TensorInfo, Tensor]]
"""The tensors of a computation in the order of the inputs that the model declares."""


def match_inputs(
    declared: Sequence[TensorInfo], given: Sequence[NamedTensor]
) -> list[tuple[TensorInfo, Tensor]]:
    """Return the *given* tensors in the order of the inputs that a model has *declared*, each with
    the declared type and number of dimensions. A tensor's name is that of an input, or its index.

    :raises InvalidArgument: an input is missing, unknown, given twice, or of another type or shape.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in given:
        info = find_input(declared, name)
        if info.name in found:
            raise InvalidArgument(f"the input {info} is given twice", hint="send each input once")
        found[info.name] = _fitting(info, tensor)
    missing = [info for info in declared if info.name not in found]
    if missing:
        raise InvalidArgument(
            f"the input {missing[0]} is missing",
            hint=f"send a tensor for each of {names_text(declared)}",
            data={"missing": [info.name for info in missing[:NAMES_SHOWN_MAX]]},
        )
    return [(info, found[info.name]) for info in declared]


def fits_index(declared: Sequence[TensorInfo], index: int, tensor: Tensor) -> bool:
    """Return whether *tensor* fits the input of an index."""
    try:
        check_index(declared, index, tensor)
    except InvalidArgument:
        return False
    return True


def check_index(declared: Sequence[TensorInfo], index: int, tensor: Tensor) -> None:
    """Check that *tensor* fits the input of an index.

    :raises InvalidArgument: the model has no such input, or the tensor does not fit it.
    """
    if index >= len(declared):
        raise InvalidArgument(f"the model has no input {index}", hint=_known_inputs(declared))
    _fitting(declared[index], tensor)


def find_input(declared: Sequence[TensorInfo], name: str) -> TensorInfo:
    """Return the input of a name or an index.

    :raises InvalidArgument: there is none.
    """
    for info in declared:
        if info.name == name:
            return info
    if name.isascii() and name.isdecimal() and len(name) < 6 and int(name) < len(declared):
        return declared[int(name)]
    raise InvalidArgument(
        f"the model has no input {name[:NAME_CHARACTERS_MAX]!r}",
        hint=_known_inputs(declared),
    )


def _known_inputs(declared: Sequence[TensorInfo]) -> str:
    if not declared:
        return "send no tensors: the model has no inputs"
    return f"its inputs are {names_text(declared)}, or 0 to {len(declared) - 1} by index"


def _differs(declared: int | str, size: int) -> bool:
    """Return whether a dimension is declared, and not with this *size*."""
    return declared != size and isinstance(declared, int)


def _fitting(info: TensorInfo, tensor: Tensor) -> Tensor:
    """Return *tensor* as an input of the declared type and shape.

    :raises InvalidArgument: it does not fit.
    """
    number = _ALL_TYPES[info.type]
    type_name = TYPE_NAMES.get(tensor.type, f"type {tensor.type}")
    if tensor.type != number and info.type not in _NUMBERS_MEAN.get(tensor.type, ()):
        raise InvalidArgument(
            f"the input {info} got a tensor of {type_name}", hint=f"send it as {info.type}"
        )
    dimensions, shape = tensor.dimensions, info.shape
    if shape == () and dimensions in SCALAR_SHAPES:
        dimensions = ()
    elif (
        shape is not None
        and (len(shape) != len(dimensions) or any(map(_differs, shape, dimensions)))
    ) or (dimensions and min(dimensions) < 0):
        raise InvalidArgument(
            f"the input {info} got the shape {shape_text(tensor.dimensions[:NAMES_SHOWN_MAX])}",
            hint="send the declared number of dimensions, with the same sizes where one is fixed",
        )
    if info.type == STRING:
        _check_strings(info, tensor.data, dimensions)
        return Tensor(tensor.data, dimensions, number)
    size = math.prod(dimensions) * _ELEMENT_BYTES[number]
    if size != len(tensor.data):
        raise InvalidArgument(
            f"the input {info} got {len(tensor.data)} bytes of {type_name} in the shape"
            f" {shape_text(dimensions[:NAMES_SHOWN_MAX])}, which has {size} bytes as {info.type}",
            hint=f"send {_ELEMENT_BYTES[number]} bytes for each element of {info.type}",
        )
    is_view = isinstance(tensor.data, memoryview)  # of which the computation checks a copy
    if info.type == "bool" and not is_view and tensor.data.translate(None, b"\0\1"):
        raise not_bools(info)
    return Tensor(tensor.data, dimensions, number)


def not_bools(info: TensorInfo) -> InvalidArgument:
    """Return the error of an input of bools that has other bytes."""
    return InvalidArgument(
        f"the input {info} got a byte other than 0 and 1", hint="send 0 for false, 1 for true"
    )


def _check_strings(info: TensorInfo, data: bytes, dimensions: tuple[int, ...]) -> None:
    """Check that *data* has the strings of a tensor.

    :raises InvalidArgument: it has another number of them, or something else.
    :raises TooLarge: there are too many.
    """
    try:
        count = len(_cut_strings(data))
        found = f"{count} strings"
    except ValueError as exc:
        count, found = -1, f"damaged strings ({exc})"
    if count != math.prod(dimensions):
        raise InvalidArgument(
            f"the input {info} got {found} in the shape {shape_text(dimensions[:NAMES_SHOWN_MAX])}",
            hint="send each string after its length, 4 bytes with the lowest first",
        )
