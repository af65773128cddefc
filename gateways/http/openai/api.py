"""The endpoints of OpenAI's API."""

from __future__ import annotations

from ..callers.quotas import RequestKind
from ..exchange import Endpoint
from .chat import answer_chat
from .chat_fields import CHAT
from .completion_fields import COMPLETIONS
from .completions import answer_completion
from .embeddings import EMBEDDINGS, answer_embeddings
from .errors import ERROR_SCHEMA, error_body
from .health import answer_health
from .models import answer_model, answer_models
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

_RESPONSE = "/v1/responses/{response}"


class OpenAIApi:
    """OpenAI's API."""

    title = "OpenAI"
    prefixes = ("/v1/",)
    tables = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, INPUT_TOKENS, RETRIEVE, INPUT_ITEMS)
    endpoints = (
        *(
            Endpoint(method="GET", path=path, answer=answer_health, public=True)
            for path in ("/health", "/v1/health")
        ),
        Endpoint(method="GET", path="/v1/models", answer=answer_models),
        Endpoint(method="GET", path="/v1/models/{model:path}", answer=answer_model),
        Endpoint(method="POST", path="/v1/chat/completions", answer=answer_chat),
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
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


OPENAI = OpenAIApi()
