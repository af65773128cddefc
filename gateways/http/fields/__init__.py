"""The fields of requests, in one table for each path with the effect of each field."""

from __future__ import annotations

from .table import PRIORITY_FIELD, Field, FieldTable, Use, honoured, ignored, parameter, refused

__all__ = (
    "PRIORITY_FIELD",
    "Field",
    "FieldTable",
    "Use",
    "honoured",
    "ignored",
    "parameter",
    "refused",
)
