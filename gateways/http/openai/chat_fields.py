"""The fields of `/v1/chat/completions`, and messages of a chat in OpenAI's form, as the daemon
reads them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ....backends.errors import InvalidArgument, UnsupportedOperation
from ....backends.params import BY_NAME, without_nulls
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

TOP_LOGPROBS_MAX = 20
PromptLogprobs = Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)]
BUDGET_MAX = int(BY_NAME["reasoning-budget"].high)
PROMPT_LOGPROBS_FIELD = honoured(
    "prompt_logprobs", "vLLM's, up to 20; not of a stream", sets="prompt-logprobs"
)
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "fast"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Think = bool | Literal["low", "medium", "high", "max"]


class StreamOptions(Struct):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchemaFormat(Struct):
    """A schema of the answer."""

    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], Meta()] = msgspec.field(name="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Struct):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class PredictionPart(Struct):
    """A part of a predicted output."""

    type: Literal["text"]
    text: str


class Prediction(Struct):
    """A text that the answer is expected to repeat (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """The whole text."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Thinking(Struct, kw_only=True):
    """Whether the model thinks before it answers, and for how many tokens, in Anthropic's form."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=0, le=BUDGET_MAX)] | None = None


def thinking_arguments(
    think: Think | None, enable: bool | None = None, thinking: Thinking | None = None
) -> dict[str, Any]:
    """Return the arguments of the chat template for the fields `think`, `enable_thinking` and
    `thinking`.
    """
    found: dict[str, Any] = {}
    if thinking is not None:
        found["enable_thinking"] = thinking.type != "disabled"
    if think is not None:
        found["enable_thinking"] = bool(think)
    if isinstance(think, str):
        found["reasoning_effort"] = think
    if enable is not None:
        found["enable_thinking"] = enable
    return found


def reasoning_bounds(
    effort: Effort | None, think: Think | None, thinking: Thinking | None = None
) -> dict[str, Any]:
    """Return the parameters that bound reasoning, for a level of effort and the fields `think` and
    `thinking`.
    """
    found: dict[str, Any] = {}
    level = think if isinstance(think, str) else effort
    if level is not None:
        found["reasoning-effort"] = level
    if thinking is not None and thinking.budget_tokens is not None:
        found["reasoning-budget"] = thinking.budget_tokens
    return found


THINKING: tuple[Field, ...] = (
    honoured("enable_thinking", "extension: an argument of the chat template"),
    honoured(
        "think",
        "extension: as with Ollama, `enable_thinking`; a level as `reasoning_effort`",
        sets="reasoning-effort",
    ),
)


class ChatRequest(Struct, kw_only=True):
    """The fields that the gateway's own code reads; the others are parameters."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1000)]
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] = 0
    prompt_logprobs: PromptLogprobs | None = None
    logit_bias: dict[str, float] = {}
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    think: Think | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] = {}
    timings_per_token: bool = False
    return_progress: bool = False
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    service_tier: ServiceTier = "auto"
    priority: Priority | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


STRUCTURED_OUTPUTS: tuple[Field, ...] = (
    parameter(
        "structured_outputs",
        note="vLLM's: one of `json`, `regex`, `choice`, `grammar` (GBNF or Lark), `json_object`,"
        " `structural_tag`; objects have only the properties that they list",
    ),
    *(
        parameter(f"guided_{name}", note=f"older form of `structured_outputs.{name}`")
        for name in ("json", "json_object", "regex", "choice", "grammar", "whitespace_pattern")
    ),
    ignored("guided_decoding_backend", "one engine compiles all grammars"),
)
"""vLLM's fields for the format of an answer, which all paths have whose models generate text."""

SAMPLING: tuple[Field, ...] = (
    parameter("temperature", note="the default is the model's"),
    parameter("top_p", note="the default is the model's"),
    parameter("frequency_penalty", "frequency-penalty"),
    parameter("presence_penalty", "presence-penalty"),
    parameter("stop"),
    parameter("seed", note="-1 is a random one; larger ones are taken modulo 2^32"),
)
USER_AND_CACHE: tuple[Field, ...] = (
    ignored("user", "the key names the user"),
    ignored("safety_identifier", "the key names the user"),
    ignored("prompt_cache_key", "equal beginnings are always found"),
    ignored("prompt_cache_retention", "the daemon's settings decide"),
    ignored("prompt_cache_options", "the daemon's settings decide"),
)
PROGRESS: tuple[Field, ...] = (
    honoured("timings_per_token", "llama-server's: `timings` in the answer and in each chunk"),
    honoured("return_progress", "llama-server's: chunks with `prompt_progress` in a stream"),
)


def media_places(*parts: str) -> tuple[str, ...]:
    """Return the places of base64 in the parts of a content that are at such places."""
    fields = ("image_url", "image_url.url", "input_audio.data")
    return tuple(f"{part}.{field}" for part in parts for field in fields)


CHAT = FieldTable(
    "/v1/chat/completions",
    [
        honoured("model", "if empty, the only model that is offered, or the only loaded one"),
        honoured(
            "messages",
            "parts of a content are text, `image_url` with a data URI, and `input_audio`; the role"
            " `developer` means `system`",
        ),
        honoured("stream"),
        honoured("stream_options", "`include_usage`"),
        honoured("n", "up to 16; the prompt is computed once; each has the next seed"),
        honoured("max_completion_tokens", sets="n-predict"),
        honoured("max_tokens", "if `max_completion_tokens` is absent"),
        honoured(
            "response_format",
            "`text`, `json_object`, `json_schema`, whose objects have only the properties that they"
            " list, unless the schema allows for others; constraints that no grammar keeps are left"
            " out, or refused with `strict`",
            sets="json-schema",
        ),
        honoured("logprobs", sets="n-probs"),
        honoured("top_logprobs", "up to 20"),
        PROMPT_LOGPROBS_FIELD,
        honoured("logit_bias", sets="logit-bias"),
        honoured(
            "reasoning_effort",
            "passed to the chat template; with `none`, `enable_thinking` is off; the level's number"
            " bounds a thought",
            sets="reasoning-effort",
        ),
        honoured(
            "prediction",
            "drafts from this text; `usage` counts those that were accepted and rejected",
            sets="prediction",
        ),
        honoured("service_tier", "`flex` is the class `low`; `priority` and `fast` are `high`"),
        *SAMPLING,
        parameter("tools"),
        parameter(
            "tool_choice",
            "tool-choice",
            "`auto`, `none`, `required`, a function, or `allowed_tools`",
        ),
        parameter("parallel_tool_calls", "parallel-tool-calls"),
        parameter("parse_tool_calls", "parse-tool-calls", "llama-server's"),
        honoured(
            "chat_template_kwargs",
            "extension: arguments of the chat template",
            sets="chat-template-kwargs",
        ),
        *STRUCTURED_OUTPUTS,
        *THINKING,
        honoured(
            "thinking",
            "extension: `enable_thinking` and `budget_tokens`, in Anthropic's form",
            sets="reasoning-budget",
        ),
        *PROGRESS,
        honoured(
            "continue_final_message",
            "vLLM's: the answer continues the last message, which is the assistant's",
            sets="continue-final-message",
        ),
        honoured("add_generation_prompt", "false only with `continue_final_message`"),
        PRIORITY_FIELD,
        honoured(
            "session_id",
            "extension: `messages` are added to this session's history, instead of being all of it",
        ),
        refused("functions", "is OpenAI's old form of tools: use tools", []),
        refused("function_call", "is OpenAI's old form of tool_choice", "none", "auto"),
        refused("audio", "answers are text; a sound is a part of a message"),
        refused("modalities", "answers are text", ["text"]),
        refused("web_search_options", "the gateway does not search the web"),
        refused("verbosity", "no model here has it", "medium"),
        refused("store", "completions are not stored; use session_id", False),
        refused("moderation", "nothing is moderated"),
        ignored("metadata", "completions are not stored"),
        *USER_AND_CACHE,
    ],
    kind=ChatRequest,
    parameters=True,
    others=OTHER_SERVERS,
    media=media_places("messages.*.content.*"),
)


INPUT_TOKENS = FieldTable(
    "/v1/chat/completions/input_tokens",
    CHAT.fields,
    kind=ChatRequest,
    parameters=True,
    others=OTHER_SERVERS,
    media=CHAT.media,
)


class ControlRequest(Struct, kw_only=True):
    """A change of a completion that is being generated."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    action: Literal["reasoning_end"]


CONTROL = FieldTable(
    "/v1/chat/completions/control",
    [
        honoured("id", "that of a chat completion under way, from its first chunk"),
        honoured("action", "`reasoning_end`: the answer begins now"),
        ignored("model", "the id names the completion"),
    ],
    kind=ControlRequest,
)


_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_HINTS = {
    "file": "send a text as a text, and an image as image_url",
    "input_file": "send a text as input_text, and an image as input_image",
}
"""Hints for types of parts that are not supported, beside the usual one."""
_LEVELS = 3
"""A message, its calls and their functions."""
ROLES = {"developer": "system"}
"""Roles that chat templates do not know, with the roles that replace them."""


def read_messages(messages: list[dict[str, Any]], media: RequestMedia) -> list[dict[str, Any]]:
    """Return the messages for the daemon, and add their images and sounds to *media*.

    :raises InvalidArgument: a message has another form.
    :raises UnsupportedOperation: a part of a message is not supported; its type is named.
    :raises TooLarge: there are too many images and sounds.
    """
    messages = without_nulls(messages, _LEVELS)
    return [
        _read_message(f"messages.{number}", each, media) for number, each in enumerate(messages)
    ]


def _read_message(place: str, message: dict[str, Any], media: RequestMedia) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise field_error(f"{place}.role", f"{place}: the role is missing")
    read = {**message, "role": ROLES.get(role, role)}
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        read["content"] = message["refusal"]
    if isinstance(content, list):
        read["content"] = read_parts(f"{place}.content", content, media)
    elif content is not None and not isinstance(content, str):
        raise field_error(
            f"{place}.content", f"{place}.content is neither a text nor a list of parts"
        )
    return read


def read_parts(place: str, parts: list[Any], media: RequestMedia) -> list[dict[str, Any]]:
    """Return the parts of a content; see `read_messages`."""
    return [_read_part(f"{place}.{number}", part, media) for number, part in enumerate(parts)]


def _read_part(place: str, part: Any, media: RequestMedia) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise field_error(place, f"{place} is not a part with a type")
    if kind in ("image_url", "input_image"):
        return _read_image(place, part, media)
    if kind == "input_audio":
        sound = part.get("input_audio")
        if not isinstance(sound, dict):
            raise field_error(place, f"{place}.input_audio is not an object with data and format")
        return media.add_sound(place, sound.get("data"), sound.get("format"))
    if kind not in _TEXTS:
        raise UnsupportedOperation(
            f"{place}: a part of the type {kind[:40]!r}",
            hint=_HINTS.get(kind, "send texts, images and sounds"),
            data={"param": place},
        )
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise InvalidArgument(
            f"{place}.{_TEXTS[kind]} is not a text", hint="send a text", data={"param": place}
        )
    return {"type": "text", "text": text}


def _read_image(place: str, part: dict[str, Any], media: RequestMedia) -> dict[str, Any]:
    """Return the part for an image, whose URL is a text or in an object with its `detail`."""
    image, detail = part.get("image_url"), part.get("detail")
    url: Any = image.get("url") if isinstance(image, dict) else image
    if isinstance(image, dict):
        detail = image.get("detail", detail)
    if url is None and part.get("file_id") is not None:
        raise UnsupportedOperation(
            f"{place}: file_id: files are not stored",
            hint="send the image itself in image_url, as a data URI: data:image/png;base64,…",
            data={"param": place},
        )
    return media.add_url(place, url, detail, alt=part.get("alt"))
