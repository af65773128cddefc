"""A schema to rewrite, and changes that several rules make."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..document import Schema
from .exclusive import SchemaComparison

__all__ = ("Place", "Rule", "add_schema", "allows_type", "is_true")


class Place(NamedTuple):
    """A *schema* to rewrite, its *original* form, and the comparison of the original schemas.

    The schemas within it were rewritten before, and may allow fewer values than their originals.
    """

    schema: Schema
    original: Schema
    comparison: SchemaComparison


Rule = Callable[[Place], None]
"""Rewrites a keyword of the schema in a place."""


def add_schema(schema: Schema, other: Schema) -> None:
    """Let *schema* also require what *other* does."""
    if any(keyword in schema for keyword in other):
        parts = schema.get("allOf")
        schema["allOf"] = [*(parts if isinstance(parts, list) else ()), other]
    else:
        schema |= other


def allows_type(schema: Schema, kind: str) -> bool:
    """Return whether values of the type *kind* may fit *schema*, by its `type`."""
    named = schema.get("type", kind)
    return kind in (named if isinstance(named, list) else [named])


def is_true(schema: object) -> bool:
    """Return whether all values fit *schema*."""
    return schema is True or schema == {}
