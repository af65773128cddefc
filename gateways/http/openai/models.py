"""`/v1/models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..exchange import Exchange, served_ctx_size, usable_models


async def answer_models(exchange: Exchange) -> None:
    """Answer with the models that the caller may use."""
    shown = [_model(info) for info in await usable_models(exchange)]
    await exchange.send_json({"object": "list", "data": shown})


async def answer_model(exchange: Exchange) -> None:
    """Answer with one model."""
    name = exchange.caller.check_model(exchange.params["model"])
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await exchange.send_json(_model(await client.show(name)))


def _model(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model with the served context where vLLM (`max_model_len`) and llama-server (`meta`)
    have it.
    """
    file, facts = info.get("file_info") or {}, info.get("info") or {}
    ctx_size = served_ctx_size(info)
    meta = {
        "n_ctx": ctx_size,
        "n_ctx_train": facts.get("ctx_size_trained") or file.get("ctx_size_trained"),
        "n_vocab": facts.get("vocab_size"),
        "n_embd": file.get("embedding_size"),
        "n_params": facts.get("parameters") or file.get("parameters"),
        "size": info.get("size_bytes"),
    }
    return {
        "id": info["name"],
        "object": "model",
        "created": int(info.get("modified_at") or 0),
        "owned_by": "inferd",
        "max_model_len": ctx_size,
        "meta": {name: value for name, value in meta.items() if value},
    }
