"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from ....ipc.client import ModelInfo
from ..exchange import Exchange


async def answer_models(exchange: Exchange) -> None:
    """Answer with the models that the caller may use."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        models = await client.models()
    shown = [_model(info) for info in models if exchange.caller.may_use(info["name"])]
    await exchange.send_json({"object": "list", "data": shown})


async def answer_model(exchange: Exchange) -> None:
    """Answer with one model."""
    name = exchange.params["model"]
    exchange.caller.check_model(name)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await exchange.send_json(_model(await client.show(name)))


def _model(info: ModelInfo) -> dict[str, Any]:
    created = int(info.get("modified_at") or 0)
    return {"id": info["name"], "object": "model", "created": created, "owned_by": "inferd"}
