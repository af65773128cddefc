"""Rules for constants, formats, and the names of drafts."""

from __future__ import annotations

import re
from typing import Any

from .place import Place, Rule, add_schema, allows_type

__all__ = ("FORMATS", "VALUE_RULES")


_KEPT_FORMATS = (
    *("date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "hostname", "email"),
    "uri",
)
_REFUSED_FORMATS = ("idn-hostname", "uri-template", "regex")
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=@-]"
_FORMAT_PATTERNS = {
    "json-pointer": r"^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "uri-reference": (
        rf"^(https?://[A-Za-z0-9.-]+(:[0-9]{{1,5}})?(/({_PATH}|:)*)*|/|/?{_PATH}+(/({_PATH}|:)*)*)?"
        rf"(\?({_PATH}|[:/?])*)?(#({_PATH}|[:/?])*)?$"
    ),
}
_FORMAT_PATTERNS["iri-reference"] = _FORMAT_PATTERNS["uri-reference"]
_NARROWER_FORMATS = {"iri": "uri", "idn-email": "email"}
FORMATS = dict.fromkeys((*_KEPT_FORMATS, *_FORMAT_PATTERNS, *_NARROWER_FORMATS), True)
FORMATS |= dict.fromkeys(_REFUSED_FORMATS, False)
"""The formats that the standard defines, and whether they are kept; others are annotations."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_OLD_DRAFT = re.compile(r"draft-0([467])")
_NEW_DRAFT = re.compile(r"draft/(2019-09|2020-12)")
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that answers do not have; llguidance would leave them out of a text."""


def _format(place: Place) -> None:
    schema = place.schema
    name = schema["format"]
    if not isinstance(name, str):
        return
    if name not in FORMATS or not allows_type(schema, "string"):
        del schema["format"]
    elif name in _NARROWER_FORMATS:
        schema["format"] = _NARROWER_FORMATS[name]
    elif name in _FORMAT_PATTERNS:
        del schema["format"]
        add_schema(schema, {"pattern": _FORMAT_PATTERNS[name]})


def _count(keyword: str) -> Rule:
    def rewrite(place: Place) -> None:
        """Write a whole number without a fraction; llguidance refuses 2.0."""
        value = place.schema[keyword]
        if isinstance(value, float) and value.is_integer():
            place.schema[keyword] = int(value)

    return rewrite


def _schema_name(place: Place) -> None:
    """Write the name of the draft as llguidance knows it; other dialects are read as the last."""
    old = _OLD_DRAFT.search(str(place.schema["$schema"]))
    new = _NEW_DRAFT.search(str(place.schema["$schema"]))
    if old is not None:
        place.schema["$schema"] = f"http://json-schema.org/draft-0{old[1]}/schema#"
    elif new is not None:
        place.schema["$schema"] = f"https://json-schema.org/draft/{new[1]}/schema"
    else:
        del place.schema["$schema"]


def _const(place: Place) -> None:
    if not _can_be_written(place.schema["const"]):
        del place.schema["const"]
        add_schema(place.schema, {"enum": []})


def _enum(place: Place) -> None:
    values = place.schema["enum"]
    if isinstance(values, list):
        place.schema["enum"] = [value for value in values if _can_be_written(value)]


def _can_be_written(value: Any) -> bool:
    """Return whether the texts in *value* have only characters that need no escape with `u`."""
    if isinstance(value, str):
        return _UNWRITTEN.search(value) is None
    items = value.values() if isinstance(value, dict) else value
    return all(map(_can_be_written, items)) if isinstance(value, dict | list) else True


VALUE_RULES: dict[str, Rule] = {
    "$schema": _schema_name,
    "const": _const,
    "enum": _enum,
    "format": _format,
    **{keyword: _count(keyword) for keyword in _COUNTS},
}
