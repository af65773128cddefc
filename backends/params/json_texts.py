"""Decoding of JSON texts from clients, with bounds on the work that a text can cause."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import TooLarge

JSON_BYTES_MAX = 1 << 20
JSON_ITEMS_MAX = 50_000
"""Commas and opening brackets of a text, those in strings too; it bounds the number of values."""


def decode_json(text: bytes | str, kind: Any = Any) -> Any:
    """Return the value of a JSON text as *kind*, a type.

    :raises TooLarge: the text has more bytes or values than the bounds.
    :raises ValueError: the text is not the JSON of such a value.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    _limit("bytes", len(data), JSON_BYTES_MAX)
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    _limit("commas and brackets", items, JSON_ITEMS_MAX)
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc).lower()) from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except msgspec.DecodeError as exc:
        raise ValueError(f"it is not valid JSON: {exc}") from None


def _limit(unit: str, count: int, most: int) -> None:
    if count > most:
        raise TooLarge(
            f"a JSON text of {count} {unit}; the limit is {most}",
            hint="send fewer or shorter parameters",
            data={"count": count, "most": most},
        )


def nests_deeper(value: Any, depth_max: int) -> bool:
    """Return whether *value* has containers in more than *depth_max* levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth_max):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
    return bool(level)
