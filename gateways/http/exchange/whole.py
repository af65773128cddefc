"""Whole answers of several turns."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from ....backends.errors import InferdError
from ..turns import Answer, TurnRequest
from .exchange import Exchange


async def collect_answers(exchange: Exchange, request: TurnRequest) -> list[Answer]:
    """Return the whole answers of a turn, and note parameters that were not applied as requested.

    :raises InferdError: the turn failed.
    """
    answers = await exchange.turns.collect(exchange.caller, request)
    for answer in answers:
        exchange.adjusted |= answer.adjusted.get("adjusted", {})
    return answers


async def collect_turns(exchange: Exchange, requests: Sequence[TurnRequest]) -> list[list[Answer]]:
    """Return the answers of turns that run at the same time.

    :raises InferdError: a turn failed; the first failure ends the other turns.
    """
    found: list[list[Answer]] = [[] for _ in requests]
    errors: list[InferdError] = []

    async def collect(number: int, request: TurnRequest) -> None:
        try:
            found[number] = await collect_answers(exchange, request)
        except InferdError as exc:
            errors.append(exc)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for number, request in enumerate(requests):
            group.start_soon(collect, number, request)
    if errors:
        raise errors[0]
    return found
