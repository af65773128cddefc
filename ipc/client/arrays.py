"""Conversion of arrays, buffers and lists of numbers to the tensors that a graph declares, and of
its outputs to arrays.

NumPy makes the arrays where it is installed. This module imports it at the first use.
"""

from __future__ import annotations

import importlib
import struct
from array import array
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ...backends.errors import InvalidArgument, ProtocolError
from ...backends.tensors import (
    ARRAY_TYPES,
    FLOATS,
    STRING,
    TYPE_NAMES,
    TensorInfo,
    pack_strings,
    unpack_strings,
)
from ..messages import TENSOR_BYTES_MAX, Tensor
from .kept_tensors import TensorReference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

ArrayLike: TypeAlias = "NDArray[Any] | Tensor | TensorReference | Buffer | Sequence[Any] | float"
"""An array, a tensor, one that stays in the daemon or is in a buffer of the client, a buffer of
Python with a format, a number or string, or a list of these or of such lists.
"""
CODES: dict[str, Any] = {
    "fp16": "e", "fp32": "f", "fp64": "d", "bool": "?", "u8": "B", "i8": "b", "u16": "H",
    "i16": "h", "u32": "I", "i32": "i", "u64": "Q", "i64": "q",
}  # fmt: skip
"""The characters of `struct` by the names of types; bf16 has none."""
ARRAY_NAMES = {
    "fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "bool": "bool",
    "u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32",
    "u64": "uint64", "i64": "int64",
}  # fmt: skip
"""NumPy's names of types, and that of the package ml_dtypes. Strings have several, and `object`."""
_TYPES = {name: kind for kind, name in ARRAY_NAMES.items()}
_TYPES_BY_CODE = {code: kind for kind, code in ARRAY_TYPES.items() if kind != "bf16"}
"""By NumPy's codes, which it need not make first, as it does the names."""
DEPTH_MAX = 32
"""The most dimensions of a list."""
_WHAT = "an array of NumPy, a list of numbers, a buffer or a Tensor"


@cache
def find_numpy() -> Any:
    """Return NumPy, or None if it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def tensor_of(value: ArrayLike, declared: TensorInfo | None, name: str) -> Tensor:
    """Return *value* as a tensor for the input *name*. An array becomes one of the declared type if
    that changes no integer, and a list becomes one if its numbers have that type. The declared
    shape is left to the daemon. The data of a tensor that no frame takes may be a view of *value*.

    :raises InvalidArgument: the value has another type, or is not an array.
    """
    text: object = repr(name[:100]) if declared is None else declared  # a text in errors only
    if isinstance(value, Tensor):
        return value
    if isinstance(value, TensorReference):
        return value.as_input()
    if declared is not None and declared.type == STRING:
        return _from_strings(value, text)
    if isinstance(value, list | tuple | int | float):
        return _from_numbers(value, declared, text)
    numpy = find_numpy()
    if numpy is not None and hasattr(value, "__array__"):
        return _from_array(numpy, numpy.asarray(value), declared, text)
    return _from_buffer(value, declared, text)


def _from_array(numpy: Any, given: Any, declared: TensorInfo | None, text: object) -> Tensor:
    kind = _TYPES_BY_CODE.get(given.dtype.str) or _TYPES.get(given.dtype.name)
    wanted = kind if declared is None else declared.type
    if kind is None or wanted is None or wanted not in ARRAY_NAMES:
        raise _wrong_type(text, str(given.dtype), wanted)
    if wanted == kind:
        is_exact = kind == "bf16" or given.dtype.str in _TYPES_BY_CODE
        found = given if is_exact else given.astype(dtype_of(kind), copy=False)
    elif wanted == "bf16":
        found = _to_bfloat16(numpy, given.astype("<f4"))
    else:
        found = _converted(numpy, given, kind, wanted, text)
    data = _array_bytes(numpy, found)
    return Tensor(data=data, dimensions=list(given.shape), type=wanted)


def _array_bytes(numpy: Any, array: Any) -> bytes:
    """Return the bytes of an array. The caller copies those of a large one into a buffer; a copy
    here would take longer than that one, because its pages are new.
    """
    if array.nbytes <= TENSOR_BYTES_MAX:
        return bytes(array.tobytes())
    return cast(bytes, numpy.ascontiguousarray(array).reshape(-1).view("u1").data)


def _converted(numpy: Any, given: Any, kind: str, wanted: str, text: object) -> Any:
    """Return an array of another type: a floating-point one, or integers that have all values.

    :raises InvalidArgument: values would change.
    """
    if wanted in FLOATS:
        with numpy.errstate(over="ignore"):
            found = given.astype(dtype_of(wanted))
        if not numpy.array_equal(numpy.isfinite(found), numpy.isfinite(given.astype("<f8"))):
            raise _out_of_range(text, wanted)
        return found
    if wanted == "bool" or kind in FLOATS:
        raise _wrong_type(text, kind, wanted)
    limits = numpy.iinfo(dtype_of(wanted))
    if given.size and not limits.min <= int(given.min()) <= int(given.max()) <= limits.max:
        raise _out_of_range(text, wanted)
    return given.astype(dtype_of(wanted))


def dtype_of(kind: str) -> str:
    """Return NumPy's code of a type."""
    return f"<{CODES[kind]}" if kind != "bool" else "?"


def _to_bfloat16(numpy: Any, floats: Any) -> Any:
    """Return the nearest numbers of bfloat16, as their bits; of two equally near, the even one."""
    bits = floats.view("<u4")
    with numpy.errstate(over="ignore"):  # of numbers that are not finite
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return numpy.where(numpy.isnan(floats), numpy.uint16(0x7FC0), rounded)


def _from_numbers(value: Any, declared: TensorInfo | None, text: object) -> Tensor:
    if declared is None:
        raise InvalidArgument(
            f"the type of the input {text} is not known", hint="pass a Tensor or an array of NumPy"
        )
    numbers, shape = _flatten(value, text)
    kinds = (int, float) if declared.type in FLOATS else (int,)
    unfit = next((n for n in numbers if not isinstance(n, kinds)), None)
    if unfit is not None:
        raise InvalidArgument(
            f"the input {text} got the value {unfit!r:.80}", hint=f"send numbers of {declared.type}"
        )
    try:
        data = pack_numbers(numbers, declared.type)
    except (OverflowError, ValueError, struct.error):
        raise _out_of_range(text, declared.type) from None
    return Tensor(data=data, dimensions=shape, type=declared.type)


def _from_strings(value: Any, text: object) -> Tensor:
    """Return strings as a tensor: `str` in UTF-8, `bytes` as they are.

    :raises InvalidArgument: an element is neither, or cannot be encoded.
    """
    numpy = find_numpy()
    if numpy is not None and hasattr(value, "__array__"):
        array = numpy.asarray(value)
        elements, shape = array.ravel().tolist(), list(array.shape)
    else:
        elements, shape = _flatten(value, text)
    unfit = [one for one in elements if not isinstance(one, str | bytes)]
    if unfit:
        raise InvalidArgument(
            f"the input {text} got the value {unfit[0]!r:.80}",
            hint="send strings, or bytes in UTF-8",
        )
    try:
        data = pack_strings(one.encode() if isinstance(one, str) else one for one in elements)
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"the input {text} got a text with half a surrogate pair", hint="send whole characters"
        ) from None
    return Tensor(data=data, dimensions=shape, type=STRING)


def pack_numbers(numbers: Sequence[Any], kind: str) -> bytes:
    """Return the bytes of numbers of a type; those of other types than floating-point ones are
    integers.

    :raises ValueError: a value of bool is neither 0 nor 1.
    :raises OverflowError: a number is out of range; or `struct.error`.
    """
    if kind == "bool":
        if any(number not in (0, 1) for number in numbers):
            raise ValueError(kind)
        return bytes(map(int, numbers))
    if kind in ("fp16", "fp32"):  # `array` would make numbers that are too large infinite
        return struct.pack(f"<{len(numbers)}{CODES[kind]}", *numbers)
    if kind == "bf16":
        floats = struct.pack(f"<{len(numbers)}f", *numbers)
        return b"".join(map(_bfloat16_bytes, memoryview(floats).cast("I")))
    return array(CODES[kind], numbers).tobytes()


def _bfloat16_bytes(bits: int) -> bytes:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return b"\xc0\x7f"
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def _flatten(value: Any, text: object) -> tuple[list[Any], list[int]]:
    """Return the numbers of a list of lists, and its shape.

    :raises InvalidArgument: its lists are not equally long.
    """
    level, shape = [value], list[int]()
    while level and isinstance(level[0], list | tuple) and len(shape) < DEPTH_MAX:
        sizes = {len(part) if isinstance(part, list | tuple) else -1 for part in level}
        if len(sizes) > 1:
            break
        shape.append(len(level[0]))
        level = [number for part in level for number in part]
    if any(isinstance(number, list | tuple) for number in level):
        raise InvalidArgument(
            f"the input {text} got lists of different lengths",
            hint="send lists that are equally long in each dimension",
        )
    return level, shape


def _from_buffer(value: Any, declared: TensorInfo | None, text: object) -> Tensor:
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(
            f"the input {text} got a {type(value).__name__}", hint=f"pass {_WHAT}"
        ) from None
    kind = _type_of_format(view)
    if kind is None:
        wanted = None if declared is None else declared.type
        raise _wrong_type(text, f"the format {view.format!r}", wanted)
    is_large = view.nbytes > TENSOR_BYTES_MAX and view.c_contiguous
    data = cast(bytes, view.cast("B")) if is_large else view.tobytes()
    found = Tensor(data=data, dimensions=list(view.shape or ()), type=kind)
    return found if declared is None else converted_tensor(found, declared)


def converted_tensor(given: Tensor, declared: TensorInfo) -> Tensor:
    """Return a tensor as one of the declared type, by the rules of `tensor_of`.

    :raises InvalidArgument: values would change.
    """
    kind, wanted = type_name_of(given), declared.type
    if kind == wanted:
        return given
    if kind not in ARRAY_NAMES or wanted not in ARRAY_NAMES:
        raise _wrong_type(str(declared), kind, wanted)
    if wanted not in FLOATS and (kind in FLOATS or wanted == "bool"):
        raise _wrong_type(str(declared), kind, wanted)
    try:
        data = pack_numbers(numbers_of(given), wanted)
    except (OverflowError, struct.error):
        raise _out_of_range(str(declared), wanted) from None
    return Tensor(data=data, dimensions=given.dimensions, type=wanted)


def _type_of_format(view: memoryview) -> str | None:
    """Return the type of a buffer's elements; C's long has 4 or 8 bytes."""
    code = view.format.lstrip("@=<")
    if code in ("l", "L"):
        code = {("l", 8): "q", ("L", 8): "Q", ("l", 4): "i", ("L", 4): "I"}[code, view.itemsize]
    return next((kind for kind, one in CODES.items() if one == code), None)


def _wrong_type(text: object, given: str, wanted: str | None) -> InvalidArgument:
    return InvalidArgument(
        f"the input {text} got an array of {given}",
        hint=f"pass it as {ARRAY_NAMES.get(wanted or '', 'another type')}",
    )


def _out_of_range(text: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(
        f"the input {text} got values that {wanted} does not have", hint="send smaller numbers"
    )


def element_bytes(kind: str) -> int:
    """Return the bytes of an element of a type."""
    return struct.calcsize(CODES[kind]) if kind in CODES else 2


def type_name_of(tensor: Tensor) -> str:
    """Return the name of a tensor's type."""
    if isinstance(tensor.type, str):
        return tensor.type
    return TYPE_NAMES.get(tensor.type, f"type {tensor.type}")


def array_of(tensor: Tensor) -> Any:
    """Return an output as an array of NumPy, or as it is without NumPy. NumPy has no bfloat16; its
    numbers become those of float32, unchanged. Strings become objects of `str`, or all of `bytes`
    if one is not UTF-8.

    :raises ProtocolError: its bytes do not have its shape.
    """
    numpy = find_numpy()
    if numpy is None:
        return tensor
    kind = type_name_of(tensor)
    try:
        if kind == STRING:
            found = numpy.array(_texts_or_bytes(tensor), object)
        elif kind == "bf16":
            found = (numpy.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            found = numpy.frombuffer(tensor.data, dtype_of(kind))
            if not found.flags.writeable:
                found = found.copy()
        return found.reshape(tensor.dimensions)
    except (ValueError, KeyError) as exc:
        raise ProtocolError(f"an output of {kind} cannot be read: {exc}") from None


def strings_of(tensor: Tensor) -> list[bytes]:
    """Return the elements of a tensor of strings.

    :raises ProtocolError: its bytes are not strings.
    """
    try:
        return unpack_strings(tensor.data)
    except ValueError as exc:
        raise ProtocolError(f"an output of strings cannot be read: {exc}") from None


def _texts_or_bytes(tensor: Tensor) -> list[str] | list[bytes]:
    strings = strings_of(tensor)
    try:
        return [one.decode() for one in strings]
    except UnicodeDecodeError:
        return strings


def numbers_of(tensor: Tensor) -> Sequence[Any]:
    """Return the elements of a tensor as numbers of Python, or as texts, in which bytes that are
    not UTF-8 are escaped.

    :raises ProtocolError: its bytes are not those of its type.
    """
    kind, data = type_name_of(tensor), tensor.data
    if kind == STRING:
        return [one.decode(errors="backslashreplace") for one in strings_of(tensor)]
    try:
        if kind == "fp16":
            return struct.unpack(f"<{len(data) // 2}e", data)
        if kind == "bf16":
            bits = array("I", (each << 16 for each in memoryview(data).cast("H")))
            return memoryview(bits.tobytes()).cast("f")
        numbers: Sequence[Any] = memoryview(data).cast(CODES[kind])
        return numbers
    except (ValueError, KeyError, TypeError, struct.error) as exc:
        raise ProtocolError(f"an output of {kind} cannot be read: {exc}") from None
