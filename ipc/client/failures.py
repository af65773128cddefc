"""Failures of requests: retries of those refused for now, and turns that lost their connection."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator

from ...backends.errors import Busy, ConnectionLost, InferdError, ShuttingDown, error_from_wire
from .connection.core import InFlight
from .connection.driver import Driver

RETRY_S_MAX = 30.0
RETRY_PAUSE_S = 0.05
RETRY_PAUSE_S_MAX = 1.0
"""The first and the longest pause between two attempts to connect or attach again."""
PROGRESS_HINT = (
    "`data` has the tokens and the text that were read; a session with an id continues after them"
    " by resume(tokens, text), or by itself if it is opened with resume=True"
)


def is_loss(error: InferdError) -> bool:
    """Return whether *error* means that a turn lost its connection or daemon."""
    return isinstance(error, ConnectionLost | ShuttingDown) or is_node_loss(error)


def is_node_loss(error: InferdError) -> bool:
    """Return whether *error* means that a fleet lost a node, while the connection was kept."""
    return bool(error.data.get("cause") == "node")


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


async def retrying(
    attempt: Callable[[], Awaitable[InFlight]], retries: int, driver: Driver
) -> InFlight:
    """Return the request of the first *attempt* that is not refused, or of the last attempt.

    While retries remain, it returns only after the request's first event or its end, because
    nothing is retried after the first token.
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
        await driver.sleep(delay_s)


def retry_pauses() -> Iterator[float]:
    """Yield endlessly the pauses between attempts to connect again."""
    pause_s = RETRY_PAUSE_S
    while True:
        yield pause_s * random.uniform(1.0, 1.25)  # many clients retry at the same time
        pause_s = min(2 * pause_s, RETRY_PAUSE_S_MAX)
