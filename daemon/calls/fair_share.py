"""The call by which the daemons of a fleet share fairly among users."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import anyio

from ...backends.errors import InferdError
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ..core import Daemon
from ..workers.worker import Worker

ANSWER_TIMEOUT_S = 1.0
CALLER = ""
"""The name of the caller's own user."""


async def exchange_served(daemon: Daemon, request: Request) -> w.ExchangeServedResult:
    """Count the tokens that other daemons have computed for users of the calling gateway, and
    return those computed here, without models whose workers do not answer within a second.

    Nothing is stored for the connection: a caller that disconnects leaves only tokens whose weight
    fades.
    """
    p: w.ExchangeServedParams = request.params
    gateway = request.connection.peer.uid
    numbers = daemon.connections.access.delegated_users.numbers_by_name(gateway)
    numbers[CALLER] = gateway
    names = {number: name for name, number in numbers.items()}
    served: dict[str, dict[str, int]] = {}

    async def exchange(name: str, worker: Worker, elsewhere: Mapping[int, int]) -> None:
        # A worker that has just died has computed nothing.
        with anyio.move_on_after(ANSWER_TIMEOUT_S), contextlib.suppress(InferdError):
            totals = await worker.client.exchange_served(elsewhere)
            served[name] = {names[user]: n for user, n in totals.items() if user in names}

    async with anyio.create_task_group() as group:
        for model in daemon.registry.catalog.known():
            worker = model.loaded
            if worker is not None and model.uid is None:
                tokens = p.elsewhere.get(model.name, {})
                known = {numbers[user]: n for user, n in tokens.items() if user in numbers}
                group.start_soon(exchange, model.name, worker, known)
    return w.ExchangeServedResult(served=served)
