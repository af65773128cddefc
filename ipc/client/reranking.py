"""Reranking: the asynchronous client's call, and its result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from ...backends.errors import Busy, InvalidArgument, ProtocolError
from .. import messages as w
from ..payloads import Config
from .embeddings import TEXTS_BYTES_MAX, AsyncEmbedding, in_batches, index_from
from .turn_settings import SchedulingKeywords, read_settings, takes, wire_seconds
from .wasi_calls import ProgressCallback


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document with its score."""

    index: int
    """Its place in the request, from 0."""
    score: float
    """0 … 1: `raw_score` if the model returns probabilities, else its sigmoid."""
    raw_score: float
    """The model's output."""
    document: str


class Ranking(list[RankedDocument]):
    """Documents by descending score."""

    def __init__(self, documents: Iterable[RankedDocument], results: Sequence[w.RerankResult]):
        super().__init__(documents)
        self.truncated: list[int] = []
        """The indexes of the documents whose end was left out."""
        self.tokens = sum(result.tokens for result in results)
        """The number of tokens of all documents, each with the query."""
        self.cached_tokens = sum(result.cached_tokens for result in results)
        """Of these, the tokens of the query that were not computed again for each document."""
        self.model = results[0].model
        self.fingerprint = results[0].fingerprint


class AsyncReranking(AsyncEmbedding):
    """The client's call for reranking."""

    @takes(SchedulingKeywords)
    async def rerank(
        self,
        model: str | int,
        query: str,
        documents: Iterable[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        config: Config | None = None,
        on_progress: ProgressCallback | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> Ranking:
        """Return *documents* by their score for *query*, which a reranking *model* computes, a name
        or a loaded graph.

        *top_n* is the number of documents to return, by default all. With *truncate* the end of
        documents that are too long is left out; otherwise they are refused. *config* and
        *on_progress* are as in `session`; *timeout* is for all documents.
        """
        every = list(documents) if not isinstance(documents, str) else []
        if not every or not all(isinstance(text, str) for text in (query, *every)):
            raise InvalidArgument(
                "rerank takes a query and several documents", hint='pass ["one", "another"]'
            )
        if top_n is not None and top_n < 1:
            raise InvalidArgument(f"top_n is {top_n}", hint="leave it out for all documents")
        settings = read_settings(self._seconds(None), keywords, taken=SchedulingKeywords)
        params = settings.add_scheduling(
            w.RerankParams(graph=0, query=query, documents=[], top_n=top_n or 0, truncate=truncate)
        )
        deadline = time.monotonic() + settings.timeout_s
        rank = partial(self._rerank, params, every, deadline)
        return await self._on_graph(model, config, on_progress, settings, rank)

    async def _rerank(
        self, params: w.RerankParams, documents: Sequence[str], deadline: float, graph: int
    ) -> Ranking:
        params.graph = graph
        found: list[RankedDocument] = []
        results: list[w.RerankResult] = []
        truncated: list[int] = []
        begin = 0
        free = TEXTS_BYTES_MAX - len(params.query.encode(errors="replace"))
        for params.documents in in_batches(documents, w.RERANK_DOCUMENTS_MAX, free):
            remaining_s = deadline - time.monotonic()
            params.timeout_s = wire_seconds(max(remaining_s, 0.001))
            with index_from(begin, "document"):
                result = await self._call("rerank", params, w.RerankResult, remaining_s)
            if not len(result.indexes) == len(result.scores) == len(result.raw_scores):
                raise ProtocolError("the numbers of documents and scores differ")
            for index, score, raw_score in zip(
                result.indexes, result.scores, result.raw_scores, strict=True
            ):
                if not 0 <= index < len(params.documents):
                    raise ProtocolError(f"there is no document {index}")
                text = params.documents[index]
                found.append(RankedDocument(begin + index, score, raw_score, text))
            truncated += [begin + index for index in result.truncated]
            results.append(result)
            begin += len(params.documents)
        if len({result.fingerprint for result in results}) > 1:
            raise Busy(
                "the model was swapped while it ranked the documents", hint="repeat the call"
            )
        found.sort(key=lambda one: (-one.raw_score, one.index))
        ranking = Ranking(found[: params.top_n or None], results)
        ranking.truncated = truncated
        return ranking
