"""The endpoints of Anthropic's API: `/v1/messages`, the count of its tokens, and `/v1/models` in
its shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ....backends.errors import InferdError
from ..exchange import (
    Endpoint,
    Exchange,
    collect_answers,
    served_ctx_size,
    stream_turn,
    usable_models,
)
from ..fields import field_error
from ..media import RequestMedia
from ..openai.chat_fields import reasoning_bounds, thinking_arguments
from ..turns import TurnRequest, schema_options
from .fields import (
    COUNT_TOKENS,
    MESSAGES,
    TABLES,
    JsonFormat,
    PromptFields,
    ToolChoice,
    read_prompt,
    read_tools,
)
from .forms import ERROR_SCHEMA, MessageStream, error_body, whole_message

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def answer_messages(exchange: Exchange) -> None:
    """Answer with a message, whole or streamed."""
    fields, options = exchange.read_fields(MESSAGES)
    try:
        media = RequestMedia()
        prompt = read_prompt(fields, media)
        request = TurnRequest(
            model=fields.model,
            prompt=prompt,
            media=media,
            options={
                **options,
                **_options_of(fields),
                **_continuing(prompt),
                "n-predict": fields.max_tokens,
                "reasoning-format": "deepseek",
            },
            priority=exchange.caller.class_of(fields.priority),
            keeps_priority=fields.priority is None,
            session_id=fields.session_id,
        )
        if fields.stream:
            await stream_turn(exchange, request, MessageStream(fields.model))
        else:
            [answer] = await collect_answers(exchange, request)
            await exchange.send_json(whole_message(fields.model, answer))
    except InferdError as exc:
        raise MESSAGES.name_field(exc) from None


async def answer_count_tokens(exchange: Exchange) -> None:
    """Answer with the number of tokens of a prompt, as the model's template writes it."""
    fields, _ = exchange.read_fields(COUNT_TOKENS)
    media = RequestMedia()
    prompt, options = read_prompt(fields, media), _options_of(fields)
    options |= _continuing(prompt)
    await media.decode(exchange.run_in_thread)
    try:
        rendered = await exchange.turns.render_prompt(
            exchange.caller, fields.model, prompt, options
        )
    except InferdError as exc:
        raise media.name_item(exc, prompt) from None
    await exchange.send_json({"input_tokens": rendered.tokens})


def _continuing(prompt: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameter with which an answer continues a last message of the assistant, which is
    always so in this API.
    """
    before, last = prompt[:-1], prompt[-1]
    answers = last["role"] == "assistant" and isinstance(last.get("content"), str)
    if not answers or last.get("tool_calls") or not before:
        return {}
    return {"continue-final-message": True}


def _options_of(fields: PromptFields) -> dict[str, Any]:
    """Return the parameters of a prompt: tools, template and schema.

    :raises InvalidArgument: the choice of a tool lacks the tool's name.
    :raises UnsupportedOperation: a tool is one that Anthropic itself runs.
    """
    options: dict[str, Any] = {}
    if fields.tools:
        options["tools"] = read_tools(fields.tools)
        if fields.tool_choice is not None:
            options.update(_choice_of(fields.tool_choice))
    arguments: dict[str, Any] = {}
    if fields.output_config.effort is not None:
        arguments["reasoning_effort"] = fields.output_config.effort
    options |= reasoning_bounds(fields.output_config.effort, fields.think, fields.thinking)
    arguments |= thinking_arguments(fields.think, fields.enable_thinking, fields.thinking)
    if arguments:
        options["chat-template-kwargs"] = arguments
    if (form := _format_of(fields)) is not None:
        options |= schema_options(form.schema_, strict=True)
    return options


def _format_of(fields: PromptFields) -> JsonFormat | None:
    """Return the schema of the answer, which the beta's requests have in `output_format`.

    :raises InvalidArgument: the request has it twice.
    """
    form, beta = fields.output_config.format, fields.output_format
    if form is not None and beta is not None:
        raise field_error(
            "output_format", "output_format: output_config.format is set too; leave one of them out"
        )
    return form or beta


def _choice_of(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise field_error("tool_choice.name", "tool_choice.name is missing")
    named = {"type": "function", "function": {"name": choice.name}}
    found: dict[str, Any] = {"tool-choice": _CHOICES.get(choice.type, named)}
    if choice.disable_parallel_tool_use:
        found["parallel-tool-calls"] = False
    return found


async def answer_models(exchange: Exchange) -> None:
    """Answer with the models that the caller may use, on one page."""
    shown = [_model(info) for info in await usable_models(exchange)]
    ends = [shown[0]["id"], shown[-1]["id"]] if shown else [None, None]
    page = {"data": shown, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
    await exchange.send_json(page)


async def answer_model(exchange: Exchange) -> None:
    """Answer with one model."""
    name = exchange.caller.check_model(exchange.params["model"])
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await exchange.send_json(_model(await client.show(name)))


def _model(info: Mapping[str, Any]) -> dict[str, Any]:
    name, created = info["name"], datetime.fromtimestamp(int(info.get("modified_at") or 0), UTC)
    ctx_size = served_ctx_size(info)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": ctx_size,
        "max_tokens": ctx_size,
    }


_HEADER = "anthropic-version"
"""Anthropic's clients send it. It decides between the two APIs on paths that OpenAI has, too."""


class AnthropicApi:
    """Anthropic's API."""

    title = "Anthropic"
    prefixes = ("/v1/messages",)
    tables = TABLES
    endpoints = (
        Endpoint(method="POST", path="/v1/messages", answer=answer_messages),
        Endpoint(method="POST", path="/v1/messages/count_tokens", answer=answer_count_tokens),
        Endpoint(method="GET", path="/v1/models", answer=answer_models, header=_HEADER),
        Endpoint(method="GET", path="/v1/models/{model:path}", answer=answer_model, header=_HEADER),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


ANTHROPIC = AnthropicApi()
