"""Reranking, in the form of Cohere and Jina (`documents`) or of Text Embeddings Inference
(`texts`). Every path accepts both, as in llama-server.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from ...backends.errors import InferdError
from ...ipc.client.reranking import Ranking
from ...ipc.names import Priority
from .exchange import Endpoint, Exchange, usable_models
from .fields import FieldTable, field_error, honoured, ignored, refused
from .openai.forms import ERROR_SCHEMA as OPENAI_ERROR_SCHEMA
from .openai.forms import error_body as openai_error_body

DOCUMENTS_MAX = 1000
"""The most that Cohere recommends."""
_Documents = Annotated[
    list[Any],
    Meta(min_length=1, max_length=DOCUMENTS_MAX, extra_json_schema={"items": {}}),
]
"""Texts, or objects with a text, which are checked one by one."""


class RerankRequest(Struct, kw_only=True):
    """The fields of a request to order documents."""

    query: str
    model: str = ""
    documents: _Documents | UnsetType = UNSET
    texts: _Documents | UnsetType = UNSET
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False
    raw_scores: bool = False
    truncate: bool | None = None
    truncation: bool | None = None
    priority: Priority | int | None = None


_FIELDS = (
    honoured("model", "without it, the only model that the caller may use"),
    honoured("query"),
    honoured("documents", "up to 1000 texts, or objects with a `text`"),
    honoured("texts", "Text Embeddings Inference: in place of `documents`; the answer is a list"),
    honoured("top_n", "how many documents to return; by default all"),
    honoured("return_documents", "whether the answer has the documents, too"),
    honoured("return_text", "with `texts`: whether the answer has the texts, too"),
    honoured(
        "raw_scores",
        "whether scores are the model's outputs; by default they are from 0 to 1: the sigmoid of"
        " the outputs, unless these are probabilities",
    ),
    honoured(
        "truncate",
        "whether the end of a document that is too long is left out, instead of refusing it; by"
        " default true, with `texts` false",
    ),
    honoured("truncation", "as `truncate`"),
    honoured(
        "priority", "extension: `low`, `normal`, `high` or `urgent`; a number has no effect", 0
    ),
    refused("truncation_direction", "the end of a document is left out", "Right", "right"),
    refused("rank_fields", "of a document that is an object, the text is ranked", [], ["text"]),
    refused("relevant_spans", "a document has one score", {}),
    refused("return_embeddings", "a reranking model makes none", False),
    ignored("max_tokens_per_doc", "documents are truncated to what the model reads at once"),
    ignored("max_chunks_per_doc", "a document is one chunk"),
    ignored("max_doc_length", "documents are truncated to what the model reads at once"),
    ignored("max_query_length", "a query that is too long is refused"),
    ignored("user", "the key names the user"),
)
PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
TABLES = tuple(FieldTable(path, _FIELDS, kind=RerankRequest) for path in PATHS)


async def answer_rerank(exchange: Exchange) -> None:
    """Answer with the documents by descending score."""
    table = TABLES[PATHS.index(exchange.path)]
    request, _ = exchange.read_fields(table)
    field = "documents" if request.texts is UNSET else "texts"
    documents = _texts_of(request, field)
    caller = exchange.caller
    given = request.priority if isinstance(request.priority, str) else None
    truncate = request.truncation if request.truncate is None else request.truncate
    try:
        ranking = await exchange.turns.rerank(
            caller,
            request.model or await _only_model(exchange),
            request.query,
            documents,
            caller.class_of(given),
            top_n=request.top_n,
            truncate=field == "documents" if truncate is None else truncate,
        )
    except InferdError as exc:
        if "index" in exc.data:
            exc.data["param"] = f"{field}.{exc.data['index']}"
        raise table.name_field(exc) from None
    if field == "texts":
        await exchange.send_json(
            _list_of(request, ranking), headers=[(b"x-compute-tokens", b"%d" % ranking.tokens)]
        )
    else:
        await exchange.send_json(_answer_of(request, ranking))


def _texts_of(request: RerankRequest, field: str) -> list[str]:
    """Return the documents of a request, of which objects have a text."""
    documents = request.documents if field == "documents" else request.texts
    if documents is UNSET:
        raise field_error("documents", "documents: there are none", hint="send a list of texts")
    if request.documents is not UNSET and request.texts is not UNSET:
        raise field_error("texts", "texts: the request has documents, too", hint="send one of them")
    found = []
    for number, document in enumerate(documents):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            name = f"{field}.{number}"
            raise field_error(name, f"{name} is neither a text nor an object with a text")
        found.append(text)
    return found


async def _only_model(exchange: Exchange) -> str:
    """Return the only model that the caller may use."""
    models = [info["name"] for info in await usable_models(exchange)]
    if len(models) != 1:
        raise field_error(
            "model", f"model: it is missing, and there are {len(models)} models", hint="name one"
        )
    return models[0]


def _scores(request: RerankRequest, ranking: Ranking) -> Sequence[float]:
    return [one.raw_score if request.raw_scores else one.score for one in ranking]


def _list_of(request: RerankRequest, ranking: Ranking) -> list[dict[str, Any]]:
    """Return an answer in the form of Text Embeddings Inference."""
    return [
        {"index": one.index, "score": score}
        | ({"text": one.document} if request.return_text or request.return_documents else {})
        | ({"truncated": True} if one.index in ranking.truncated else {})
        for one, score in zip(ranking, _scores(request, ranking), strict=True)
    ]


def _answer_of(request: RerankRequest, ranking: Ranking) -> dict[str, Any]:
    """Return an answer in the form of Cohere and Jina."""
    results = [
        {"index": one.index, "relevance_score": score}
        | ({"document": {"text": one.document}} if request.return_documents else {})
        for one, score in zip(ranking, _scores(request, ranking), strict=True)
    ]
    tokens = {"input_tokens": ranking.tokens, "output_tokens": 0}
    meta = {"tokens": tokens, "cached_tokens": ranking.cached_tokens}
    if ranking.truncated:
        places = ", ".join(map(str, ranking.truncated))
        meta["warnings"] = [f"the end of these documents was left out: {places}"]
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": request.model or ranking.model,
        "results": results,
        "truncated": ranking.truncated,
        "usage": {"prompt_tokens": ranking.tokens, "total_tokens": ranking.tokens},
        "meta": meta,
    }


def _error_body(error: InferdError, status: int) -> dict[str, Any]:
    """Return the body of an error: OpenAI's, with the message where Cohere has it, too."""
    return openai_error_body(error, status) | {"message": error.text_for_people}


class RerankingApi:
    """Reranking."""

    title = "Reranking"
    prefixes = PATHS
    tables = TABLES
    endpoints = tuple(Endpoint(method="POST", path=path, answer=answer_rerank) for path in PATHS)
    error_schema = OPENAI_ERROR_SCHEMA
    error_body = staticmethod(_error_body)


RERANKING = RerankingApi()
