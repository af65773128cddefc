"""`/v1/queue`, an extension: the caller's waiting and running turns."""

from __future__ import annotations

from typing import Any

from ..exchange import Exchange

_SHOWN = (
    *("model", "state", "priority", "effective_priority", "position", "starts_in_s"),
    *("prompt_tokens", "computed_tokens", "output_tokens", "age_s"),
)


async def answer_queue(exchange: Exchange) -> None:
    """Answer with the turns of the caller's user in the daemon, model by model in their order."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        tasks = await client.queue()
    data = [_turn(task) for task in tasks if exchange.caller.may_use(task["model"])]
    await exchange.send_json({"object": "list", "data": data})


def _turn(task: dict[str, Any]) -> dict[str, Any]:
    return {"object": "queue.turn", **{name: task.get(name) for name in _SHOWN}}
