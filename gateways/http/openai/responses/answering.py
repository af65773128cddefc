"""`/v1/responses`: the turn of a request and the whole response; the count of a prompt's tokens;
and stored responses, which are read, listed with their input, and deleted.

A stored response is a session of its caller in the daemon. The session's note is the response as it
was sent, so that it survives a restart, and is deleted with the session.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec

from .....backends.errors import InferdError, InvalidArgument, UnsupportedOperation
from .....ipc.client import AsyncClient, HistoryResult
from ...callers import Caller
from ...exchange import Exchange, collect_answers, stream_turn
from ...exchange.exchange import JSON, HttpRefusal
from ...fields import field_error
from ...long_strings import LongBody
from ...media import RequestMedia, in_base64, rest_of_content
from ...turns import Answer, TurnRequest, no_previous, schema_options
from ..chat import effort_arguments, priority_of
from ..chat_fields import reasoning_bounds, thinking_arguments
from ..forms import list_page
from .background import (
    check_background,
    find_job,
    line_of,
    read_request,
    read_response,
    stream_events,
    submit_response,
)
from .fields import (
    IMAGE_URLS,
    INPUT_ITEMS,
    INPUT_TOKENS,
    LOGPROBS,
    RESPONSE_ID,
    RESPONSES,
    RETRIEVE,
    PromptRequest,
    ResponseRequest,
    TextFormat,
)
from .frame import ResponseFrame, ResponseStream
from .items import (
    image_parts,
    input_items,
    mark_in,
    mark_of,
    read_input,
    read_tool_choice,
    read_tools,
)


def note_of(response: dict[str, Any]) -> bytes:
    """Return a response as it is stored: without logprobs, which are many times longer than it."""
    return msgspec.json.encode({**response, "output": [_bare(item) for item in response["output"]]})


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


async def answer_stored(exchange: Exchange) -> None:
    """Answer with a stored response, or with one in the background or its events."""
    query = RETRIEVE.read_query(exchange.query)
    response_id = _id_of(exchange)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        job = await find_job(client, response_id)
        if job is not None:
            begun = _begun(exchange, response_id, await read_request(client, job))
            if query.stream:
                after = -1 if query.starting_after is None else query.starting_after
                await stream_events(exchange, client, job, begun, after)
            else:
                await exchange.send_json(await read_response(client, job, begun))
            return
    found = await _find(exchange)
    if query.stream or query.starting_after is not None:
        raise UnsupportedOperation(
            "only a response in the background can be streamed again",
            hint="create it with `background: true`",
            data={"param": "stream" if query.stream else "starting_after"},
        )
    if not found.note:
        raise HttpRefusal(
            404,
            f"the response {response_id!r} is not stored whole: it has not ended, was interrupted,"
            " or is too long",
            hint="previous_response_id continues it once it has ended",
            param="response_id",
        )
    await exchange.send_whole(found.note)


def _begun(exchange: Exchange, response_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response in the background to a request's body before its answer."""
    request, options = exchange.read_fields(RESPONSES, body)
    turn = turn_of(request, options, exchange.caller, response_id)
    return ResponseFrame(request, response_id, turn).begun()


async def answer_input_items(exchange: Exchange) -> None:
    """Answer with the items of a stored response's input, those of earlier responses included."""
    query = INPUT_ITEMS.read_query(exchange.query)
    found = await _find(exchange)
    response_id = exchange.params["response"]
    items = _items_of(response_id, found)
    ordered = items if query.order == "asc" else items[::-1]
    page = list_page(ordered, query.after, query.limit, "item")
    if IMAGE_URLS in query.include and (images := [*image_parts(page["data"])]):
        async with exchange.turns.pool.lease(exchange.caller) as client:
            parts = _with_image_urls(client, response_id, page, images)
            await exchange.send_parts(parts, JSON, [])
    else:
        await exchange.send_json(page)


async def _with_image_urls(
    client: AsyncClient, response_id: str, page: dict[str, Any], images: list[dict[str, Any]]
) -> AsyncIterator[bytes]:
    """Yield a page in parts; its *images* have their data, which are read for each part."""
    mark = secrets.token_hex(16)
    for image in images:
        image["image_url"] = mark
    begin, *rest = msgspec.json.encode(page).split(mark.encode())
    yield begin
    for image, text in zip(images, rest, strict=True):
        first = await client.session_media(image["sha256"], session_id=response_id, offset=0)
        yield b"data:%s;base64," % first.media_type.encode()
        contents = rest_of_content(client, response_id, image["sha256"], first)
        async for part in in_base64(contents):
            yield part
        yield text


def _items_of(response_id: str, found: HistoryResult) -> list[dict[str, Any]]:
    """Return the items before the response's own output, without its instructions."""
    first = int(mark_in(response_id) != mark_of(None))
    return input_items(response_id, found.messages[first:-1])


async def delete_response(exchange: Exchange) -> None:
    """Delete a stored response; responses that continue it stay."""
    response_id = _id_of(exchange)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        had_job = await client.jobs.delete(response_id)
    if not (await exchange.turns.delete_session(exchange.caller, response_id) or had_job):
        raise no_response(response_id)
    await exchange.send_json({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(exchange: Exchange) -> None:
    """Cancel a response in the background; one that has ended stays as it is.

    :raises UnsupportedOperation: the response is not in the background.
    """
    response_id = _id_of(exchange)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        job = await find_job(client, response_id)
        if job is not None:
            begun = _begun(exchange, response_id, await read_request(client, job))
            ended = await client.jobs.cancel(response_id)
            await exchange.send_json(await read_response(client, ended, begun))
            return
    await _find(exchange)
    raise UnsupportedOperation(
        "only a response in the background can be cancelled",
        hint="disconnect to end a response that is being streamed",
        data={"param": "response_id"},
    )


async def compact(exchange: Exchange) -> None:
    """Refuse to compact a history.

    :raises UnsupportedOperation: always.
    """
    raise UnsupportedOperation(
        f"{exchange.path}: histories are not compacted",
        hint="send a shorter history, or continue a response with previous_response_id",
    )


async def _find(exchange: Exchange) -> HistoryResult:
    response_id = _id_of(exchange)
    found = await exchange.turns.history(exchange.caller, response_id)
    if found is None:
        raise no_response(response_id)
    return found


def _id_of(exchange: Exchange) -> str:
    """Return the id in a path; ids of another form name no response."""
    response_id = exchange.params["response"]
    if re.fullmatch(RESPONSE_ID, response_id) is None:
        raise no_response(response_id)
    return response_id


def no_response(response_id: str) -> HttpRefusal:
    """Return the error for an id with which the caller has no response."""
    return HttpRefusal(
        404,
        f"there is no response {response_id[:100]!r}",
        hint="it was deleted, was created with `store: false`, or belongs to another caller",
        param="response_id",
    )


async def answer_response(exchange: Exchange) -> None:
    """Answer a request, whole or streamed."""
    body = exchange.body
    request, options = exchange.read_fields(RESPONSES)
    try:
        given_id = exchange.link.response_id
        response_id = given_id or new_id(request)
        turn = turn_of(request, options, exchange.caller, response_id)
        frame = ResponseFrame(request, response_id, turn)
        if given_id:
            await _forget(exchange, turn)  # an attempt that was killed may have left its session
        elif request.background:
            await _answer_in_background(exchange, request, frame.begun(), body)
            return
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


async def _answer_in_background(
    exchange: Exchange, request: ResponseRequest, begun: dict[str, Any], body: bytes | LongBody
) -> None:
    """Submit a response, and answer with it or with its events."""
    check_background(exchange, request)
    response_id = begun["id"]
    line = await exchange.run_in_thread(line_of, body, response_id)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        job = await submit_response(client, exchange.caller, request, response_id, line)
        del line
        if request.stream:
            await stream_events(exchange, client, job, begun, -1)
        else:
            await exchange.send_json({**begun, "status": "queued"})


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
        media = RequestMedia()
        messages, options = _prompt_of(request, media)
        await media.decode(exchange.run_in_thread)
        if request.previous_response_id is not None:
            messages = await _history_of(exchange, request.previous_response_id) + messages
        try:
            rendered = await exchange.turns.render_prompt(
                exchange.caller, request.model, messages, options
            )
        except InferdError as exc:
            raise media.name_item(exc, messages) from None
    except InferdError as exc:
        raise INPUT_TOKENS.name_field(exc) from None
    await exchange.send_json({"object": "response.input_tokens", "input_tokens": rendered.tokens})


async def _history_of(exchange: Exchange, previous: str) -> list[dict[str, Any]]:
    found = await exchange.turns.history(exchange.caller, previous)
    if found is None:
        raise no_previous(previous)
    await exchange.turns.fill_media(exchange.caller, previous, found.messages, exchange.take_memory)
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
    media = RequestMedia()
    messages, prompt_options = _prompt_of(request, media)
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
        media=media,
        options=options,
        priority=priority_of(request.priority, request.service_tier, caller),
        session_id=response_id if request.store or previous is not None else None,
        branch_of=previous,
    )


def _prompt_of(
    request: PromptRequest, media: RequestMedia
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the new messages of a prompt, and its parameters: tools, template and schema. Images
    and sounds are added to *media*.

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
    options.update(reasoning_bounds(request.reasoning.effort, request.think))
    if arguments := {**effort_arguments(request.reasoning.effort), **thinking}:
        options["chat-template-kwargs"] = arguments
    messages = [] if request.input is None else read_input(request.input, media)
    if media:
        request.input = ""  # its base64 is freed
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
