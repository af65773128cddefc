"""Schemas without the constraints that no grammar keeps (`schema-lenient`)."""

from __future__ import annotations

import time

from .refused_keyword import Compiles, refused_keyword, removable_keywords
from .rewriting import unkept_keywords
from .schema import Keyword, Schema, schema_refusal

__all__ = ("DROPPED_MAX", "leave_out_constraints")

DROPPED_MAX = 100
SEARCH_S_MAX = 1.0
"""CPU time after which no further keyword is searched for; the process may take twice as much."""
PATH_CHARACTERS_MAX = 300
_HINT = "remove some of them"


def leave_out_constraints(document: Schema, compiles: Compiles) -> list[str]:
    """Remove keywords from *document* until it compiles; return their paths.

    A `oneOf` becomes `anyOf`.

    :raises InvalidArgument: more would have to be removed than `DROPPED_MAX`, or than are found in
        `SEARCH_S_MAX`; or no removal helps.
    """
    dropped: list[str] = []

    def leave_out(found: Keyword) -> None:
        if len(dropped) == DROPPED_MAX:
            raise schema_refusal(
                found.path, f"{DROPPED_MAX} other constraints cannot be kept either", _HINT
            )
        dropped.append(found.path[:PATH_CHARACTERS_MAX])
        _remove(found)

    for found in unkept_keywords(document):
        leave_out(found)
    started = time.process_time()
    while not compiles(document):
        if time.process_time() - started > SEARCH_S_MAX:
            raise schema_refusal("#", "too many constraints cannot be kept", _HINT)
        removable = removable_keywords(document)
        index = refused_keyword(document, removable, compiles)
        if index is None:
            raise schema_refusal("#", "it cannot be compiled without its constraints either")
        leave_out(removable[index])
    return dropped


def _remove(found: Keyword) -> None:
    value = found.schema.pop(found.keyword)
    if found.keyword == "oneOf" and isinstance(value, list) and value:
        parts = found.schema.get("allOf")
        kept = parts if isinstance(parts, list) else []
        found.schema["allOf"] = [*kept, {"anyOf": value}]
