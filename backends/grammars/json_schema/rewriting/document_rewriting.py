"""Documents with all keywords rewritten, and the keywords for which that is not possible."""

from __future__ import annotations

from collections.abc import Iterator

from ..document import Keyword, Schema, copy_of, keywords_of
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


_NOTED = _UNKEPT.union(_RULES)


def rewritten_schema(document: Schema) -> Schema:
    """Return *document* with those keywords rewritten that others can express, and without texts
    for readers.
    """
    return _rewrite(document)[0]


def unkept_keywords(document: Schema) -> list[Keyword]:
    """Return the keywords of *document* that no grammar keeps, and that others cannot express.

    Keywords within another returned one are left out, unless that is a `oneOf`.
    """
    _, schemas = _rewrite(document)
    noted = (k for k in keywords_of(document) if k.keyword in _NOTED)
    found = [
        original
        for original, schema in zip(noted, schemas, strict=True)
        if original.keyword in _UNKEPT and original.keyword in schema
    ]
    # Without a condition, its branches have no effect.
    conditions = [o.path.removesuffix("if") for o in found if o.keyword == "if"]
    branches = {path + branch for path in conditions for branch in ("then", "else")}
    left_out = branches | {o.path for o in found if o.keyword != "oneOf"}
    return [o for o in found if not any(map(left_out.__contains__, _paths_above(o.path)))]


def _paths_above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _rewrite(document: Schema) -> tuple[Schema, list[Schema]]:
    """Return the rewritten document, and the rewritten schemas with the noted keywords."""
    comparison, notes = SchemaComparison(document), list[tuple[Schema, Schema, str]]()
    copy: Schema = copy_of(document, _NOTED, notes)
    for schema, original, keyword in notes:
        rule = _RULES.get(keyword)
        if rule is not None and keyword in schema:
            rule(Place(schema, original, comparison))
    return copy, [schema for schema, _, _ in notes]
