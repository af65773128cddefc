"""Embeddings: the asynchronous client's call, and its result."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, Unpack

from ...backends.errors import InferdError, InvalidArgument, ProtocolError, Timeout
from ...wire.frames import FRAME_BYTES_MAX
from .. import messages as w
from ..payloads import ENVELOPE_BYTES, Config, json_text
from .caller import CLOSE_S_MAX
from .operations import AsyncOperations
from .turn_settings import (
    SchedulingKeywords,
    TurnSettings,
    read_settings,
    takes,
    wire_seconds,
)
from .wasi_calls import ProgressCallback

ResultT = TypeVar("ResultT")
TEXTS_PER_CALL = 64
"""This many vectors of 16 384 numbers fit in an answer."""
TEXTS_BYTES_MAX = FRAME_BYTES_MAX - ENVELOPE_BYTES
_TEXT_HEADER_BYTES = 5


class Embeddings(list[list[float]]):
    """The vectors of texts, one per text in their order, or without pooling one per token.

    `by_text` has the vectors of each text separately.
    """

    def __init__(
        self,
        by_text: Iterable[list[list[float]]],
        tokens: Sequence[int],
        truncated: Sequence[int],
        result: w.EmbedResult,
    ):
        self.by_text = list(by_text)
        super().__init__(vector for vectors in self.by_text for vector in vectors)
        self.tokens = list(tokens)
        """The number of tokens of each text."""
        self.truncated = list(truncated)
        """The indexes of the texts whose end was left out."""
        self.size = result.size
        """The number of dimensions of a vector."""
        self.pooling = result.pooling
        self.model = result.model
        self.fingerprint = result.fingerprint


class AsyncEmbedding(AsyncOperations):
    """The client's call for embeddings."""

    @takes(SchedulingKeywords)
    async def embed(
        self,
        model: str | int,
        texts: str | Iterable[str],
        *,
        pooling: str = "",
        normalize: int = 2,
        truncate: bool = False,
        config: Config | None = None,
        on_progress: ProgressCallback | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> Embeddings:
        """Return the embeddings of one or more *texts* by *model*, a name or a loaded graph.

        *pooling* is none, mean, cls, last or rank; the default is the model's own, else mean.
        *normalize* is -1 for none, 0 to scale the largest number to 32760, 1 taxicab, 2 euclidean,
        p for the p-norm. With *truncate* the end of texts that are too long is left out; otherwise
        they are refused. *config* and *on_progress* are as in `session`; *timeout* is for all
        texts.
        """
        every = [texts] if isinstance(texts, str) else list(texts)
        if not every or not all(isinstance(text, str) for text in every):
            raise InvalidArgument("embed takes a text or several", hint='pass ["one", "another"]')
        settings = read_settings(self._seconds(None), keywords, taken=SchedulingKeywords)
        params = settings.add_scheduling(
            w.EmbedParams(
                graph=0, texts=[], pooling=pooling, normalize=normalize, truncate=truncate
            )
        )
        embed = partial(self._embed, params, every, time.monotonic() + settings.timeout_s)
        return await self._on_graph(model, config, on_progress, settings, embed)

    async def _on_graph(
        self,
        model: str | int,
        config: Config | None,
        on_progress: ProgressCallback | None,
        settings: TurnSettings,
        call: Callable[[int], Awaitable[ResultT]],
    ) -> ResultT:
        """Return the result of *call* with a graph of *model*, which may be a graph."""
        if not isinstance(model, str):
            return await call(model)
        graph = await self.load_by_name_with_config(
            model, json_text(config), on_progress=on_progress, timeout=settings.timeout
        )
        try:
            return await call(graph)
        finally:
            if self.connected:
                with self._driver.shield(), suppress(Timeout):
                    await self.unload(graph, keep=True, timeout=CLOSE_S_MAX)

    async def _embed(
        self, params: w.EmbedParams, texts: Sequence[str], deadline: float, graph: int
    ) -> Embeddings:
        params.graph = graph
        by_text: list[list[list[float]]] = []
        tokens: list[int] = []
        truncated: list[int] = []
        texts_max = 1 if params.pooling == "none" else TEXTS_PER_CALL
        for params.texts in in_batches(texts, texts_max, TEXTS_BYTES_MAX):
            remaining_s = deadline - time.monotonic()
            params.timeout_s = wire_seconds(max(remaining_s, 0.001))
            with index_from(len(by_text), "text"):
                result = await self._call("embed", params, w.EmbedResult, remaining_s)
            truncated += [len(by_text) + index for index in result.truncated]
            by_text += [_vectors(data, result.size) for data in result.embeddings]
            tokens += result.tokens
        if len(by_text) != len(texts):
            raise ProtocolError(f"{len(by_text)} embeddings for {len(texts)} texts")
        return Embeddings(by_text, tokens, truncated, result)


@contextmanager
def index_from(first: int, kind: str) -> Iterator[None]:
    """Have the error of a call whose texts are those from *first* on name its text, a *kind*."""
    try:
        yield
    except InferdError as exc:
        if "index" in exc.data:  # of the call's texts
            exc.data["index"] += first
            exc.message = f"{kind} {exc.data['index']}: {exc.message}"
        raise


def in_batches(texts: Iterable[str], texts_max: int, bytes_max: int) -> Iterator[list[str]]:
    """Yield the texts in lists of at most *texts_max* and, unless a text is longer, *bytes_max*."""
    batch: list[str] = []
    free = bytes_max
    for text in texts:
        size = len(text.encode(errors="replace")) + _TEXT_HEADER_BYTES
        if batch and (len(batch) == texts_max or size > free):
            yield batch
            batch, free = [], bytes_max
        batch.append(text)
        free -= size
    yield batch


def _vectors(data: bytes, size: int) -> list[list[float]]:
    numbers: Any = array("f")
    if size < 1 or len(data) % (size * numbers.itemsize):
        raise ProtocolError(f"{len(data)} bytes cannot be vectors of {size} numbers")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    plain: list[float] = numbers.tolist()
    return [plain[i : i + size] for i in range(0, len(plain), size)]
