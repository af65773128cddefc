"""The endpoints of the daemon's own paths. Their errors have OpenAI's shape."""

from __future__ import annotations

from ..exchange import Endpoint
from ..openai.errors import ERROR_SCHEMA, error_body
from .queue import answer_queue


class InferdApi:
    """The daemon's own paths."""

    title = "inferd"
    prefixes = ("/v1/inferd/",)
    tables = ()
    endpoints = (Endpoint(method="GET", path="/v1/inferd/queue", answer=answer_queue),)
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


INFERD = InferdApi()
