"""Errors in Ollama's shape."""

from __future__ import annotations

from typing import Any

from ....backends.errors import InferdError

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}


def error_body(error: InferdError, status: int) -> dict[str, Any]:
    """Return the body of an error response, and of an error in a stream."""
    return {"error": error.text_for_people}
