"""`/v1/responses`: the turn of a request, and the whole response."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from .....backends.errors import InferdError, InvalidArgument
from ...callers.caller import Caller
from ...exchange import Exchange, stream_turn
from ...exchange.statuses import HttpRefusal
from ...fields.table import field_error
from ...turns import TurnRequest
from ..chat import effort_arguments, priority_of, schema_options
from ..chat_fields import thinking_arguments
from .fields import LOGPROBS, RESPONSE_ID, RESPONSES, ResponseRequest, TextFormat
from .frame import ResponseFrame
from .items import read_input, read_tool_choice, read_tools
from .stream import ResponseStream

_ID_START = "resp_"
_HASH_CHARACTERS = 16


async def answer_response(exchange: Exchange) -> None:
    """Answer a request, whole or streamed."""
    request, options = exchange.read_fields(RESPONSES)
    try:
        response_id = new_id(request)
        turn = turn_of(request, options, exchange.caller, response_id)
        frame = ResponseFrame(request, response_id, turn)
        try:
            if request.stream:
                form = ResponseStream(frame)
                await stream_turn(exchange, turn, form)
                failed = form.failed
            else:
                [answer] = await exchange.turns.collect(exchange.caller, turn)
                await exchange.send_json(frame.whole(answer))
                failed = False
        except InferdError:
            await _forget(exchange, turn)
            raise
        if failed or not request.store:
            await _forget(exchange, turn)
    except InferdError as exc:
        raise RESPONSES.name_field(exc) from None


async def _forget(exchange: Exchange, turn: TurnRequest) -> None:
    """Delete the session of a response that nobody can continue."""
    if turn.session_id is not None:
        await exchange.turns.delete_session(exchange.caller, turn.session_id)


async def delete_response(exchange: Exchange) -> None:
    """Delete a stored response; responses that continue it stay."""
    response_id = exchange.params["response"]
    known = re.fullmatch(RESPONSE_ID, response_id) is not None
    if not known or not await exchange.turns.delete_session(exchange.caller, response_id):
        raise HttpRefusal(404, f"there is no response {response_id[:100]!r}", param="response_id")
    await exchange.send_json({"id": response_id, "object": "response", "deleted": True})


def new_id(request: ResponseRequest) -> str:
    """Return the id of a new response. The id has a hash of the instructions, by which a response
    that continues this one is checked to have the same instructions.

    :raises InvalidArgument: the instructions are not those of the previous response.
    """
    previous = request.previous_response_id
    digest = hashlib.sha256((request.instructions or "").encode(errors="replace")).hexdigest()
    mark = digest[:_HASH_CHARACTERS]
    if previous is not None:
        before = previous.removeprefix(_ID_START)[:_HASH_CHARACTERS]
        if request.instructions is not None and before != mark:
            raise InvalidArgument(
                "the instructions are not those of previous_response_id, which stay in force",
                hint="leave them out, or send the whole history as input",
                data={"param": "instructions"},
            )
        mark = before
    return f"{_ID_START}{mark}{secrets.token_hex(12)}"


def turn_of(
    request: ResponseRequest, options: dict[str, Any], caller: Caller, response_id: str
) -> TurnRequest:
    """Return the turn of a request.

    :raises InvalidArgument: the request contradicts itself.
    :raises UnsupportedOperation: the request has parts, items or tools that are not supported.
    """
    options = {**options, "reasoning-format": "deepseek"}
    if request.max_output_tokens is not None:
        options["n-predict"] = request.max_output_tokens
    if request.tools:
        options["tools"] = read_tools(request.tools)
        options["tool-choice"] = read_tool_choice(request.tool_choice)
        options["parallel-tool-calls"] = request.parallel_tool_calls
    if LOGPROBS in request.include or request.top_logprobs:
        options["n-probs"] = max(1, request.top_logprobs)
    options.update(_format_options(request.text.format))
    thinking = thinking_arguments(request.think, request.enable_thinking)
    if arguments := {**effort_arguments(request.reasoning.effort), **thinking}:
        options["chat-template-kwargs"] = arguments
    messages = read_input(request.input)
    previous = request.previous_response_id
    if request.instructions is not None and previous is None:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    return TurnRequest(
        model=request.model,
        prompt=messages,
        options=options,
        priority=priority_of(request.priority, request.service_tier, caller),
        session_id=response_id if request.store or previous is not None else None,
        branch_of=previous,
    )


def _format_options(form: TextFormat) -> dict[str, Any]:
    if form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json-schema": {"type": "object"}}
    if form.schema_ is None:
        raise field_error("text.format.schema", "text.format.schema is missing")
    return schema_options(form.schema_, strict=bool(form.strict))
