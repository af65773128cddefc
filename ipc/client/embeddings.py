"""Embeddings, as the asynchronous client makes them."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import anyio

from ...backends.errors import InvalidArgument, ProtocolError
from .. import messages as w
from ..payloads import Config, Priority, json_text
from ..traceparent import traceparent_of
from .caller import CLOSE_S_MAX
from .operations import AsyncOperations
from .turn_settings import wire_seconds
from .wasi_calls import ProgressCallback

TEXTS = 64
"""Texts of one call: so many vectors of 16 384 numbers fit its answer."""


class Embeddings(list[list[float]]):
    """The vectors of texts: one a text, in their order. Without pooling one a token; those of each
    text are then apart in `by_text`.
    """

    def __init__(
        self, by_text: Iterable[list[list[float]]], tokens: Sequence[int], result: w.EmbedResult
    ):
        self.by_text = list(by_text)
        super().__init__(vector for vectors in self.by_text for vector in vectors)
        self.tokens = list(tokens)
        """Tokens of each text."""
        self.size = result.size
        """Numbers of a vector."""
        self.pooling = result.pooling
        self.model = result.model
        self.fingerprint = result.fingerprint


class AsyncEmbedding(AsyncOperations):
    """The calls that make embeddings."""

    async def embed(
        self,
        model: str | int,
        texts: str | Iterable[str],
        *,
        pooling: str = "",
        normalize: int = 2,
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        traceparent: str | None = None,
        config: Config | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> Embeddings:
        """Return the embeddings of *texts*, or of one text, made by *model*: by its name, or by a
        graph that is loaded.

        *pooling* is none, mean, cls, last or rank; without one the model's own, or mean.
        *normalize* is -1 for none, 0 for a greatest number of 32760, 1 taxicab, 2 euclidean, p for
        the p-norm. *config* and *on_progress* are as in `session`, *timeout* holds for all texts.
        """
        every = [texts] if isinstance(texts, str) else list(texts)
        if not every or not all(isinstance(text, str) for text in every):
            raise InvalidArgument("embed takes a text or some texts", hint='["one", "another"]')
        params = w.EmbedParams(
            graph=0,
            texts=[],
            pooling=pooling,
            normalize=normalize,
            priority=priority or "",
            queue_timeout_s=queue_timeout or 0.0,
            traceparent=traceparent_of(traceparent),
        )
        deadline = time.monotonic() + self.seconds(timeout)
        if not isinstance(model, str):
            params.graph = model
            return await self._embed(params, every, deadline)
        graph = await self.load_by_name_with_config(
            model, json_text(config), on_progress=on_progress, timeout=timeout
        )
        try:
            params.graph = graph
            return await self._embed(params, every, deadline)
        finally:
            with anyio.move_on_after(CLOSE_S_MAX, shield=True):
                if not self.connection.lost:
                    await self.unload(graph, keep=True)

    async def _embed(
        self, params: w.EmbedParams, texts: Sequence[str], deadline: float
    ) -> Embeddings:
        by_text: list[list[list[float]]] = []
        tokens: list[int] = []
        at_once = 1 if params.pooling == "none" else TEXTS
        for part in _parts(texts, at_once):
            params.texts = part
            left = deadline - time.monotonic()
            params.timeout_s = wire_seconds(max(left, 0.001))
            result = await self.call("embed", params, w.EmbedResult, left)
            by_text += [_vectors(data, result.size) for data in result.embeddings]
            tokens += result.tokens
        if len(by_text) != len(texts):
            raise ProtocolError(f"{len(by_text)} embeddings for {len(texts)} texts")
        return Embeddings(by_text, tokens, result)


def _parts(items: Sequence[str], size: int) -> Iterator[list[str]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


def _vectors(data: bytes, size: int) -> list[list[float]]:
    numbers: Any = array("f")
    if size < 1 or len(data) % (size * numbers.itemsize):
        raise ProtocolError(f"{len(data)} bytes are no vectors of {size} numbers")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    plain: list[float] = numbers.tolist()
    return [plain[i : i + size] for i in range(0, len(plain), size)]
