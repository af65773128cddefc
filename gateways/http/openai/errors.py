"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from ....backends import errors as e
from ....backends.errors import InferdError

_CODES: tuple[tuple[type[InferdError], str], ...] = (
    (e.ModelNotFound, "model_not_found"),
    (e.PromptTooLong, "context_length_exceeded"),
    (e.ContextFull, "context_length_exceeded"),
    (e.QuotaExceeded, "rate_limit_exceeded"),
    (e.SessionBusy, "session_busy"),
    (e.UnsupportedOperation, "unsupported"),
    (e.PermissionDenied, "permission_denied"),
    (e.NotFound, "not_found"),
    (e.InvalidArgument, "invalid_argument"),
    (e.LoadFailed, "load_failed"),
    (e.OutOfMemory, "out_of_memory"),
    (e.Cancelled, "cancelled"),
    (e.ConnectionLost, "connection_lost"),
    (e.ShuttingDown, "shutting_down"),
    (e.WorkerCrashed, "worker_crashed"),
)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES_BY_STATUS = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    503: "overloaded",
    504: "timeout",
}

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def error_body(error: InferdError, status: int) -> dict[str, Any]:
    """Return the body of an error response, and of an error in a stream."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = next((code for cls, code in _CODES if isinstance(error, cls)), None)
    param = error.data.get("param")
    if isinstance(error, e.ModelNotFound):
        param = "model"
    return {
        "error": {
            "message": error.text_for_people,
            "type": kind,
            "param": param,
            "code": code or _CODES_BY_STATUS.get(status),
        }
    }
