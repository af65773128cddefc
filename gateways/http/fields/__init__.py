"""The fields of requests: one table for each path says whether each is honoured."""

from __future__ import annotations

from .table import Field, FieldTable, Use, honoured, ignored, parameter, refused

__all__ = ("Field", "FieldTable", "Use", "honoured", "ignored", "parameter", "refused")
