"""Failures of requests: retries of those refused for now, and turns that lost their connection."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import anyio

from ...backends.errors import Busy, ConnectionLost, InferdError, ShuttingDown, error_from_wire
from .connection.inflight import InFlightT

RETRY_S_MAX = 30.0
PROGRESS_HINT = (
    "`data` has the tokens and the text that were read; a session with an id continues after them"
    " by resume(tokens, text), or by itself if it is opened with resume=True"
)


def is_loss(error: InferdError) -> bool:
    """Return whether *error* means that a turn lost its connection or daemon."""
    return isinstance(error, ConnectionLost | ShuttingDown)


def with_progress(error: InferdError, tokens: list[int], text: str) -> InferdError:
    """Return *error* with the tokens and the text that were read."""
    fields = error.to_wire()
    fields["message"] = f"{error.message}; {len(tokens)} tokens of the answer were read"
    fields["hint"] = f"{error.hint}; {PROGRESS_HINT}"
    fields["data"] = {**error.data, "tokens": list(tokens), "text": text}
    return error_from_wire(fields)


def retry_delay_s(error: InferdError, remaining_s: float) -> float | None:
    """Return the delay before a retry after *error*, or None for no retry."""
    if not error.retryable or isinstance(error, ShuttingDown):
        return None  # a daemon that shuts down accepts nothing more on this connection
    daemon_delay_s = error.retry_after_s if isinstance(error, Busy) else 0.0
    # The jitter only adds: the daemon has estimated when a retry can succeed.
    delay_s = min(daemon_delay_s, RETRY_S_MAX) * random.uniform(1.0, 1.25)
    return delay_s if delay_s < remaining_s else None


async def retrying(attempt: Callable[[], Awaitable[InFlightT]], retries: int) -> InFlightT:
    """Return the request of the first *attempt* that is not refused, or of the last attempt.

    While retries remain, it returns only after the request's first event or its end: after the
    first token nothing is retried.
    """
    while True:
        request = await attempt()
        if retries <= 0:
            return request
        retries -= 1
        try:
            await request.wait_begun()
        except BaseException:
            request.connection.abandon_request(request)
            raise
        delay_s = None
        if request.error is not None and not request.begun:
            delay_s = retry_delay_s(request.error, request.remaining_s)
        if delay_s is None:
            return request
        await anyio.sleep(delay_s)
