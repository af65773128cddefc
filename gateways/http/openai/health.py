"""`/health`, as llama-server has it."""

from __future__ import annotations

from ..exchange import Exchange


async def answer_health(exchange: Exchange) -> None:
    """Answer that the daemon can be used.

    :raises ConnectionLost: the daemon does not answer.
    """
    await exchange.turns.health.check()
    await exchange.send_json({"status": "ok"})
