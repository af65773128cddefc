"""The vectors, which are part of the protocol page."""

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
