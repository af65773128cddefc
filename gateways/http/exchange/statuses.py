"""The HTTP status of each error, and the seconds after which to retry."""

from __future__ import annotations

import math
from typing import Any, Protocol

from ....backends import errors as e
from ....backends.errors import InferdError, Outcome


class ErrorShape(Protocol):
    """The shape of an API's errors."""

    def error_body(self, error: InferdError, status: int) -> Any:
        """Return the JSON of an error response."""


class HttpRefusal(InferdError, outcome=Outcome.REFUSED):
    """A request that HTTP itself refuses: no key, another origin, no such path."""

    name = "Refused"
    status = 400

    def __init__(
        self, status: int, message: str, *, hint: str = "", param: str = "", allow: str = ""
    ):
        super().__init__(message, hint=hint, data={"param": param} if param else None)
        self.status, self.allow = status, allow


_STATUSES: tuple[tuple[type[InferdError], int], ...] = (
    (e.ProtocolError, 500),
    (e.PromptTooLong, 400),
    (e.ContextFull, 400),
    (e.InvalidArgument, 400),
    (e.InvalidEncoding, 400),
    (e.VersionMismatch, 502),
    (e.UnsupportedOperation, 400),
    (e.TooLarge, 413),
    (e.ModelNotFound, 404),
    (e.NotFound, 404),
    (e.SessionExpired, 404),
    (e.PermissionDenied, 403),
    (e.QuotaExceeded, 429),
    (e.SessionBusy, 409),
    (e.Busy, 503),
    (e.WorkerCrashed, 503),
    (e.ConnectionLost, 503),
    (e.OutOfMemory, 503),
    (e.Cancelled, 503),
)


def status_of(error: InferdError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, HttpRefusal):
        return error.status
    if isinstance(error, e.Timeout):
        return 503 if error.data.get("timeout") == "queue" else 504
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def retry_after_s(error: InferdError, status: int) -> int | None:
    """Return the seconds of the header Retry-After, or None without one."""
    if isinstance(error, e.Busy):
        return max(1, math.ceil(error.retry_after_s))
    return 1 if status in (429, 503) else None
