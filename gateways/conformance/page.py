"""The protocol page as data: vectors, and names and numbers of errors, tensor types and limits."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec

_ROOT = __package__.partition(".")[0]

VECTORS: dict[str, Any] = msgspec.json.decode(
    (files(_ROOT) / "docs" / "protocol-vectors.json").read_bytes()
)


def binary(value: Any) -> Any:
    """Return a value of the vectors as it is sent; `{"$bin": HEX}` stands for bytes."""
    if isinstance(value, dict):
        if set(value) == {"$bin"}:
            return bytes.fromhex(value["$bin"])
        return {key: binary(item) for key, item in value.items()}
    return [binary(item) for item in value] if isinstance(value, list) else value


ERROR_NUMBERS = {
    "InvalidArgument": 1,
    "InvalidEncoding": 2,
    "MissingMemory": 3,
    "Busy": 4,
    "RuntimeError": 5,
    "UnsupportedOperation": 6,
    "TooLarge": 7,
    "NotFound": 8,
    "EndOfSequence": 100,
    "ContextFull": 101,
    "PromptTooLong": 102,
    "ModelNotFound": 103,
    "Timeout": 200,
    "Cancelled": 201,
    "SessionBusy": 202,
    "SessionExpired": 203,
    "ReaderTimeout": 204,
    "WorkerCrashed": 205,
    "LoadFailed": 206,
    "PermissionDenied": 207,
    "ShuttingDown": 208,
    "ProtocolError": 209,
    "VersionMismatch": 210,
    "ConnectionLost": 211,
    "KvFull": 212,
    "QuotaExceeded": 213,
    "InvalidAnswer": 214,
    "Unknown": 299,
}
"""The number of each error, by the error's name."""

RETRY_LATER = ("Busy", "SessionBusy", "ShuttingDown", "QuotaExceeded")
"""Errors whose `data` has `retry_after_s`, or that may be retried after a second."""

TENSOR_TYPES = {"fp16": 0, "fp32": 1, "fp64": 2, "u8": 3, "i32": 4, "i64": 5, "bf16": 6}

ENCODINGS_REFUSED = {
    **{"openvino": 0, "onnx": 1, "tensorflow": 2, "pytorch": 3, "tensorflowlite": 4},
    **{"neuralspeed": 7, "burn": 8, "whisper": 9, "mlx": 10, "piper": 11, "chattts": 12},
    **{"openvinogenai": 13, "bitnet": 14},
}

LIMITS = {
    "MESSAGE_ITEMS_MAX": 16,
    "ITEMS_MAX": 32_000,
    "KEYS_MAX": 256,
    "INPUTS_MAX": 128,
    "EMBED_TEXTS_MAX": 256,
    "RERANK_DOCUMENTS_MAX": 256,
    "DETOKENIZE_TOKENS_MAX": 65_536,
    "TRACEPARENT_CHARACTERS_MAX": 128,
    "BRANCHES_MAX": 16,
    "ANSWERS_MAX": 16,
    "MESSAGES_MAX": 1000,
    "TOOL_CALLS_MAX": 128,
    "MEDIA_PARTS_MAX": 64,
    "ALT_CHARACTERS_MAX": 1000,
    "TIMEOUT_S_MAX": 2_592_000,
    "NAME_BYTES_MAX": 4095,
    "SESSION_ID_CHARACTERS_MAX": 128,
    "LABEL_CHARACTERS_MAX": 64,
    "NAME_CHARACTERS_MAX": 128,
    "DESCRIPTORS_MAX": 16,
    "GRAPHS_MAX": 1000,
}
"""The limits of the page that the cases test, by the page's names."""
