"""The tables of fields against the types of the official clients."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.beta.message_count_tokens_params import (
    MessageCountTokensParams as BetaCountTokensParams,
)
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageParams
from anthropic.types.message_create_params import MessageCreateParamsBase as MessageParams
from ollama import _types as ollama
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from inferd.gateways.http.apis import APIS

TABLES = {table.path: table for api in APIS for table in api.tables}
TYPES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", ChatParams),
    ("/v1/completions", CompletionParams),
    ("/v1/embeddings", EmbeddingCreateParams),
    ("/v1/responses", ResponseParams),
    ("/v1/messages", MessageParams),
    ("/v1/messages", BetaMessageParams),
    ("/v1/messages/count_tokens", MessageCountTokensParams),
    ("/v1/messages/count_tokens", BetaCountTokensParams),
    ("/api/chat", ollama.ChatRequest),
    ("/api/generate", ollama.GenerateRequest),
    ("/api/embed", ollama.EmbedRequest),
    ("/api/embeddings", ollama.EmbeddingsRequest),
    ("/api/show", ollama.ShowRequest),
    ("/api/chat and /api/generate: options", ollama.Options),
]
HEADERS = {"betas"}
"""Fields of the clients that they send as headers."""


def names_of(kind: Any) -> set[str]:
    """Return the fields of a client's request: of a pydantic model, or of a typed dictionary."""
    return set(getattr(kind, "model_fields", None) or kind.__annotations__) - HEADERS


@pytest.mark.parametrize(("path", "kind"), TYPES)
def test_each_field_of_a_client_is_in_the_table_of_its_path(path: str, kind: Any) -> None:
    names = names_of(kind)
    assert "model" in names or kind is ollama.Options
    assert names <= {field.name for field in TABLES[path].fields}
