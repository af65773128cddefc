"""JSON schemas as llguidance reads them.

All that the grammar of a schema allows is valid for the schema. Where llguidance would allow more,
the schema is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from llguidance import LLMatcher

from ..errors import InvalidArgument
from ..shorten import shorten

__all__ = ("Keyword", "grammar_of_schema", "keywords_of", "read_schema", "schema_refusal")

Schema = dict[str, Any]

LEVELS_MAX = 100
"""Objects and lists within each other; with 130 llguidance takes a second to refuse them."""
_ONE = frozenset(("additionalItems", "additionalProperties", "contains", "else", "if", "items"))
_ONE |= {"not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
_LISTS = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_MAPS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_HINT = "remove or rephrase it; docs/json-schema.md lists what is supported"


class Keyword(msgspec.Struct, frozen=True):
    """A *keyword* of *schema*, which is part of a document; *path* is the keyword's own."""

    schema: Schema
    keyword: str
    path: str


def read_schema(text: str) -> Schema:
    """Return the document of *text*. The empty schema stands for any object, as in llama-server.

    :raises InvalidArgument: it is not a schema, or no grammar of it would be strict enough.
    """
    try:
        document = msgspec.json.decode(text)
        if not isinstance(document, dict | bool):
            raise schema_refusal("#", f"{shorten(document)} is not a schema", "send an object")
        if document is False:
            raise schema_refusal("#", "no value fits it")
        if document is True or not document:
            return {"type": "object"}
        if _levels(document) > LEVELS_MAX:
            raise schema_refusal("#", f"it has more than {LEVELS_MAX} levels", "make it flatter")
        document.pop("x-guidance", None)  # llguidance would read options from it
        keywords = list(keywords_of(document))
        for found in keywords:
            _check_keyword(found)
        for found in keywords:
            if found.keyword == "oneOf":
                _simplify_one_of(found.schema)
    except msgspec.DecodeError as exc:
        raise InvalidArgument(
            f"json-schema: no valid JSON: {exc}", hint='send a schema, such as {"type": "object"}'
        ) from None
    except RecursionError:
        raise schema_refusal("#", "it is too deep", "make it flatter") from None
    return document


def schema_refusal(path: str, cause: str, hint: str = _HINT) -> InvalidArgument:
    """Return the error for a schema that is refused at *path* because of *cause*."""
    return InvalidArgument(f"json-schema: {path}: {cause}", hint=hint, data={"path": path})


def grammar_of_schema(document: Schema, separators: tuple[str, str] | None = (", ", ": ")) -> str:
    """Return llguidance's form of a schema's grammar, which is not compiled yet.

    *separators* stand between items, and after a name. None: any white space.

    :raises ValueError: the document has numbers beyond all doubles, or is nested too deeply.
    """
    item, key = separators or (",", ":")
    return LLMatcher.grammar_from_json_schema(
        document,
        overrides={
            "item_separator": item,
            "key_separator": key,
            "whitespace_flexible": separators is None,
            "coerce_one_of": False,
            "lenient": False,
            # Each text has one form only: with \u a name could repeat another one in disguise.
            "json_allowed_escapes": '"\\bfnrt',
            "json_allow_general_unicode_escapes": False,
        },
    )


def keywords_of(schema: object, path: str = "#") -> Iterator[Keyword]:
    """Yield the keywords of a schema, those of its subschemas before the keyword with them."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        at = f"{path}/{_escaped(keyword)}"
        if keyword in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield from keywords_of(part, f"{at}/{_escaped(name)}")
        elif keyword in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                yield from keywords_of(part, f"{at}/{index}")
        elif keyword in _ONE:
            yield from keywords_of(value, at)
        yield Keyword(schema, keyword, at)


def _levels(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    parts = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_levels, parts), default=0)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check_keyword(found: Keyword) -> None:
    value, required = found.schema[found.keyword], found.schema.get("required")
    if found.keyword != "minProperties" or not isinstance(value, int | float):
        return
    if value > max(1, len(set(map(str, required))) if isinstance(required, list) else 0):
        cause = "more than the required properties: a name that recurs would count twice"
        raise schema_refusal(found.path, cause, "name the properties in `required`")


def _simplify_one_of(schema: Schema) -> None:
    """Write `anyOf` for a `oneOf` of distinct values, which llguidance does not compare."""
    alternatives = schema.get("oneOf")
    if "anyOf" in schema or not isinstance(alternatives, list):
        return
    values = [value for part in alternatives for value in _values_of(part)]
    if len({(isinstance(v, bool), v) for v in values}) == len(values) > 0 and all(
        _values_of(part) for part in alternatives
    ):
        schema["anyOf"] = schema.pop("oneOf")


def _values_of(schema: object) -> list[str | int | float | bool | None]:
    """Return the values that *schema* names, if all are numbers, texts, booleans or null."""
    if not isinstance(schema, dict) or not ("const" in schema or "enum" in schema):
        return []
    values = [schema["const"]] if "const" in schema else schema["enum"]
    simple = isinstance(values, list) and all(
        isinstance(value, str | int | float | None) for value in values
    )
    return values if simple else []
