"""The daemon's models, as the lists of all APIs need them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio

from ....backends.errors import InferdError, ModelNotFound
from ....ipc.client import ModelInfo
from ....ipc.model_names import offered_models
from ..callers import Caller
from .exchange import Exchange

_SHOWN_AT_ONCE = 16
"""Models of one list whose headers are requested at the same time."""


async def usable_models(exchange: Exchange, *, loaded: bool = False) -> list[ModelInfo]:
    """Return the models that are offered to the caller, or all *loaded* ones that it may use, each
    with the facts in its file's header.
    """
    caller = exchange.caller
    async with exchange.turns.pool.lease(caller) as client:
        models = await client.models()
        if loaded:
            found = [info for info in models if caller.may_use(info["name"]) and info["info"]]
        else:
            found = offered_to(caller, models, test_models=exchange.test_models)
        limiter = anyio.CapacityLimiter(_SHOWN_AT_ONCE)

        async def show(number: int, name: str) -> None:
            async with limiter:
                with suppress(ModelNotFound):  # the operator has removed it meanwhile
                    found[number] = await client.show(name)

        try:
            async with anyio.create_task_group() as group:
                for number, info in enumerate(found):
                    group.start_soon(show, number, info["name"])
        except* InferdError as errors:
            error = errors.exceptions[0]
            assert isinstance(error, InferdError), "tasks of this group have no groups of their own"
            raise error from None
    return found


def offered_to(caller: Caller, models: list[ModelInfo], *, test_models: bool) -> list[ModelInfo]:
    """Return the models that are offered to a caller, whose key may name test models."""
    usable = [info for info in models if caller.may_use(info["name"])]
    return offered_models(usable, named=caller.models or (), test_models=test_models)


def served_ctx_size(info: Mapping[str, Any]) -> int | None:
    """Return the tokens of a session's context: those of the loaded model or, as far as they are
    known, of its next load.
    """
    known = (info.get("info"), info.get("estimate"))
    sizes = [int((facts or {}).get("ctx_size") or 0) for facts in known]
    sizes.append(int((info.get("options") or {}).get("ctx-size") or 0))
    return next(filter(None, sizes), None)
