"""Documents with all keywords rewritten, and the keywords for which that is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..document import Keyword, Schema, keywords_of
from .container_rules import CONTAINER_RULES
from .exclusive import SchemaComparison
from .logic_rules import LOGIC_RULES
from .place import Place, Rule
from .value_rules import VALUE_RULES

__all__ = ("rewritten_schema", "unkept_keywords")


_UNKEPT = frozenset(("contains", "dependentRequired", "dependentSchemas", "if", "not", "oneOf"))
_UNKEPT |= {"propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
_UNKEPT |= {"$dynamicRef", "$recursiveRef"}
"""Keywords that no grammar has."""


def _remove(keyword: str) -> Rule:
    def remove(place: Place) -> None:
        del place.schema[keyword]

    return remove


_RULES = {
    **VALUE_RULES,
    **CONTAINER_RULES,
    **LOGIC_RULES,
    "deprecated": _remove("deprecated"),
    "contentSchema": _remove("contentSchema"),
}


def rewritten_schema(document: Schema) -> Schema:
    """Return *document* with those keywords rewritten that others can express."""
    return _rewrite(document)[0]


def unkept_keywords(document: Schema) -> list[Keyword]:
    """Return the keywords of *document* that no grammar keeps, and that others cannot express.

    Those within another one of them are left out, except within a `oneOf`.
    """
    _, places = _rewrite(document)
    found = [o for k, o in places if k.keyword in _UNKEPT and k.keyword in k.schema]
    # Without a condition, its branches have no effect.
    conditions = [o.path.removesuffix("if") for o in found if o.keyword == "if"]
    branches = {path + branch for path in conditions for branch in ("then", "else")}
    left_out = branches | {o.path for o in found if o.keyword != "oneOf"}
    return [o for o in found if not any(map(left_out.__contains__, _paths_above(o.path)))]


def _paths_above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _rewrite(document: Schema) -> tuple[Schema, list[tuple[Keyword, Keyword]]]:
    """Return the rewritten document, and its keywords before rewriting with the original ones."""
    comparison, copy = SchemaComparison(document), _copied(document)
    places = list(zip(keywords_of(copy), keywords_of(document), strict=True))
    for found, original in places:
        rule = _RULES.get(found.keyword)
        if rule is not None and found.keyword in found.schema:
            rule(Place(found.schema, original.schema, comparison))
    return copy, places


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
