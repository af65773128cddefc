"""`/v1/messages` and the count of its tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from ....backends.errors import InferdError
from ..exchange import Exchange, stream_turn
from ..fields.table import field_error
from ..turns import TurnRequest
from .fields import COUNT_TOKENS, MESSAGES, PromptFields, ToolChoice
from .forms import MessageStream, whole_message
from .messages import read_prompt, read_tools

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def answer_messages(exchange: Exchange) -> None:
    """Answer with a message, whole or streamed."""
    fields, options = MESSAGES.read(exchange.body)
    try:
        request = TurnRequest(
            model=fields.model,
            prompt=read_prompt(fields),
            options={
                **options,
                **_options_of(fields),
                "n-predict": fields.max_tokens,
                "reasoning-format": "deepseek",
            },
            priority=exchange.caller.class_of(fields.priority),
            session_id=fields.session_id,
        )
        if fields.stream:
            await stream_turn(exchange, request, MessageStream(fields.model))
        else:
            [answer] = await exchange.turns.collect(exchange.caller, request)
            await exchange.send_json(whole_message(fields.model, answer))
    except InferdError as exc:
        raise MESSAGES.name_field(exc) from None


async def answer_count_tokens(exchange: Exchange) -> None:
    """Answer with the number of tokens of a prompt, as the model's template writes it."""
    fields, _ = COUNT_TOKENS.read(exchange.body)
    exchange.caller.check_model(fields.model)
    prompt, options = read_prompt(fields), _options_of(fields)
    timeout = exchange.limits.turn_s_max
    async with exchange.turns.pool.lease(exchange.caller) as client:
        graph = await client.load_by_name(fields.model, timeout=timeout)
        try:
            rendered = await client.apply_template(
                graph,
                prompt,
                tools=options.get("tools", ()),
                arguments=options.get("chat-template-kwargs", {}),
                timeout=timeout,
            )
        finally:
            if client.connected:
                await client.unload(graph, keep=True)
    await exchange.send_json({"input_tokens": rendered.tokens})


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
    if fields.thinking is not None:
        arguments["enable_thinking"] = fields.thinking.type != "disabled"
    if fields.output_config.effort is not None:
        arguments["reasoning_effort"] = fields.output_config.effort
    if arguments:
        options["chat-template-kwargs"] = arguments
    if fields.output_config.format is not None:
        # Sent as text, so that its nesting does not count towards the frame's limit.
        schema = msgspec.json.encode(fields.output_config.format.schema_).decode()
        options["json-schema"] = schema
    return options


def _choice_of(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise field_error("tool_choice.name", "tool_choice.name is missing")
    named = {"type": "function", "function": {"name": choice.name}}
    found: dict[str, Any] = {"tool-choice": _CHOICES.get(choice.type, named)}
    if choice.disable_parallel_tool_use:
        found["parallel-tool-calls"] = False
    return found
