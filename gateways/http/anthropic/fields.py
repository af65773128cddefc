"""The fields of the requests of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ....ipc.priorities import Priority
from ..fields import (
    OTHER_SERVERS,
    PRIORITY_FIELD,
    Field,
    FieldTable,
    honoured,
    ignored,
    parameter,
    refused,
)
from ..openai.chat_fields import THINKING, Think, Thinking

Name = Annotated[str, Meta(min_length=1)]
Block = dict[str, Any]


class Tool(Struct, kw_only=True):
    """A tool of the caller."""

    name: Name
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] = {}
    strict: bool = False


class ToolChoice(Struct, kw_only=True):
    """The tools that the answer may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class JsonFormat(Struct, kw_only=True):
    """A schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = field(name="schema")


class OutputConfig(Struct, kw_only=True):
    """The form of the answer, and the effort for it."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptFields(Struct, kw_only=True):
    """The fields of a prompt, which messages and the count of their tokens share."""

    model: Name
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1000)]
    system: str | list[Block] = ""
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    think: Think | None = None
    output_config: OutputConfig = field(default_factory=OutputConfig)
    output_format: JsonFormat | None = None


class MessageFields(PromptFields, kw_only=True):
    """The fields of a message."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool = False
    service_tier: Literal["auto", "standard_only"] = "auto"
    priority: Priority | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


_PROMPT: tuple[Field, ...] = (
    honoured("model"),
    honoured("messages", "blocks of text, `thinking`, `tool_use`, `tool_result`; others refused"),
    honoured("system", "a text, or blocks of text"),
    honoured("tools", "the caller's own; Anthropic's tools are refused"),
    honoured("tool_choice"),
    honoured("thinking", "`enable_thinking` of the chat template; `budget_tokens` has no effect"),
    honoured(
        "output_config",
        "`format` is a JSON schema, as OpenAI's with `strict`; `effort` is passed to the chat"
        " template",
    ),
    honoured("output_format", "the beta's `output_config.format`"),
    *THINKING,
    ignored("cache_control", "equal beginnings are always found"),
    ignored("speed", "`priority` orders turns"),
    ignored("user_profile_id", "the key names the user"),
    ignored("workspace_id", "the key names the user"),
    ignored("billing_policy", "nothing is billed"),
    ignored("context_management", "the whole history is used"),
    refused("mcp_servers", "the gateway calls no servers", []),
    refused("compaction", "histories are not compacted"),
)
MESSAGES = FieldTable(
    "/v1/messages",
    [
        *_PROMPT,
        honoured("max_tokens"),
        honoured("stream"),
        parameter("temperature", note="the default is the model's"),
        parameter("top_p", "top-p", "the default is the model's"),
        parameter("top_k", "top-k", "the default is the model's"),
        parameter("stop_sequences", "stop"),
        PRIORITY_FIELD,
        honoured("session_id", "extension: the messages are added to this session's history"),
        honoured("service_tier", "both values mean the same here"),
        ignored("metadata", "the key names the user"),
        ignored("inference_geo", "all is computed on this machine"),
        ignored("diagnostics", "the daemon's metrics have more"),
        refused("container", "there are no containers"),
        refused("thread", "send the messages, or session_id"),
        ignored("fallbacks", "no request is declined for its content"),
        ignored("fallback_credit_token", "nothing is billed"),
    ],
    kind=MessageFields,
    parameters=True,
    others=OTHER_SERVERS,
)
COUNT_TOKENS = FieldTable("/v1/messages/count_tokens", _PROMPT, kind=PromptFields)
TABLES = (MESSAGES, COUNT_TOKENS)
