"""The numbers of wasi-nn, which differ between the runtimes that guests are written for.

Errors 0 to 8 and tensor types are the same in all. witx is the first standard, of Wasmtime.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ...backends.errors import InferdError, InvalidEncoding, PermissionDenied, Timeout
from ...backends.model_encodings import PYTORCH_HINT

Dialect: TypeAlias = Literal["wasmedge", "witx", "wamr"]

_GRAPHS = {0: "openvino", 1: "onnx", 2: "tensorflow", 4: "tensorflowlite"}
_ENCODINGS: dict[Dialect, dict[int, str]] = {
    "wasmedge": _GRAPHS | {5: "autodetect", 6: "ggml"},
    "wamr": _GRAPHS | {5: "ggml", 6: "autodetect"},
    "witx": _GRAPHS | {5: "autodetect"},
}
COMPONENT_ENCODINGS = (*_GRAPHS.values(), "ggml", "autodetect")
_PYTORCH, _PYTORCH_NAME = 3, "pytorch"
_ERRORS: dict[Dialect, dict[int, int]] = {
    "wasmedge": {},
    "wamr": {},
    "witx": {101: 7, 102: 7, 103: 8},  # too_large, not_found
}

_CODES = {
    **{1: "invalid-argument", 2: "invalid-encoding", 6: "unsupported-operation", 8: "not-found"},
    **{7: "too-large", 101: "too-large", 102: "too-large", 103: "not-found"},
}


def encoding_name(dialect: Dialect, number: int) -> str:
    """Return the name of a graph's encoding.

    :raises InvalidEncoding: no model that inferd runs has it.
    """
    served = _ENCODINGS[dialect]
    if number in served:
        return served[number]
    encodings = ", ".join(f"{known} {name}" for known, name in sorted(served.items()))
    raise InvalidEncoding(
        f"the graph encoding {number} is not supported",
        hint=PYTORCH_HINT if number == _PYTORCH else f"the dialect {dialect} has {encodings}",
    )


def check_component_encoding(name: str) -> None:
    """Check the name of a component's encoding.

    :raises InvalidEncoding: no model that inferd runs has it.
    """
    if name not in COMPONENT_ENCODINGS:
        advice = f"use {' or '.join(COMPONENT_ENCODINGS)}"
        raise InvalidEncoding(
            f"the graph encoding {name} is not supported",
            hint=PYTORCH_HINT if name == _PYTORCH_NAME else advice,
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
