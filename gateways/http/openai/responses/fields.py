"""The fields of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from .....ipc.names import Priority
from ...fields import (
    OTHER_SERVERS,
    PRIORITY_FIELD,
    Field,
    FieldTable,
    honoured,
    ignored,
    parameter,
    refused,
)
from ..chat_fields import (
    STRUCTURED_OUTPUTS,
    THINKING,
    TOP_LOGPROBS_MAX,
    USER_AND_CACHE,
    Effort,
    ServiceTier,
    Think,
    media_places,
)

RESPONSE_ID = "^resp_[0-9a-f]{40}$"
LOGPROBS = "message.output_text.logprobs"
IMAGE_URLS = "message.input_image.image_url"


class TextFormat(Struct):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)
    strict: bool | None = None


class TextOptions(Struct):
    """The form of the answer, and its length."""

    format: TextFormat = msgspec.field(default_factory=TextFormat)
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct):
    """The reasoning before the answer."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


Input = str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1000)]


class PromptRequest(Struct, kw_only=True):
    """The fields of a prompt, which a response and the count of its tokens share."""

    model: str
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(pattern=RESPONSE_ID)] | None = None
    text: TextOptions = msgspec.field(default_factory=TextOptions)
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    enable_thinking: bool | None = None
    think: Think | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True


class ResponseRequest(PromptRequest, kw_only=True):
    """The fields that the gateway's own code reads; the others are parameters."""

    input: Input
    store: bool = True
    stream: bool = False
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    include: list[str] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] = 0
    metadata: Annotated[dict[str, str], Meta(max_length=16)] = {}
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    service_tier: ServiceTier = "auto"
    priority: Priority | None = None


class StoredQuery(Struct, kw_only=True):
    """A stored response is returned as it is, or one in the background as its events."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None


class InputItemsQuery(Struct, kw_only=True):
    """A part of the list of a response's input items."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[str] = []


_PROMPT: tuple[Field, ...] = (
    honoured("model"),
    honoured(
        "input",
        "a text, or items: messages with `input_text`, `input_image` (a data URI) and"
        " `input_audio`, `function_call`, `function_call_output`; `reasoning` items have no effect",
    ),
    honoured(
        "instructions",
        "with `previous_response_id` they stay in force, and other ones are refused",
    ),
    honoured("previous_response_id", "the new response branches off from it"),
    honoured("text", "`format`, as `response_format` of a chat", sets="json-schema"),
    honoured("reasoning", "`effort`, as `reasoning_effort` of a chat"),
    *THINKING,
    honoured(
        "tools",
        "functions, also in namespaces; `web_search` is not offered to the model; other tools"
        " are refused by name",
        sets="tools",
    ),
    honoured(
        "tool_choice",
        "`auto`, `none`, `required`, a function, or `allowed_tools`",
        sets="tool-choice",
    ),
    honoured("parallel_tool_calls"),
    refused("conversation", "use previous_response_id"),
)
_MEDIA = media_places("input.*.content.*", "input.*.output.*")
RESPONSES = FieldTable(
    "/v1/responses",
    [
        *_PROMPT,
        honoured("store", "true if absent: the response can be continued, as a dormant session"),
        honoured("stream"),
        honoured("max_output_tokens", sets="n-predict"),
        honoured("include", f"`{LOGPROBS}`; the models have nothing of the rest"),
        honoured("top_logprobs", "up to 20"),
        honoured("metadata", "returned in the response"),
        honoured(
            "truncation",
            "`auto` drops the oldest turns of a conversation that exceeds the context; with"
            " `disabled` it is refused",
            sets="overflow",
        ),
        honoured("service_tier", "as in a chat"),
        *STRUCTURED_OUTPUTS,
        PRIORITY_FIELD,
        parameter("temperature", note="the default is the model's"),
        parameter("top_p", note="the default is the model's"),
        honoured(
            "background",
            "the response is computed without its client, in the class `low` unless the request"
            " names another, and is stored",
        ),
        refused("background_options", "the gateway knows none"),
        refused("context_management", "histories are not compacted"),
        refused("prompt", "there are no stored prompts"),
        refused("max_tool_calls", "the models call only the program's own functions"),
        refused("moderation", "nothing is moderated"),
        refused("image", "the models make no images"),
        ignored("stream_options", "its streams have no obfuscation"),
        ignored("client_metadata", "the daemon's log has its own"),
        ignored("access_programs", "there are none"),
        *USER_AND_CACHE,
    ],
    kind=ResponseRequest,
    parameters=True,
    others=OTHER_SERVERS,
    media=_MEDIA,
)
INPUT_TOKENS = FieldTable(
    "/v1/responses/input_tokens",
    [*_PROMPT, ignored("truncation", "the whole prompt is counted")],
    kind=PromptRequest,
    media=_MEDIA,
)
_INCLUDE = "a stored response is returned whole, without logprobs"
RETRIEVE = FieldTable(
    "/v1/responses/{response}",
    [
        *(ignored(name, _INCLUDE) for name in ("include", "include[]")),
        honoured("stream", "the events of a response in the background"),
        honoured("starting_after", "only those after the event of this `sequence_number`"),
        ignored("include_obfuscation", "the gateway's streams have no obfuscation"),
    ],
    kind=StoredQuery,
    method="GET",
)
INPUT_ITEMS = FieldTable(
    "/v1/responses/{response}/input_items",
    [
        honoured("after", "the id of an item: those after it, in this order"),
        honoured("limit", "1 to 100; 20 if absent"),
        honoured("order", "`asc`, or `desc` (the default): the latest first"),
        honoured(
            "include",
            f"`{IMAGE_URLS}`: images with their data; the items have nothing of the rest",
        ),
    ],
    kind=InputItemsQuery,
    method="GET",
)
