"""The fields of requests, in one table for each path with the effect of each field."""

from __future__ import annotations

from .other_servers import OTHER_SERVERS
from .table import (
    IN_QUERY,
    PRIORITY_FIELD,
    Field,
    FieldTable,
    Use,
    honoured,
    ignored,
    parameter,
    refused,
)

__all__ = (
    "IN_QUERY",
    "OTHER_SERVERS",
    "PRIORITY_FIELD",
    "Field",
    "FieldTable",
    "Use",
    "honoured",
    "ignored",
    "parameter",
    "refused",
)
