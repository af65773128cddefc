"""The endpoints of llama-server's own paths. Their errors have OpenAI's shape."""

from __future__ import annotations

from ..exchange import Endpoint
from ..openai.forms import ERROR_SCHEMA, error_body
from .fields import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE
from .infill import INFILL, answer_infill
from .tokens import answer_apply_template, answer_detokenize, answer_tokenize


class LlamaServerApi:
    """llama-server's own paths."""

    title = "llama-server"
    prefixes = ("/infill", "/tokenize", "/detokenize", "/apply-template")
    tables = (INFILL, TOKENIZE, DETOKENIZE, APPLY_TEMPLATE)
    endpoints = (
        Endpoint(method="POST", path="/infill", answer=answer_infill),
        Endpoint(method="POST", path="/tokenize", answer=answer_tokenize),
        Endpoint(method="POST", path="/detokenize", answer=answer_detokenize),
        Endpoint(method="POST", path="/apply-template", answer=answer_apply_template),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


LLAMA_SERVER = LlamaServerApi()
