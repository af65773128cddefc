"""Retries of requests that the daemon refuses for now."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import anyio

from ...backends.errors import Busy, InferdError, ShuttingDown
from .connection.inflight import InFlightT

RETRY_S_MAX = 30.0


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
            if not request.answered:
                request.connection.abandon_request(request)
            raise
        delay_s = None
        if request.error is not None and not request.begun:
            delay_s = retry_delay_s(request.error, request.remaining_s)
        if delay_s is None:
            return request
        await anyio.sleep(delay_s)
