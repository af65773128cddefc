"""`/v1/responses`: the turn of a request and the whole response; the count of a prompt's tokens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .....backends.errors import InferdError, InvalidArgument
from ...callers import Caller
from ...exchange import Exchange, collect_answers, stream_turn
from ...fields import field_error
from ...turns import Answer, TurnRequest, no_previous, schema_options
from ..chat import effort_arguments, priority_of
from ..chat_fields import thinking_arguments
from .fields import (
    INPUT_TOKENS,
    LOGPROBS,
    RESPONSES,
    PromptRequest,
    ResponseRequest,
    TextFormat,
)
from .frame import ResponseFrame
from .items import mark_in, mark_of, read_input, read_tool_choice, read_tools
from .stored import note_of
from .stream import ResponseStream


async def answer_response(exchange: Exchange) -> None:
    """Answer a request, whole or streamed."""
    request, options = exchange.read_fields(RESPONSES)
    try:
        response_id = new_id(request)
        turn = turn_of(request, options, exchange.caller, response_id)
        frame = ResponseFrame(request, response_id, turn)
        failed = False
        try:
            if request.stream:
                form = ResponseStream(frame)
                await stream_turn(exchange, _with_note(request, turn, form.whole), form)
                failed = form.failed
            else:
                turn = _with_note(request, turn, frame.whole)
                [answer] = await collect_answers(exchange, turn)
                await exchange.send_json(frame.whole(answer))
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


def _with_note(
    request: ResponseRequest, turn: TurnRequest, whole: Callable[[Answer], dict[str, Any]]
) -> TurnRequest:
    """Return a turn whose session has the *whole* response as its note, if it is to be stored."""
    if not request.store:
        return turn
    return replace(turn, note=lambda answer: note_of(whole(answer)))


async def count_input_tokens(exchange: Exchange) -> None:
    """Answer with the number of tokens of a prompt, as the model's template writes it.

    :raises InvalidArgument: the request contradicts itself.
    """
    request, _ = exchange.read_fields(INPUT_TOKENS)
    try:
        new_id(request)
        messages, options = _prompt_of(request)
        if request.previous_response_id is not None:
            messages = await _history_of(exchange, request.previous_response_id) + messages
        tokens = await exchange.turns.count_tokens(
            exchange.caller, request.model, messages, options
        )
    except InferdError as exc:
        raise INPUT_TOKENS.name_field(exc) from None
    await exchange.send_json({"object": "response.input_tokens", "input_tokens": tokens})


async def _history_of(exchange: Exchange, previous: str) -> list[dict[str, Any]]:
    found = await exchange.turns.history(exchange.caller, previous)
    if found is None:
        raise no_previous(previous)
    return found.messages


def new_id(request: PromptRequest) -> str:
    """Return the id of a new response. The id has a hash of the instructions, by which a response
    that continues this one is checked to have the same instructions.

    :raises InvalidArgument: the instructions are not those of the previous response.
    """
    previous, mark = request.previous_response_id, mark_of(request.instructions)
    if previous is not None:
        before = mark_in(previous)
        if request.instructions is not None and before != mark:
            raise InvalidArgument(
                "the instructions are not those of previous_response_id, which stay in force",
                hint="leave them out, or send the whole history as input",
                data={"param": "instructions"},
            )
        mark = before
    return f"resp_{mark}{secrets.token_hex(12)}"


def turn_of(
    request: ResponseRequest, options: dict[str, Any], caller: Caller, response_id: str
) -> TurnRequest:
    """Return the turn of a request.

    :raises InvalidArgument: the request contradicts itself.
    :raises UnsupportedOperation: the request has parts, items or tools that are not supported.
    """
    messages, prompt_options = _prompt_of(request)
    overflow = "drop-turns" if request.truncation == "auto" else "error"
    options = {"overflow": overflow, **options, **prompt_options, "reasoning-format": "deepseek"}
    if request.max_output_tokens is not None:
        options["n-predict"] = request.max_output_tokens
    if LOGPROBS in request.include or request.top_logprobs:
        options["n-probs"] = max(1, request.top_logprobs)
    previous = request.previous_response_id
    return TurnRequest(
        model=request.model,
        prompt=messages,
        options=options,
        priority=priority_of(request.priority, request.service_tier, caller),
        session_id=response_id if request.store or previous is not None else None,
        branch_of=previous,
    )


def _prompt_of(request: PromptRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the new messages of a prompt, and its parameters: tools, template and schema.

    :raises InvalidArgument: the request contradicts itself.
    :raises UnsupportedOperation: the request has parts, items or tools that are not supported.
    """
    options: dict[str, Any] = {}
    if request.tools:
        options["tools"] = read_tools(request.tools)
        options["tool-choice"] = read_tool_choice(request.tool_choice)
        options["parallel-tool-calls"] = request.parallel_tool_calls
    options.update(_format_options(request.text.format))
    thinking = thinking_arguments(request.think, request.enable_thinking)
    if arguments := {**effort_arguments(request.reasoning.effort), **thinking}:
        options["chat-template-kwargs"] = arguments
    messages = [] if request.input is None else read_input(request.input)
    if request.instructions and request.previous_response_id is None:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    return messages, options


def _format_options(form: TextFormat) -> dict[str, Any]:
    if form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json-schema": {"type": "object"}}
    if form.schema_ is None:
        raise field_error("text.format.schema", "text.format.schema is missing")
    return schema_options(form.schema_, strict=bool(form.strict))
