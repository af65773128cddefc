"""Search for the keyword that causes a schema's refusal, which llguidance's errors do not name, and
for the constraints that no grammar keeps, which `schema-lenient` leaves out.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from ...errors import InvalidArgument
from ...params.json_texts import PATH_CHARACTERS_MAX
from .document import Keyword, Schema, keywords_of, schema_refusal
from .rewriting import unkept_keywords

__all__ = (
    "Compiles",
    "DROPPED_MAX",
    "leave_out_constraints",
    "refusal_of",
    "refused_keyword",
    "removable_keywords",
)

Compiles = Callable[[Schema], bool]

_NEVER_REMOVED = ("$defs", "definitions", "$schema", "$id", "$anchor")
"""Removing them would make references fail."""
_OVERLAP = "its alternatives may overlap; anyOf allows that"
_ORDER = {"type": 1, "$ref": 2} | dict.fromkeys(
    ("properties", "patternProperties", "items", "prefixItems", "allOf", "anyOf"), 3
)


def refusal_of(document: Schema, cause: str, compiles: Compiles) -> InvalidArgument:
    """Return the error for *document*, which does not compile because of *cause*."""
    unkept = unkept_keywords(document)
    if unkept:
        cause = _OVERLAP if unkept[0].keyword == "oneOf" else "it is not supported"
        return schema_refusal(unkept[0].path, cause)
    removable = removable_keywords(document)
    index = refused_keyword(document, removable, compiles)
    cause = "it is not supported" if cause.startswith("Unimplemented keys") else cause
    return schema_refusal("#" if index is None else removable[index].path, cause)


def removable_keywords(document: Schema) -> list[Keyword]:
    """Return the keywords in the order in which they are removed."""
    removable = [k for k in keywords_of(document) if k.keyword not in _NEVER_REMOVED]
    return sorted(removable, key=_rank)


def refused_keyword(
    document: Schema, removable: Sequence[Keyword], compiles: Compiles
) -> int | None:
    """Return the index of a keyword that is refused in *document*, which does not compile.

    Keywords are removed in order until the rest compiles: the last one removed is refused. A binary
    search finds it, so that *compiles* is called only a few times. Return None if no removal helps.
    """

    def compiles_without(count: int) -> bool:
        before = [(keyword.schema, dict(keyword.schema)) for keyword in removable[:count]]
        for keyword in removable[:count]:
            del keyword.schema[keyword.keyword]
        try:
            return compiles(document)
        finally:
            for schema, keywords in before:  # in their order, which is that of the answers
                schema.clear()
                schema |= keywords

    count = bisect_left(range(len(removable) + 1), True, key=compiles_without)
    return count - 1 if 0 < count <= len(removable) else None


def _rank(keyword: Keyword) -> int:
    """Return the order of removal: keywords that narrow values of one type are removed first."""
    return _ORDER.get(keyword.keyword, 0)


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
