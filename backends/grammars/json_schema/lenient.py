"""Schemas without the constraints that no grammar keeps (`schema-lenient`)."""

from __future__ import annotations

import time

from ...params.schema_texts import PATH_CHARACTERS_MAX
from .document import Keyword, Schema, schema_refusal
from .refused_keyword import Compiles, refused_keyword, removable_keywords
from .rewriting import unkept_keywords

__all__ = ("DROPPED_MAX", "leave_out_constraints")

DROPPED_MAX = 100
SEARCH_S_MAX = 0.5
"""CPU time after which no further keyword is searched for. A search in the largest schemas takes up
to a second on slow machines, and the process may take two.
"""
_HINT = "remove some of them"


def leave_out_constraints(document: Schema, compiles: Compiles) -> list[str]:
    """Remove keywords from *document* until it compiles; return their paths.

    A `oneOf` becomes `anyOf`.

    :raises InvalidArgument: more than `DROPPED_MAX` keywords would have to be removed, or more than
        are found in `SEARCH_S_MAX`; or no removal helps.
    """
    dropped: list[str] = []
    moved: list[tuple[str, str]] = []

    def leave_out(found: Keyword) -> None:
        path = found.path
        for new, old in reversed(moved):
            path = old + path.removeprefix(new) if path.startswith(f"{new}/") else path
        if len(dropped) == DROPPED_MAX:
            raise schema_refusal(
                path, f"{DROPPED_MAX} other constraints cannot be kept either", _HINT
            )
        dropped.append(path[:PATH_CHARACTERS_MAX])
        place = _remove(found)
        if place:
            moved.append((place, path))

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


def _remove(found: Keyword) -> str:
    """Remove a keyword; return the new path of its alternatives, if it has any."""
    schema, value = found.schema, found.schema.pop(found.keyword)
    if found.keyword != "oneOf" or not isinstance(value, list) or not value:
        return ""
    parts = schema.get("allOf")
    schema["allOf"] = [*(parts if isinstance(parts, list) else ()), {"anyOf": value}]
    return f"{found.path.removesuffix('oneOf')}allOf/{len(schema['allOf']) - 1}/anyOf"
