"""`/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from ....backends.errors import InferdError, UnsupportedOperation
from ....backends.params import without_nulls
from ....ipc.client import Infill
from ..exchange import Exchange, collect_answers, stream_turn
from ..fields import FieldTable, field_error
from ..media import RequestMedia
from ..openai.chat_fields import reasoning_bounds, thinking_arguments
from ..turns import Embedded, TurnRequest, schema_options
from .fields import (
    CHAT,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    OPTIONS,
    ChatFields,
    GenerateFields,
    TurnFields,
)
from .lines import Lines, LineStream, chat_form, generate_form

_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}
_LEVELS = 3
"""A message, its calls and their functions."""


def read_messages(messages: list[dict[str, Any]], media: RequestMedia) -> list[dict[str, Any]]:
    """Return the messages for the daemon, and add their images to *media*.

    :raises InvalidArgument: a message has another form.
    :raises TooLarge: there are too many images.
    """
    messages = without_nulls(messages, _LEVELS)
    return [
        _read_message(f"messages.{number}", each, media) for number, each in enumerate(messages)
    ]


def _read_message(place: str, message: dict[str, Any], media: RequestMedia) -> dict[str, Any]:
    for name, kind in (("role", str), ("content", str), ("tool_calls", list), ("images", list)):
        if not isinstance(message.get(name) or kind(), kind):
            raise field_error(f"{place}.{name}", f"{place}.{name} has the wrong type")
    if not message.get("role"):
        raise field_error(f"{place}.role", f"{place}: the role is missing")
    read: dict[str, Any] = {"content": ""} | {
        _NAMES.get(name, name): value
        for name, value in message.items()
        if name not in ("images", "tool_calls")
    }
    if images := message.get("images"):
        read["content"] = _with_images(f"{place}.images", images, read["content"], media)
    if calls := message.get("tool_calls"):
        place = f"{place}.tool_calls"
        read["tool_calls"] = [_read_call(f"{place}.{n}", call) for n, call in enumerate(calls)]
    return read


def _with_images(
    place: str, images: list[Any], text: str, media: RequestMedia
) -> list[dict[str, Any]]:
    """Return a content with images before its text, as in Ollama."""
    parts = [media.add_image(f"{place}.{number}", image) for number, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _read_call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise field_error(place, f"{place} is not a call of a function with a name")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


REST_OF_CONTEXT = -1
_UNTIL_FULL = -2
"""The `num_predict` with which an answer ends when the context is full, and does not shift."""


async def answer_chat(exchange: Exchange) -> None:
    """Answer a chat, streamed or whole; without messages, load or unload the model."""
    chat, options = exchange.read_fields(CHAT)
    lines = Lines(chat_form, chat)
    if not chat.messages:
        await _load_or_unload(exchange, chat, lines)
        return
    media = RequestMedia()
    messages, chat.messages = read_messages(chat.messages, media), []  # its base64 is freed
    request = _turn_of(exchange, chat, options, messages, media)
    await _answer(exchange, CHAT, request, lines)


async def answer_generate(exchange: Exchange) -> None:
    """Answer a completion, streamed or whole; without a prompt, load or unload the model."""
    generate, options = exchange.read_fields(GENERATE)
    lines = Lines(generate_form, generate)
    if not (generate.prompt or generate.suffix or generate.images):
        await _load_or_unload(exchange, generate, lines)
        return
    media = RequestMedia()
    prompt = _prompt_of(generate, media)
    raw = generate.raw or bool(generate.suffix)
    request = _turn_of(exchange, generate, options, prompt, media, raw=raw)
    await _answer(exchange, GENERATE, request, lines)


def _prompt_of(generate: GenerateFields, media: RequestMedia) -> Any:
    """Return the prompt of a completion: messages, or a text if it is raw.

    :raises UnsupportedOperation: a raw prompt has images.
    """
    images, generate.images = generate.images, []
    if images and (generate.raw or generate.suffix):
        kind = "raw prompt" if generate.raw else "prompt with a suffix"
        raise UnsupportedOperation(
            f"images: a {kind} has no place for them",
            hint="leave out raw and suffix, or images",
            data={"param": "images"},
        )
    if generate.suffix:
        return Infill(prefix=generate.prompt, suffix=generate.suffix)
    if generate.raw:
        return generate.prompt
    content: Any = generate.prompt
    if images:
        content = _with_images("images", images, generate.prompt, media)
    system = [{"role": "system", "content": generate.system}] if generate.system else []
    return [*system, {"role": "user", "content": content}]


async def _answer(
    exchange: Exchange, table: FieldTable[Any], request: TurnRequest, lines: Lines
) -> None:
    try:
        if lines.fields.stream:
            await stream_turn(exchange, request, LineStream(lines))
        else:
            [answer] = await collect_answers(exchange, request)
            await exchange.send_json(lines.whole(answer))
    except InferdError as exc:
        raise table.name_field(OPTIONS.name_field(exc)) from None


def _turn_of(
    exchange: Exchange,
    fields: TurnFields,
    options: dict[str, Any],
    prompt: Any,
    media: RequestMedia,
    *,
    raw: bool = False,
) -> TurnRequest:
    """Return the turn of a request.

    :raises InvalidArgument: an option has the wrong type.
    """
    own, own_options = exchange.read_fields(OPTIONS, fields.options, "options.")
    options = {**options, **own_options, "reasoning-format": "none" if raw else "deepseek"}
    users = isinstance(prompt, list) and sum(each["role"] == "user" for each in prompt)
    several = isinstance(fields, ChatFields) and (users > 1 or fields.session_id is not None)
    overflow = _overflow_options(fields, several_turns=several)
    options = {**overflow, **options}
    if own.num_predict is not None:
        options["n-predict"] = max(REST_OF_CONTEXT, own.num_predict)
        if own.num_predict == _UNTIL_FULL:
            options["ctx-shift"] = False
    if fields.logprobs:
        options["n-probs"] = max(1, fields.top_logprobs)
    if fields.format == "json":
        options["json-schema"] = {"type": "object"}
    elif isinstance(fields.format, dict):
        options |= schema_options(fields.format, strict=False)
    if fields.think is not None:
        options["chat-template-kwargs"] = thinking_arguments(fields.think)
        options |= reasoning_bounds(None, fields.think)
    return TurnRequest(
        model=fields.model,
        prompt=prompt,
        media=media,
        raw=raw,
        options=options,
        priority=exchange.caller.class_of(fields.priority),
        keeps_priority=fields.priority is None,
        session_id=fields.session_id,
    )


def _overflow_options(fields: TurnFields, *, several_turns: bool) -> dict[str, Any]:
    """Return the parameters for a full context. As in Ollama, a chat of several turns loses whole
    ones before the answer, a single message its middle, and any answer may shift.
    """
    longer = "drop-turns" if several_turns else "shift" if fields.shift else "truncate"
    return {"overflow": longer if fields.truncate else "error", "ctx-shift": fields.shift}


async def _load_or_unload(exchange: Exchange, fields: TurnFields, lines: Lines) -> None:
    """Load a model, as Ollama does without a prompt, or unload it with a `keep_alive` of 0.

    :raises PermissionDenied: the caller may not unload models.
    """
    unload = str(fields.keep_alive) in ("0", "0s", "0m", "0.0")
    if unload:
        name = exchange.caller.check_model(fields.model)
        async with exchange.turns.pool.lease(exchange.caller.as_operator()) as client:
            await client.unload_model(name)
    else:
        async with exchange.turns.lease_graph(exchange.caller, fields.model):
            pass  # the model stays loaded by its keep-alive
    await exchange.send_json(lines.empty("unload" if unload else "load"))


async def answer_embed(exchange: Exchange) -> None:
    """Answer with the vectors of one or more texts."""
    embed, _ = exchange.read_fields(EMBED)
    texts = [embed.input] if isinstance(embed.input, str) else embed.input
    found: dict[str, Any] = {"model": embed.model, "embeddings": []}
    if texts:
        began = time.monotonic()
        vectors, load_s = await _embed(exchange, EMBED, embed.model, texts, truncate=embed.truncate)
        found["embeddings"] = _shortened(vectors, embed.dimensions)
        found["total_duration"] = int(1e9 * (time.monotonic() - began))
        found["load_duration"] = int(1e9 * load_s)
        found["prompt_eval_count"] = sum(vectors.tokens)
        if vectors.truncated:
            found["truncated"] = vectors.truncated
    await exchange.send_json(found)


async def answer_embeddings(exchange: Exchange) -> None:
    """Answer with the vector of one text."""
    embed, _ = exchange.read_fields(EMBEDDINGS)
    found = await _embed(exchange, EMBEDDINGS, embed.model, [embed.prompt], truncate=False)
    [vector] = found.vectors
    await exchange.send_json({"embedding": vector})


async def _embed(
    exchange: Exchange, table: FieldTable[Any], model: str, texts: list[str], *, truncate: bool
) -> Embedded:
    caller = exchange.caller
    try:
        return await exchange.turns.embed(
            caller, model, texts, caller.class_of(None), truncate=truncate
        )
    except InferdError as exc:
        raise table.name_field(exc) from None


def _shortened(vectors: list[list[float]], dimensions: int | None) -> list[list[float]]:
    """Return the first *dimensions* numbers of each vector, scaled to length 1.

    :raises InvalidArgument: the vectors have fewer numbers.
    """
    if dimensions is None:
        return vectors
    size = len(vectors[0])
    if dimensions > size:
        raise field_error("dimensions", f"dimensions: {dimensions}; the vectors have {size}")
    found = []
    for vector in vectors:
        part = vector[:dimensions]
        length = math.hypot(*part) or 1.0
        found.append([number / length for number in part])
    return found
