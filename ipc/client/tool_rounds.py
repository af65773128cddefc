"""The rounds of a chat with functions: an answer with calls, then a turn with their results."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ...backends.errors import InvalidArgument, Timeout
from ..payloads import Prompt
from .connection.driver import Driver
from .functions import Functions, read_answer, schema_of
from .texts import Reply, ToolCall
from .turn_settings import TurnKeywords

ROUNDS_MAX = 8
"""The default of `tool_rounds_max`."""
_CHOICE = ("tool-choice", "tool_choice")
_LIMITS = ("length", "context_full", "time")
"""Stop reasons of answers that a limit has cut."""


ChatTurn: TypeAlias = Callable[[Prompt | None, Any], Awaitable[Reply]]
"""A function that computes one turn of a chat: it returns the reply to a prompt."""


class ToolRounds(NamedTuple):
    """The bounds of rounds. The timeout is for all turns; it does not end a function that runs."""

    driver: Driver
    rounds_max: int
    timeout_s: float


async def compute_chat(
    turn: ChatTurn,
    prompt: Prompt | None,
    keywords: TurnKeywords,
    schema: type | None,
    rounds: ToolRounds,
) -> Any:
    """Return the reply to *prompt*, or with *schema* an instance of it; see `run_rounds`.

    :raises InvalidAnswer: the answer does not fit *schema*.
    """
    if schema is None:
        return await run_rounds(turn, prompt, keywords, rounds)
    if keywords.get("tools"):
        raise InvalidArgument(
            "schema and tools exclude each other in one turn",
            hint="chat with the tools first, and then with the schema",
        )
    reply = await turn(prompt, {**keywords, "json_schema": schema_of(schema)})
    return read_answer(reply, schema)


async def run_rounds(
    turn: ChatTurn, prompt: Prompt | None, keywords: TurnKeywords, rounds: ToolRounds
) -> Reply:
    """Return the reply to *prompt* after all calls of functions in `tools` of *keywords*.

    Each round sends the results of all calls in an answer. After `rounds_max` rounds the model must
    answer in text. If a limit has cut an answer within a call, no function is called.

    :raises Timeout: it has passed between two turns.
    """
    if rounds.rounds_max < 0:
        raise InvalidArgument(f"tool_rounds_max is {rounds.rounds_max}", hint="use 0 or more")
    tools = keywords.get("tools", ())
    functions = Functions(() if isinstance(tools, str) else tools)
    if not functions:
        return await turn(prompt, keywords)
    functions.check_driver(rounds.driver)
    deadline = time.monotonic() + rounds.timeout_s
    given: dict[str, Any] = {**keywords, "tools": functions.definitions}
    reply = await turn(prompt, {**given, "timeout": rounds.timeout_s})
    for number in range(1, rounds.rounds_max + 1):
        if not reply.tool_calls or not functions.answer_all(reply.tool_calls):
            break
        if reply.metadata.get("stop_reason") in _LIMITS and not _is_whole(reply.tool_calls[-1]):
            break
        results = [await _result(functions, call, rounds.driver) for call in reply.tool_calls]
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise Timeout(
                f"chat took longer than its timeout, with {number} rounds of calls",
                data={"timeout": "total"},
            )
        given = with_next_choice(given, last=number == rounds.rounds_max)
        reply = await turn(results, {**given, "timeout": remaining_s})
    return reply


def _is_whole(call: ToolCall) -> bool:
    try:
        msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return False
    return True


async def _result(functions: Functions, call: ToolCall, driver: Driver) -> dict[str, Any]:
    text = await functions.answer(call, driver)
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def with_next_choice(keywords: dict[str, Any], *, last: bool) -> dict[str, Any]:
    """Return the keywords of the turn after a round. A call that was required has been made; in the
    *last* turn, none is possible.
    """
    options = dict(keywords.get("options") or {})
    given = [options.pop(name) for name in _CHOICE if name in options]
    given += [keywords["tool_choice"]] if "tool_choice" in keywords else []
    if last:
        choice: Any = "none"
    elif given and forces(given[-1]):
        choice = "auto"
    else:
        return keywords
    return {**keywords, "options": options, "tool_choice": choice}


def forces(choice: str | Mapping[str, Any]) -> bool:
    """Return whether a `tool-choice` makes the model call a function."""
    if isinstance(choice, str):
        return choice not in ("auto", "none")
    return (choice.get("allowed_tools") or {}).get("mode") != "auto"
