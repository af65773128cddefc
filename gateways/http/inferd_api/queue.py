"""`/v1/inferd/queue`: the caller's waiting and running turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..callers.caller import Caller
from ..exchange import Exchange
from .ownership import is_own

_SHOWN = (
    *("session_id", "model", "state", "priority", "effective_priority", "position", "starts_in_s"),
    *("prompt_tokens", "computed_tokens", "output_tokens", "age_s"),
)


async def answer_queue(exchange: Exchange) -> None:
    """Answer with the caller's own turns in the daemon, model by model in their order."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        tasks = await client.queue()
    await exchange.send_json(queue_of(exchange.caller, tasks))


def queue_of(caller: Caller, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the caller's own turns among those that the daemon lists for its user."""
    own = [task for task in tasks if is_own(caller, task) and caller.may_use(task["model"])]
    return {"object": "list", "data": [_turn(task) for task in own]}


def _turn(task: Mapping[str, Any]) -> dict[str, Any]:
    return {"object": "queue.turn", **{name: task.get(name) for name in _SHOWN}}
