"""The fields of the requests of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ....ipc.names import Priority
from ..fields import PRIORITY_FIELD, Field, FieldTable, honoured, ignored, parameter, refused
from ..openai.chat_fields import Think

TEXTS_MAX = 2048
"""Texts of one request for embeddings."""
Format = Literal["", "json"] | dict[str, Any]
KeepAlive = int | float | str
SessionId = Annotated[str, Meta(min_length=1, max_length=128)]


class TurnFields(Struct, kw_only=True):
    """The fields that chats and completions share."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool = True
    format: Format = ""
    think: Think | None = None
    options: dict[str, Any] = {}
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    priority: Priority | None = None
    session_id: SessionId | None = None
    truncate: bool = True
    shift: bool = True


class ChatFields(TurnFields, kw_only=True):
    """The fields of a chat."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=1000)] = []


class GenerateFields(TurnFields, kw_only=True):
    """The fields of a completion."""

    prompt: str = ""
    images: list[Annotated[Any, Meta(extra_json_schema={"type": "string"})]] = []
    system: str = ""
    suffix: str = ""
    raw: bool = False


class OwnOptions(Struct, kw_only=True):
    """The options that are read here; the others are parameters."""

    num_predict: int | None = None


class EmbedFields(Struct, kw_only=True):
    """The fields of embeddings."""

    model: Annotated[str, Meta(min_length=1)]
    input: str | Annotated[list[str], Meta(max_length=TEXTS_MAX)] = ""
    truncate: bool = True
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class EmbeddingsFields(Struct, kw_only=True):
    """The fields of the older call for one embedding."""

    model: Annotated[str, Meta(min_length=1)]
    prompt: str = ""


class ModelFields(Struct, kw_only=True):
    """The name of a model; older clients send it as `name`."""

    model: str = ""
    name: str = ""


_OPERATOR = "the operator sets it for the model, in the daemon's configuration"
_TURN: tuple[Field, ...] = (
    honoured("model", "a tag `:latest` is left out"),
    honoured("stream", "the default is true"),
    honoured("format", "`json`, or a JSON schema, as `response_format` of OpenAI without `strict`"),
    honoured(
        "think",
        "passed to the chat template as `enable_thinking` and `reasoning_effort`; a level's number"
        " bounds a thought",
        sets="reasoning-effort",
    ),
    honoured("options", "see the table of options"),
    honoured(
        "keep_alive",
        "with 0 and without a prompt, an operator unloads the model; otherwise the daemon's"
        " `keep-alive` decides",
    ),
    honoured("logprobs"),
    honoured("top_logprobs", "up to 20"),
    PRIORITY_FIELD,
    honoured("session_id", "extension: the prompt is added to this session's history"),
    honoured(
        "truncate",
        "a chat that exceeds the context loses its oldest turns, a prompt or a single message its"
        " middle; with false it is refused",
        sets="overflow",
    ),
    honoured(
        "shift",
        "an answer that fills the context continues without the oldest tokens; with false it ends",
        sets="ctx-shift",
    ),
)
CHAT = FieldTable(
    "/api/chat",
    [
        *_TURN,
        honoured(
            "messages", "without any, the model is loaded; `images` are in base64, before the text"
        ),
        parameter("tools"),
    ],
    kind=ChatFields,
    media=("messages.*.images.*",),
)
GENERATE = FieldTable(
    "/api/generate",
    [
        *_TURN,
        honoured("prompt", "without one, and without images, the model is loaded"),
        honoured("images", "in base64, before the prompt; not of a raw one", []),
        honoured("system"),
        honoured("raw", "the prompt is used as it is, without the chat template"),
        honoured(
            "suffix",
            "the text behind the answer, of a model that fills in text between two others; `system`"
            " and the chat template are then not used",
            "",
        ),
        refused("template", "the model has its own: send raw and the whole prompt", ""),
        refused("context", "send session_id, or the messages to /api/chat", []),
        refused("width", "no model here makes images", 0),
        refused("height", "no model here makes images", 0),
        refused("steps", "no model here makes images", 0),
    ],
    kind=GenerateFields,
    media=("images.*",),
)
OPTIONS = FieldTable(
    "/api/chat and /api/generate: options",
    [
        honoured("num_predict", "-1 and -2 mean the rest of the context"),
        parameter("temperature", note="the default is the model's"),
        parameter("top_k", "top-k"),
        parameter("top_p", "top-p"),
        parameter("min_p", "min-p"),
        parameter("typical_p", "typ-p"),
        parameter("repeat_penalty", "repeat-penalty"),
        parameter("repeat_last_n", "last-n-penalty"),
        parameter("presence_penalty", "presence-penalty"),
        parameter("frequency_penalty", "frequency-penalty"),
        parameter("mirostat"),
        parameter("mirostat_tau", "mirostat-tau"),
        parameter("mirostat_eta", "mirostat-eta"),
        parameter("seed"),
        parameter("stop"),
        parameter("num_keep", "n-keep"),
        *(ignored(name, _OPERATOR) for name in ("num_ctx", "num_batch", "num_gpu", "main_gpu")),
        *(ignored(name, _OPERATOR) for name in ("num_thread", "numa", "use_mmap", "use_mlock")),
        *(ignored(name, _OPERATOR) for name in ("low_vram", "f16_kv")),
        *(ignored(name, "Ollama itself ignores it now") for name in ("tfs_z", "penalize_newline")),
        *(
            ignored(name, "Ollama itself ignores it now")
            for name in ("logits_all", "vocab_only", "embedding_only")
        ),
    ],
    kind=OwnOptions,
    parameters=True,
)
_EMBED: tuple[Field, ...] = (
    honoured("model", "a tag `:latest` is left out"),
    ignored("options", "embeddings have none"),
    ignored("keep_alive", "the daemon's `keep-alive` decides"),
)
EMBED = FieldTable(
    "/api/embed",
    [
        *_EMBED,
        honoured("input", f"a text, or up to {TEXTS_MAX}"),
        honoured(
            "truncate",
            "whether the end of a text that is too long is left out, instead of refusing it; the"
            " default is true, and the answer's `truncated` has the places of such texts, from 0",
        ),
        honoured("dimensions", "the first numbers of each vector, scaled to length 1"),
    ],
    kind=EmbedFields,
)
EMBEDDINGS = FieldTable(
    "/api/embeddings",
    [
        *_EMBED,
        honoured("prompt"),
        ignored("truncate", "a text that is longer than the model's context is an error"),
    ],
    kind=EmbeddingsFields,
)
SHOW = FieldTable(
    "/api/show",
    [
        honoured("model"),
        honoured("name", "if `model` is absent"),
        ignored("verbose", "all that is known is always sent"),
        refused("system", "the model's own cannot be changed", ""),
        refused("template", "the model's own cannot be changed", ""),
        refused("options", "the model's own cannot be changed", {}),
    ],
    kind=ModelFields,
)
TABLES = (CHAT, GENERATE, OPTIONS, EMBED, EMBEDDINGS, SHOW)
