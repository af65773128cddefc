"""The endpoints of Anthropic's API, and `/v1/models` in its shape."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..exchange import Endpoint, Exchange, served_ctx_size, usable_models
from .fields import TABLES
from .forms import ERROR_SCHEMA, error_body
from .turns import answer_count_tokens, answer_messages


async def answer_models(exchange: Exchange) -> None:
    """Answer with the models that the caller may use, on one page."""
    shown = [_model(info) for info in await usable_models(exchange)]
    ends = [shown[0]["id"], shown[-1]["id"]] if shown else [None, None]
    page = {"data": shown, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
    await exchange.send_json(page)


async def answer_model(exchange: Exchange) -> None:
    """Answer with one model."""
    name = exchange.caller.check_model(exchange.params["model"])
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await exchange.send_json(_model(await client.show(name)))


def _model(info: Mapping[str, Any]) -> dict[str, Any]:
    name, created = info["name"], datetime.fromtimestamp(int(info.get("modified_at") or 0), UTC)
    ctx_size = served_ctx_size(info)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": ctx_size,
        "max_tokens": ctx_size,
    }


_HEADER = "anthropic-version"
"""Anthropic's clients send it. It decides between the two APIs on paths that OpenAI has, too."""


class AnthropicApi:
    """Anthropic's API."""

    title = "Anthropic"
    prefixes = ("/v1/messages",)
    tables = TABLES
    endpoints = (
        Endpoint(method="POST", path="/v1/messages", answer=answer_messages),
        Endpoint(method="POST", path="/v1/messages/count_tokens", answer=answer_count_tokens),
        Endpoint(method="GET", path="/v1/models", answer=answer_models, header=_HEADER),
        Endpoint(method="GET", path="/v1/models/{model:path}", answer=answer_model, header=_HEADER),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


ANTHROPIC = AnthropicApi()
