"""The endpoints of Anthropic's API."""

from __future__ import annotations

from ..exchange import Endpoint
from .errors import ERROR_SCHEMA, error_body
from .fields import TABLES
from .models import answer_model, answer_models
from .turns import answer_count_tokens, answer_messages

_HEADER = "anthropic-version"
"""Anthropic's clients send it. It decides between the two APIs on paths that OpenAI has, too."""


class AnthropicApi:
    """Anthropic's API."""

    title = "Anthropic"
    prefixes = ("/v1/messages",)
    tables = TABLES
    endpoints = (
        Endpoint(method="POST", path="/v1/messages", answer=answer_messages),
        Endpoint(method="POST", path="/v1/messages/count_tokens", answer=answer_count_tokens),
        Endpoint(method="GET", path="/v1/models", answer=answer_models, header=_HEADER),
        Endpoint(method="GET", path="/v1/models/{model:path}", answer=answer_model, header=_HEADER),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


ANTHROPIC = AnthropicApi()
