"""`/v1/inferd/statistics`: the tokens and turns of each model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..callers.caller import Caller
from ..exchange import Exchange

_COUNTERS = {
    "generated_tokens": "generated",
    "computed_tokens": "prompt",
    "cached_tokens": "cached",
}
"""The daemon's name of each counter."""
_TURNS = ("running", "waiting", "parked")

Engines = Mapping[str, Mapping[str, Any]]
"""The counters of each loaded model, by its name."""


async def answer_statistics(exchange: Exchange) -> None:
    """Answer with the statistics of the models that the caller may use."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        stats = await client.stats()
    await exchange.send_json(statistics_of(exchange.caller, stats["models"]))


def statistics_of(
    caller: Caller, engines: Engines, before: Engines | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    """Return the statistics, with rates over the *seconds* since those of *before*."""
    data = [
        _statistics(name, engine, (before or {}).get(name), seconds)
        for name, engine in engines.items()
        if caller.may_use(name)
    ]
    return {"object": "statistics", "time": round(time.time(), 3), "data": data}


def _statistics(
    name: str, engine: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    shown: dict[str, Any] = {"model": name}
    for field, counter in _COUNTERS.items():
        shown[field] = engine[counter]
        rate = None
        # A model that was loaded again counts from 0.
        if before is not None and seconds > 0 and engine[counter] >= before[counter]:
            rate = round((engine[counter] - before[counter]) / seconds, 1)
        shown[field.replace("_tokens", "_per_second")] = rate
    return shown | {turns: engine[turns] for turns in _TURNS}
