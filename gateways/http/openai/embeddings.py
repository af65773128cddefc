"""`/v1/embeddings`."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ....backends.errors import InferdError
from ....ipc.names import Priority
from ..exchange import Exchange
from ..fields import PRIORITY_FIELD, FieldTable, field_error, honoured, ignored, refused

TEXTS_MAX = 2048
"""OpenAI's maximum."""
_Texts = Annotated[
    list[Any],
    Meta(min_length=1, max_length=TEXTS_MAX, extra_json_schema={"items": {"type": "string"}}),
]
"""Texts; token ids get an error of their own."""


class EmbeddingRequest(Struct, kw_only=True):
    """The fields of a request for embeddings."""

    model: str
    input: str | _Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    priority: Priority | None = None


EMBEDDINGS = FieldTable(
    "/v1/embeddings",
    [
        honoured("model"),
        honoured("input", "a text, or up to 2048; not token ids"),
        honoured("encoding_format", "`float` or `base64`"),
        honoured("dimensions", "only the model's own number; another one is refused"),
        PRIORITY_FIELD,
        refused("embd_normalize", "vectors have the length 1", 2),
        refused("normalize", "vectors have the length 1", True),
        refused("pooling", "the model has its own", ""),
        refused("truncate_prompt_tokens", "a text that is longer than the context is an error"),
        refused("add_special_tokens", "the daemon adds them as the model needs", True),
        refused("messages", "send a text as input", []),
        ignored("user", "the key names the user"),
    ],
    kind=EmbeddingRequest,
)


async def answer_embeddings(exchange: Exchange) -> None:
    """Answer with the embedding of each text."""
    request, _ = exchange.read_fields(EMBEDDINGS)
    texts = [request.input] if isinstance(request.input, str) else _check_texts(request.input)
    priority = exchange.caller.class_of(request.priority)
    try:
        found, _ = await exchange.turns.embed(exchange.caller, request.model, texts, priority)
    except InferdError as exc:
        if "index" in exc.data:
            exc.data["param"] = f"input.{exc.data['index']}"
        raise EMBEDDINGS.name_field(exc) from None
    if request.dimensions not in (None, found.size):
        raise field_error("dimensions", f"dimensions: the model has {found.size}")
    tokens = sum(found.tokens)
    await exchange.send_json(
        {
            "object": "list",
            "model": request.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _shown(vector, request)}
                for index, vector in enumerate(found)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _check_texts(texts: list[Any]) -> list[str]:
    """Return *texts*, which are texts.

    :raises InvalidArgument: they are token ids, or something else.
    """
    for number, text in enumerate(texts):
        if isinstance(text, int | list):
            raise field_error(
                "input",
                "input: token ids are refused, because they are those of another vocabulary",
                hint="send texts; langchain's OpenAIEmbeddings does with"
                " check_embedding_ctx_length=False",
            )
        if not isinstance(text, str):
            raise field_error(f"input.{number}", f"input.{number} is not a text")
    return texts


def _shown(vector: list[float], request: EmbeddingRequest) -> Any:
    if request.encoding_format == "float":
        return vector
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
