"""Files of arrays in NumPy's formats, `.npy` and `.npz`, which are read and written without it."""

from __future__ import annotations

import ast
import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...backends.errors import InvalidArgument, TooLarge
from ...backends.library import install_command
from ...backends.tensors import STRING, STRINGS_MAX, pack_strings, too_many_strings
from ...ipc.client import Tensor
from ...ipc.client.arrays import ARRAY_NAMES, find_numpy, numbers_of, pack_numbers, type_name_of

_MAGIC = b"\x93NUMPY"
ARRAY_BYTES_MAX = 1 << 30
"""The most bytes of an array, which are those that a user's buffers may have."""
_HEADER_BYTES_MAX = 64 << 10
_TYPES = {
    "f2": "fp16", "f4": "fp32", "f8": "fp64", "b1": "bool", "u1": "u8", "i1": "i8", "u2": "u16",
    "i2": "i16", "u4": "u32", "i4": "i32", "u8": "u64", "i8": "i64",
}  # fmt: skip
"""The names of types by those in files, without the order of bytes."""
_DESCRIPTIONS = {kind: name for name, kind in _TYPES.items()}
_TEXT = re.compile(r"([<>|=])([US])(\d{1,9})")
"""The type of texts in files: `U` of as many characters, each of 4 bytes, or `S` of bytes."""
_TEXT_BYTES_MAX = 256 << 20
"""The most bytes of a file of strings, all of which have the length of the longest one there."""
_NAME_CHARACTERS_MAX = 100


def read_array(path: Path) -> Any:
    """Return the array in a `.npy` file: a tensor, or an array of NumPy if its elements have
    Fortran's order.

    :raises InvalidArgument: the file cannot be read, or has something else.
    :raises TooLarge: it has more bytes than an array may have.
    """
    try:
        with path.open("rb") as file:
            data = file.read(ARRAY_BYTES_MAX + _HEADER_BYTES_MAX + 1)
    except OSError as exc:
        raise InvalidArgument(
            f"{path} cannot be read: {exc.strerror}", hint="check the path and its permissions"
        ) from None
    if len(data) > ARRAY_BYTES_MAX + _HEADER_BYTES_MAX:
        raise TooLarge(f"{path} has more than {ARRAY_BYTES_MAX} bytes", hint="send a smaller array")
    try:
        return _parse(path, data)
    except (ValueError, LookupError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise InvalidArgument(
            f"{path} is not a .npy file", hint="write it with NumPy's save"
        ) from None


def _parse(path: Path, data: bytes) -> Any:
    if not data.startswith(_MAGIC):
        raise ValueError("no mark")
    wide = data[6] > 1
    start = 12 if wide else 10
    try:
        [size] = struct.unpack_from("<I" if wide else "<H", data, 8)
    except struct.error:
        raise ValueError("no header") from None
    if size > _HEADER_BYTES_MAX:
        raise ValueError("a long header")
    header = ast.literal_eval(data[start : start + size].decode("latin-1"))
    description, shape = header["descr"], header["shape"]
    text = _TEXT.fullmatch(description) if isinstance(description, str) else None
    if not isinstance(description, str) or (text is None and description[1:] not in _TYPES):
        raise InvalidArgument(
            f"{path} has elements of {description!r:.100}",
            hint="save numbers, truth values or texts",
        )
    order, width = description[0], int(description[2:])
    if text is not None and text[2] == "U":
        width *= 4
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError("no shape")
    elements = data[start + size :]
    if math.prod(shape) * width != len(elements):
        raise InvalidArgument(
            f"{path} has {len(elements)} bytes of elements instead of {math.prod(shape) * width}",
            hint="the file is damaged: write it again",
        )
    if header["fortran_order"] and len(shape) > 1:
        return _in_other_order(path, data)
    if text is not None:
        count = math.prod(shape)
        if count > STRINGS_MAX:  # texts may have no characters, and take no bytes
            raise too_many_strings()
        strings = [elements[n * width : (n + 1) * width] for n in range(count)]
        return Tensor(
            data=pack_strings(_trimmed(one, text) for one in strings),
            dimensions=list(shape),
            type=STRING,
        )
    if order == ">":
        elements = _swapped(elements, width)
    return Tensor(data=elements, dimensions=list(shape), type=_TYPES[description[1:]])


def _trimmed(data: bytes, text: re.Match[str]) -> bytes:
    """Return an element of a file of texts, which is filled up with zeros, in UTF-8."""
    if text[2] == "S":
        return data.rstrip(b"\0")
    return data.decode("utf-32-be" if text[1] == ">" else "utf-32-le").rstrip("\0").encode()


def _in_other_order(path: Path, data: bytes) -> Any:
    numpy = find_numpy()
    if numpy is None:
        raise InvalidArgument(
            f"the elements of {path} have Fortran's order, which needs NumPy",
            hint=f"{install_command('onnx')}, or save it in C's order",
        )
    return numpy.load(io.BytesIO(data), allow_pickle=False)


def _swapped(data: bytes, width: int) -> bytes:
    """Return elements of *width* bytes, each with the opposite order of bytes."""
    found = bytearray(len(data))
    for number in range(width):
        found[number::width] = data[width - 1 - number :: width]
    return bytes(found)


def array_file(tensor: Tensor) -> bytes:
    """Return the content of a `.npy` file. bfloat16 becomes float32, unchanged."""
    kind, data = type_name_of(tensor), tensor.data
    if kind == "bf16":
        kind, data = "fp32", pack_numbers(numbers_of(tensor), "fp32")
    shape = tuple(tensor.dimensions)
    mark = "|" if kind in ("u8", "i8", "bool") else "<"
    if kind == STRING:
        description, data = _texts(tensor)
    else:
        description = f"{mark}{_DESCRIPTIONS[kind]}"
    header = f"{{'descr': {description!r}, 'fortran_order': False, 'shape': {shape}, }}"
    # The elements begin at a multiple of 64 bytes.
    header = header.ljust(-(10 + len(header) + 1) % 64 + len(header)) + "\n"
    version = b"\1\0" + struct.pack("<H", len(header))
    return _MAGIC + version + header.encode("latin-1") + data


def _texts(tensor: Tensor) -> tuple[str, bytes]:
    """Return the type and the elements of a file of strings.

    :raises TooLarge: it would have too many bytes.
    """
    strings = numbers_of(tensor)
    width = max((len(one) for one in strings), default=0) or 1
    if 4 * width * len(strings) > _TEXT_BYTES_MAX:
        raise TooLarge(
            f"a file of {len(strings)} strings of up to {width} characters would have more than"
            f" {_TEXT_BYTES_MAX} bytes",
            hint="print them with --json",
        )
    return f"<U{width}", b"".join(one.ljust(width, "\0").encode("utf-32-le") for one in strings)


def file_names(names: Sequence[str]) -> list[str]:
    """Return names for files, without other characters than those of file names, each once."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:_NAME_CHARACTERS_MAX]
        plain = one = plain or "output"
        number = 2
        while one in found:
            one, number = f"{plain}-{number}", number + 1
        found.append(one)
    return found


def write_arrays(target: Path, arrays: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Write arrays into a folder, a file each, or into one file if *target* ends in `.npz`. Return
    the place of each.

    :raises InvalidArgument: that is not possible.
    """
    names = file_names([name for name, _ in arrays])
    contents = zip(names, (array_file(tensor) for _, tensor in arrays), strict=True)
    try:
        if target.suffix == ".npz":
            with zipfile.ZipFile(target, "w") as archive:
                for name, content in contents:
                    archive.writestr(f"{name}.npy", content)
            return [f"{target}:{name}" for name in names]
        os.makedirs(target, exist_ok=True)
        files = [target / f"{name}.npy" for name in names]
        for file, (_, content) in zip(files, contents, strict=True):
            file.write_bytes(content)
    except OSError as exc:
        raise InvalidArgument(
            f"{target} cannot be written: {exc.strerror}", hint="name a folder, or a file .npz"
        ) from None
    return list(map(str, files))


assert set(_DESCRIPTIONS) | {"bf16"} == set(ARRAY_NAMES)
