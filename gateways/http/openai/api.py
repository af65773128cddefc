"""The endpoints of OpenAI's API."""

from __future__ import annotations

from ..exchange import Endpoint
from .chat import answer_chat
from .chat_fields import CHAT
from .errors import error_body
from .models import answer_model, answer_models


class OpenAIApi:
    """OpenAI's API."""

    title = "OpenAI"
    prefixes = ("/v1/",)
    tables = (CHAT,)
    endpoints = (
        Endpoint(method="GET", path="/v1/models", answer=answer_models),
        Endpoint(method="GET", path="/v1/models/{model:path}", answer=answer_model),
        Endpoint(method="POST", path="/v1/chat/completions", answer=answer_chat),
    )
    error_body = staticmethod(error_body)


OPENAI = OpenAIApi()
