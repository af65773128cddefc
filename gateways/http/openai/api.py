"""The endpoints of OpenAI's API, among them `/v1/models`, and `/health` of llama-server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..callers import RequestKind
from ..exchange import Endpoint, Exchange, served_ctx_size, usable_models
from .batches import (
    BATCHES,
    LIST_BATCHES,
    LIST_FILES,
    cancel_batch,
    create_batch,
    create_file,
    delete_file,
    list_batches,
    list_files,
    read_content,
    show_batch,
    show_file,
)
from .chat import answer_chat, control_chat, count_chat_tokens
from .chat_fields import CHAT, CONTROL
from .chat_fields import INPUT_TOKENS as CHAT_INPUT_TOKENS
from .completions import COMPLETIONS, answer_completion
from .embeddings import EMBEDDINGS, answer_embeddings
from .forms import ERROR_SCHEMA, error_body
from .responses import (
    INPUT_ITEMS,
    INPUT_TOKENS,
    RESPONSES,
    RETRIEVE,
    answer_input_items,
    answer_response,
    answer_stored,
    cancel_response,
    compact,
    count_input_tokens,
    delete_response,
)


async def answer_models(exchange: Exchange) -> None:
    """Answer with the models that the caller may use."""
    shown = [_model(info) for info in await usable_models(exchange)]
    await exchange.send_json({"object": "list", "data": shown})


async def answer_model(exchange: Exchange) -> None:
    """Answer with one model."""
    name = exchange.caller.check_model(exchange.params["model"])
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await exchange.send_json(_model(await client.show(name)))


def _model(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model with the served context where vLLM (`max_model_len`) and llama-server (`meta`)
    have it.
    """
    file, facts = info.get("file_info") or {}, info.get("info") or {}
    ctx_size = served_ctx_size(info)
    meta = {
        "n_ctx": ctx_size,
        "n_ctx_train": facts.get("ctx_size_trained") or file.get("ctx_size_trained"),
        "n_vocab": facts.get("vocab_size"),
        "n_embd": file.get("embedding_size"),
        "n_params": facts.get("parameters") or file.get("parameters"),
        "size": info.get("size_bytes"),
    }
    return {
        "id": info["name"],
        "object": "model",
        "created": int(info.get("modified_at") or 0),
        "owned_by": "inferd",
        "max_model_len": ctx_size,
        "meta": {name: value for name, value in meta.items() if value},
    }


async def answer_health(exchange: Exchange) -> None:
    """Answer that the daemon can be used.

    :raises ConnectionLost: the daemon does not answer.
    """
    await exchange.turns.health.check()
    await exchange.send_json({"status": "ok"})


_RESPONSE = "/v1/responses/{response}"
_FILE, _BATCH = "/v1/files/{file}", "/v1/batches/{batch}"


class OpenAIApi:
    """OpenAI's API."""

    title = "OpenAI"
    prefixes = ("/v1/",)
    tables = (
        CHAT,
        CHAT_INPUT_TOKENS,
        CONTROL,
        COMPLETIONS,
        EMBEDDINGS,
        RESPONSES,
        INPUT_TOKENS,
        RETRIEVE,
        INPUT_ITEMS,
        BATCHES,
        LIST_BATCHES,
        LIST_FILES,
    )
    endpoints = (
        *(
            Endpoint(method="GET", path=path, answer=answer_health, public=True)
            for path in ("/health", "/v1/health")
        ),
        Endpoint(method="GET", path="/v1/models", answer=answer_models),
        Endpoint(method="GET", path="/v1/models/{model:path}", answer=answer_model),
        Endpoint(method="POST", path="/v1/chat/completions", answer=answer_chat),
        Endpoint(method="POST", path="/v1/chat/completions/input_tokens", answer=count_chat_tokens),
        Endpoint(
            method="POST",
            path="/v1/chat/completions/control",
            answer=control_chat,
            kind=RequestKind.READ,
        ),
        Endpoint(method="POST", path="/v1/completions", answer=answer_completion),
        Endpoint(method="POST", path="/v1/embeddings", answer=answer_embeddings),
        Endpoint(method="POST", path="/v1/responses", answer=answer_response),
        Endpoint(method="POST", path="/v1/responses/input_tokens", answer=count_input_tokens),
        Endpoint(method="POST", path="/v1/responses/compact", answer=compact),
        Endpoint(method="GET", path=_RESPONSE, answer=answer_stored, kind=RequestKind.READ),
        Endpoint(method="DELETE", path=_RESPONSE, answer=delete_response),
        Endpoint(
            method="GET",
            path=f"{_RESPONSE}/input_items",
            answer=answer_input_items,
            kind=RequestKind.READ,
        ),
        Endpoint(method="POST", path=f"{_RESPONSE}/cancel", answer=cancel_response),
        Endpoint(method="POST", path="/v1/files", answer=create_file, reads_body=True),
        Endpoint(method="GET", path="/v1/files", answer=list_files, kind=RequestKind.READ),
        Endpoint(method="GET", path=_FILE, answer=show_file, kind=RequestKind.READ),
        Endpoint(method="GET", path=f"{_FILE}/content", answer=read_content, kind=RequestKind.READ),
        Endpoint(method="DELETE", path=_FILE, answer=delete_file),
        Endpoint(method="POST", path="/v1/batches", answer=create_batch),
        Endpoint(method="GET", path="/v1/batches", answer=list_batches, kind=RequestKind.READ),
        Endpoint(method="GET", path=_BATCH, answer=show_batch, kind=RequestKind.READ),
        Endpoint(method="POST", path=f"{_BATCH}/cancel", answer=cancel_batch),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


OPENAI = OpenAIApi()
