"""The numbers of wasi-nn, which differ between the runtimes that guests are written for.

Errors 0 to 8 and tensor types are the same in all. witx is the first standard, of Wasmtime.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ...backends.errors import InferdError, InvalidEncoding, PermissionDenied, Timeout

Dialect: TypeAlias = Literal["wasmedge", "witx", "wamr"]

_ENCODINGS: dict[Dialect, frozenset[int]] = {
    "wasmedge": frozenset((5, 6)),  # autodetect, ggml
    "wamr": frozenset((5, 6)),  # ggml, autodetect
    "witx": frozenset((5,)),  # autodetect
}
_ERRORS: dict[Dialect, dict[int, int]] = {
    "wasmedge": {},
    "wamr": {},
    "witx": {101: 7, 102: 7, 103: 8},  # too_large, not_found
}

_CODES = {
    **{1: "invalid-argument", 2: "invalid-encoding", 6: "unsupported-operation", 8: "not-found"},
    **{7: "too-large", 101: "too-large", 102: "too-large", 103: "not-found"},
}


def check_encoding(dialect: Dialect, number: int) -> None:
    """Check the number of a graph's encoding.

    :raises InvalidEncoding: the number does not stand for GGUF models.
    """
    if number not in _ENCODINGS[dialect]:
        numbers = " or ".join(map(str, sorted(_ENCODINGS[dialect])))
        raise InvalidEncoding(
            f"the graph encoding {number} is not supported",
            hint=f"GGUF models have the encoding {numbers} in the dialect {dialect}",
        )


def error_number(dialect: Dialect, error: InferdError) -> int:
    """Return the number that a guest gets for *error*."""
    return _ERRORS[dialect].get(error.wasi_number, error.wasi_number)


def component_text(error: InferdError) -> str:
    """Return an error for a component, as a JSON object with its name, message, hint and data."""
    return msgspec.json.encode(error.to_wire()).decode()


def component_code(error: InferdError) -> str:
    """Return the name of an error for a component, in `wasi:nn`."""
    if isinstance(error, Timeout):
        return "timeout"
    if isinstance(error, PermissionDenied):
        return "security"
    return _CODES.get(error.wasi_number, "runtime-error")
