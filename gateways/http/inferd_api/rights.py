"""The caller and its rights, so that a program can hide all else from its user."""

from __future__ import annotations

from typing import Any

from ..callers.caller import Caller
from ..callers.quotas import STREAMS_MAX
from ..exchange import Exchange


async def answer_caller(exchange: Exchange) -> None:
    """Answer with the caller and its rights."""
    await exchange.send_json(caller_object(exchange.caller))


def caller_object(caller: Caller) -> dict[str, Any]:
    """Return a caller in the form of the API."""
    return {
        "object": "caller",
        "name": caller.name,
        "rights": ["use", "manage"] if caller.operator else ["use"],
        "priority_max": caller.priority_max,
        "models": None if caller.models is None else sorted(caller.models),
        "limits": {
            "requests_max": caller.requests_max or None,
            "tokens_per_minute": caller.tokens_per_minute or None,
            "streams_max": STREAMS_MAX,
        },
    }
