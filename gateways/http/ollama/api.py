"""The endpoints of Ollama's API."""

from __future__ import annotations

from ..exchange import Endpoint
from .embeddings import answer_embed, answer_embeddings
from .fields import TABLES
from .lines import ERROR_SCHEMA, error_body
from .models import (
    answer_ps,
    answer_show,
    answer_tags,
    answer_version,
    refuse,
)
from .turns import answer_chat, answer_generate

_REFUSED = ("POST create", "POST pull", "POST push", "POST copy", "DELETE delete")
_BLOBS = "/api/blobs/{digest}"


class OllamaApi:
    """Ollama's API."""

    title = "Ollama"
    prefixes = ("/api/",)
    tables = TABLES
    endpoints = (
        Endpoint(method="GET", path="/api/version", answer=answer_version, public=True),
        Endpoint(method="GET", path="/api/tags", answer=answer_tags),
        Endpoint(method="GET", path="/api/ps", answer=answer_ps),
        Endpoint(method="POST", path="/api/show", answer=answer_show),
        Endpoint(method="POST", path="/api/chat", answer=answer_chat),
        Endpoint(method="POST", path="/api/generate", answer=answer_generate),
        Endpoint(method="POST", path="/api/embed", answer=answer_embed),
        Endpoint(method="POST", path="/api/embeddings", answer=answer_embeddings),
        *(
            Endpoint(method=method, path=f"/api/{name}", answer=refuse)
            for method, name in map(str.split, _REFUSED)
        ),
        Endpoint(method="HEAD", path=_BLOBS, answer=refuse),
        Endpoint(method="POST", path=_BLOBS, answer=refuse),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


OLLAMA = OllamaApi()
