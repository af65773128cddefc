"""The fields of the requests of Anthropic's API, and messages of a chat in its form, as the daemon
reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from ....backends.errors import UnsupportedOperation
from ....backends.params import without_nulls
from ....ipc.names import Priority
from ..fields import (
    OTHER_SERVERS,
    PRIORITY_FIELD,
    Field,
    FieldTable,
    field_error,
    honoured,
    ignored,
    parameter,
    refused,
)
from ..media import RequestMedia
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
    honoured(
        "messages",
        "blocks of text, `image` (in base64, also in a `tool_result`), `thinking`, `tool_use`,"
        " `tool_result`; others refused",
    ),
    honoured("system", "a text, or blocks of text"),
    honoured("tools", "the caller's own; Anthropic's tools are refused"),
    honoured("tool_choice"),
    honoured(
        "thinking",
        "`enable_thinking` of the chat template; `budget_tokens` bounds a thought",
        sets="reasoning-budget",
    ),
    honoured(
        "output_config",
        "`format` is a JSON schema, as OpenAI's with `strict`; `effort` is passed to the chat"
        " template, and its number bounds a thought",
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
_MEDIA = ("messages.*.content.*.source.data", "messages.*.content.*.content.*.source.data")
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
    media=_MEDIA,
)
COUNT_TOKENS = FieldTable("/v1/messages/count_tokens", _PROMPT, kind=PromptFields, media=_MEDIA)
TABLES = (MESSAGES, COUNT_TOKENS)


_ROLES = ("user", "assistant", "system")
_TOOL = "custom"
_LEVELS = 2
"""A message and its blocks."""


def read_prompt(fields: PromptFields, media: RequestMedia) -> list[dict[str, Any]]:
    """Return the messages for the daemon, with the system prompt as the first one, and add their
    images to *media*. The messages of *fields* are then gone, so that their base64 is freed.

    :raises InvalidArgument: a message has another form.
    :raises UnsupportedOperation: a block is not supported; its type is named.
    :raises TooLarge: there are too many images.
    """
    names: dict[str, str] = {}
    found = []
    if fields.system:
        found.append({"role": "system", "content": _text("system", fields.system)})
    messages, fields.messages = without_nulls(fields.messages, _LEVELS), []
    for number, message in enumerate(messages):
        found += _read_message(f"messages.{number}", message, names, media)
    return found


def _read_message(
    place: str, message: dict[str, Any], names: dict[str, str], media: RequestMedia
) -> Iterator[dict[str, Any]]:
    """Yield the messages for one of Anthropic's; each tool result in it is a message of its own.

    *names* has the names of the tools by the ids of their calls; calls in the message are added.
    """
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise field_error(f"{place}.role", f"{place}.role is none of {', '.join(_ROLES)}")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    read: dict[str, Any] = {"role": role, "content": []}
    for at, block in _blocks(f"{place}.content", content):
        match block["type"]:
            case "text":
                read["content"].append(_text_of(at, block))
            case "image":
                read["content"].append(_read_image(at, block, media))
            case "thinking":
                read["reasoning_content"] = str(block.get("thinking", ""))
            case "redacted_thinking":
                continue
            case "tool_use":
                if role != "assistant":
                    raise field_error(at, f"{at}: only the assistant calls tools")
                read.setdefault("tool_calls", []).append(_read_call(at, block, names))
            case "tool_result":
                yield _read_result(at, block, names, media)
            case kind:
                raise _not_supported(at, kind)
    if read["content"] or len(read) > 2:
        yield {**read, "content": _joined(read["content"])}


def _joined(parts: list[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return texts as one text, or texts and images as parts, with one text between two images."""
    if not any(isinstance(part, dict) for part in parts):
        return "".join(map(str, parts))
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, dict):
            found.append(part)
        elif found and found[-1]["type"] == "text":
            found[-1]["text"] += part
        else:
            found.append({"type": "text", "text": part})
    return found


def _read_image(place: str, block: Block, media: RequestMedia) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise field_error(f"{place}.source", f"{place}: the source of the image is missing")
    if source.get("type") != "base64":
        raise UnsupportedOperation(
            f"{place}: a source of the type {str(source.get('type'))[:40]!r}: the gateway fetches"
            " nothing",
            hint="send the image itself, as a source of the type base64 with media_type and data",
            data={"param": place},
        )
    media_type = source.get("media_type")
    if not isinstance(media_type, str) or not media_type:
        raise field_error(f"{place}.source.media_type", f"{place}: media_type is missing")
    return media.add_image(place, source.get("data"), media_type)


def _blocks(place: str, content: Any) -> Iterator[tuple[str, Block]]:
    """Yield each block of a content with its place."""
    if not isinstance(content, list):
        raise field_error(place, f"{place} is neither a text nor a list of blocks")
    for number, block in enumerate(content):
        at = f"{place}.{number}"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise field_error(at, f"{at} is not a block with a type")
        yield at, block


def _text(place: str, content: Any) -> str:
    """Return the text of a content that has only text."""
    if isinstance(content, str):
        return content
    texts = []
    for at, block in _blocks(place, content):
        if block["type"] != "text":
            raise UnsupportedOperation(
                f"{at}: a block of the type {block['type'][:40]!r}",
                hint="a system prompt is text: send images in a message",
                data={"param": at},
            )
        texts.append(_text_of(at, block))
    return "".join(texts)


def _result_of(place: str, content: Any, media: RequestMedia) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result: a text, or texts and images as parts."""
    if isinstance(content, str):
        return content
    found: list[str | dict[str, Any]] = []
    for at, block in _blocks(place, content):
        match block["type"]:
            case "text":
                found.append(_text_of(at, block))
            case "image":
                found.append(_read_image(at, block, media))
            case kind:
                raise _not_supported(at, kind)
    return _joined(found)


def _text_of(place: str, block: Block) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise field_error(f"{place}.text", f"{place}.text is not a text")
    return text


def _not_supported(place: str, kind: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{place}: a block of the type {kind[:40]!r}",
        hint="send texts and images",
        data={"param": place},
    )


def _read_call(place: str, block: Block, names: dict[str, str]) -> dict[str, Any]:
    call, name = block.get("id"), block.get("name")
    if not isinstance(call, str) or not isinstance(name, str):
        raise field_error(place, f"{place} lacks id or name")
    names[call] = name
    arguments = msgspec.json.encode(block.get("input", {})).decode()
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_result(
    place: str, block: Block, names: dict[str, str], media: RequestMedia
) -> dict[str, Any]:
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        raise field_error(f"{place}.tool_use_id", f"{place}: tool_use_id is missing")
    read = {"role": "tool", "tool_call_id": call}
    if call in names:
        read["name"] = names[call]
    content = _result_of(f"{place}.content", block.get("content") or "", media)
    return {**read, "content": content}


def read_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return the tools for the daemon.

    :raises UnsupportedOperation: a tool is one that Anthropic itself runs.
    """
    return [_read_tool(f"tools.{number}", tool) for number, tool in enumerate(tools)]


def _read_tool(place: str, tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, _TOOL):
        raise UnsupportedOperation(
            f"{place}: the tool {tool.type[:40]!r}",
            hint="the gateway runs no tools: describe your own by an input_schema",
            data={"param": place},
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    strict = {"strict": True} if tool.strict else {}
    return {"type": "function", "function": {**function, **strict}}
