"""Grammars of JSON schemas in llguidance's form.

All that the grammar of a schema allows is valid for the schema. Where llguidance would allow more,
the schema is refused here.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher

from .document import Keyword, Schema, keywords_of
from .rewriting import rewritten_schema

__all__ = ("grammar_of_schema",)

WHITESPACE_MAX = 64
"""Characters between two symbols where white space is free; a model may repeat it without end."""
_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{WHITESPACE_MAX}}}"
_CLASSES = re.compile(r"\[(\^|[^\]]*-)[^\]]*\]")
"""Classes of many characters in a pattern: they have others, too."""
_UNWRITTEN = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(x0[0-7bBeEfF]|x1|x7[fF]|u00(0[0-7bBeEfF]|1|7[fF])|c[A-Z]|0|v)"
)
"""Characters that answers do not have; llguidance would leave them out of a pattern."""


def grammar_of_schema(document: Schema, whitespace: str = "spaced") -> str:
    """Return llguidance's form of a schema's grammar, which is not compiled yet.

    *whitespace* is the value of `json-whitespace`.

    :raises ValueError: a keyword cannot be kept, or has a number beyond all doubles; or the
        document is nested too deeply.
    """
    document = rewritten_schema(document)
    for found in keywords_of(document):
        _check_keyword(found)
    spaced = whitespace == "spaced"
    return LLMatcher.grammar_from_json_schema(
        document,
        overrides={
            "item_separator": ", " if spaced else ",",
            "key_separator": ": " if spaced else ":",
            "whitespace_flexible": whitespace == "any",
            "whitespace_pattern": _WHITESPACE if whitespace == "any" else None,
            "coerce_one_of": False,
            "lenient": False,
            # Each text has one form only: with \u a name could repeat another one in disguise.
            "json_allowed_escapes": '"\\bfnrt',
            "json_allow_general_unicode_escapes": False,
        },
    )


def _check_keyword(found: Keyword) -> None:
    value, required = found.schema[found.keyword], found.schema.get("required")
    if found.keyword == "oneOf":
        raise ValueError("its alternatives may overlap")
    patterns = value if found.keyword == "patternProperties" else [value]
    if found.keyword in ("pattern", "patternProperties") and isinstance(patterns, dict | list):
        for pattern in patterns:
            if _UNWRITTEN.search(_CLASSES.sub("", str(pattern))):
                raise ValueError("it has a control character, which answers do not have")
    if found.keyword != "minProperties" or not isinstance(value, int | float):
        return
    if value > max(1, len(set(map(str, required))) if isinstance(required, list) else 0):
        raise ValueError("more than the required properties: a name that recurs would count twice")
