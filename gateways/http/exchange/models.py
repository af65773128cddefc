"""The daemon's models, as the lists of all APIs need them."""

from __future__ import annotations

from contextlib import suppress

import anyio

from ....backends.errors import InferdError, ModelNotFound
from ....ipc.client import ModelInfo
from .exchange import Exchange

_SHOWN_AT_ONCE = 16
"""Models of one list whose headers are requested at the same time."""


async def usable_models(exchange: Exchange, *, loaded: bool = False) -> list[ModelInfo]:
    """Return the models that the caller may use, or only the *loaded* ones, each with the facts in
    its file's header.
    """
    async with exchange.turns.pool.lease(exchange.caller) as client:
        found = [
            info
            for info in await client.models()
            if exchange.caller.may_use(info["name"]) and (info["info"] or not loaded)
        ]
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


def served_ctx_size(info: ModelInfo) -> int | None:
    """Return the tokens of a session's context: those of the loaded model or, as far as they are
    known, of its next load.
    """
    known = (info.get("info"), info.get("estimate"))
    sizes = [int((facts or {}).get("ctx_size") or 0) for facts in known]
    sizes.append(int((info.get("options") or {}).get("ctx-size") or 0))
    return next(filter(None, sizes), None)
