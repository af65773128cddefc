"""Rewriting of keywords that llguidance refuses by others that it keeps.

A value that fits the rewritten schema fits the schema, too.
"""

from .document_rewriting import rewritten_schema, unkept_keywords
from .shared_parts import share_parts
from .value_rules import FORMATS

__all__ = ("FORMATS", "rewritten_schema", "share_parts", "unkept_keywords")
