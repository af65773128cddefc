"""Checks of the form and size of JSON schemas in parameters; a worker checks their keywords."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import TooLarge
from ..texts.shorten import shorten
from .chat_options import check_containers
from .json_texts import decode_json

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
