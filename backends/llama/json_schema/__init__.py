"""From a JSON schema to the grammar (GBNF) of what fits it.

Whatever the grammar allows fits the schema; not all that fits is allowed: properties come in the
order of the schema, others only where `additionalProperties` says so, numbers have 15 digits, texts
of a format are of its usual forms. What cannot be kept so is refused by its name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import InvalidArgument
from .formats import FORMATS
from .rules import refusal
from .writing import Writer

__all__ = ("FORMATS", "SCHEMA_BYTES_MAX", "gbnf_of")

SCHEMA_BYTES_MAX = 64 << 10


def gbnf_of(schema: str) -> str:
    """Return the grammar of the JSON values that fit *schema*, a JSON text; the empty one, ``{}``,
    stands for any object, as in llama-server.

    :raises InvalidArgument: it is no schema, or says what a grammar cannot: with the path in it.
    """
    if len(schema.encode()) > SCHEMA_BYTES_MAX:
        raise refusal("#", f"it has more than {SCHEMA_BYTES_MAX} bytes", "shorten it")
    try:
        return _written(_decoded(schema))
    except RecursionError:
        raise refusal("#", "it is too deep", "make it flatter") from None


def _decoded(text: str) -> Any:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as exc:
        raise InvalidArgument(
            f"json-schema: no valid JSON: {exc}", hint='send a schema, such as {"type": "object"}'
        ) from None
    if not isinstance(document, dict | bool):
        raise refusal("#", f"a JSON {type(document).__name__} is no schema", "send an object")
    return document


def _written(document: Any) -> str:
    writer = Writer(document)
    root = writer.rule({"type": "object"} if document in ({}, True) else document, "#")
    if root is None:
        raise refusal(
            "#", "nothing fits it", "look for what contradicts itself: types, bounds, const"
        )
    writer.check_ends()
    return writer.rules.text(root)
