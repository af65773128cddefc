"""`/v1/messages` and the count of its tokens."""

from __future__ import annotations

from typing import Any

from ....backends.errors import InferdError
from ..exchange import Exchange, collect_answers, stream_turn
from ..fields import field_error
from ..openai.chat_fields import thinking_arguments
from ..turns import TurnRequest, schema_options
from .fields import COUNT_TOKENS, MESSAGES, JsonFormat, PromptFields, ToolChoice
from .forms import MessageStream, whole_message
from .messages import read_prompt, read_tools

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def answer_messages(exchange: Exchange) -> None:
    """Answer with a message, whole or streamed."""
    fields, options = exchange.read_fields(MESSAGES)
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
    prompt, options = read_prompt(fields), _options_of(fields)
    tokens = await exchange.turns.count_tokens(exchange.caller, fields.model, prompt, options)
    await exchange.send_json({"input_tokens": tokens})


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
