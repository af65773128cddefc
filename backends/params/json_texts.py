"""Decoding of JSON texts from clients, with bounds on the work that a text can cause."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import TooLarge
from ..texts import shorten

JSON_BYTES_MAX = 1 << 20
JSON_ITEMS_MAX = 50_000
"""Commas and opening brackets of a text, those in strings too; it bounds the number of values."""
CONTAINERS_MAX = 8000
"""Opening brackets of a value's JSON. Counting the value's memory takes up to 3 us for each."""


def check_containers(text: bytes) -> None:
    """Raise ValueError if the JSON of a value has too many maps and arrays."""
    if (count := text.count(b"[") + text.count(b"{")) > CONTAINERS_MAX:
        raise ValueError(f"{count} opening brackets; {CONTAINERS_MAX} at most")


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


__all__ = ("PATH_CHARACTERS_MAX", "SCHEMA_BYTES_MAX", "escaped_name", "read_schema")

SCHEMA_BYTES_MAX = 64 << 10
PATH_CHARACTERS_MAX = 300


def read_schema(value: Any) -> str:
    """Return a schema, which may be its JSON text already, as JSON text.

    :raises TooLarge: the schema has too many bytes or values.
    :raises ValueError: *value* is not a schema, has too many brackets, or contains a NUL.
    """
    if isinstance(value, dict | bool):
        encoded = msgspec.json.encode(value)
        check_containers(encoded)
        value = encoded.decode()
    if not isinstance(value, str):
        raise ValueError(f"{shorten(value)} is not a text")
    text = value.strip()
    schema = decode_json(text) if text else True
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{shorten(value)} is not a schema: send an object, or its JSON text")
    _check_size(schema, len(text.encode()))
    if "\0" in text:
        raise ValueError("it contains a NUL")
    return text


def escaped_name(name: str) -> str:
    """Return *name* as a part of a JSON pointer."""
    if "~" in name or "/" in name:
        return name.replace("~", "~0").replace("/", "~1")
    return name


def _check_size(schema: Any, size: int) -> None:
    if size <= SCHEMA_BYTES_MAX:
        return
    path, text_size = _longest_text(schema)
    cause = f"the schema has {size} bytes"
    if text_size > SCHEMA_BYTES_MAX // 2:
        cause = f"a text of {text_size} bytes; {cause}"
    else:
        path = "#"
    raise TooLarge(
        f"json-schema: {path}: {cause}; at most {SCHEMA_BYTES_MAX} are compiled",
        hint="shorten it",
        data={"path": path, "bytes": size, "bytes_max": SCHEMA_BYTES_MAX},
    )


def _longest_text(schema: Any) -> tuple[str, int]:
    """Return the path of the longest text in *schema*, a value or a name, and its size in bytes."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), schema)]
    longest: tuple[tuple[Any, ...], int] = (), 0
    while waiting:
        place, value = waiting.pop()
        texts: list[str] = [value] if isinstance(value, str) else []
        if isinstance(value, dict):
            texts = list(value)
            waiting += (((place, name), part) for name, part in value.items())
        elif isinstance(value, list):
            waiting += (((place, str(index)), part) for index, part in enumerate(value))
        size = max((len(text.encode("utf-8", "surrogatepass")) for text in texts), default=0)
        if size > longest[1]:
            longest = place, size
    names: list[str] = []
    place = longest[0]
    while place:
        place, name = place
        names.append(f"/{escaped_name(name)}")
    return f"#{''.join(reversed(names))}"[:PATH_CHARACTERS_MAX], longest[1]
