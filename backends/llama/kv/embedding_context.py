"""Embeddings: a second context over the same weights, in which the first one's slots are not.

Switched on in the first context, embeddings would cost every step of a generation 4 times its time
and 1 GB on Gemma 3. The second one leaves all rows of a step, and pools them here, so that a text
may come in chunks and each request have its own pooling; `rank` alone is llama.cpp's. Its sequences
share the cells of one text of full length (`kv_unified`): else llama.cpp would cut a batch of
chunks that are not equally long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from ...batch import Chunk
from ...embedder import EMBED_BATCH_TOKENS, EMBED_SLOTS, POOLINGS, EmbedInfo, Pool, check_pooling
from ...errors import BackendError
from ...model_spec import ModelSpec
from ..llama_log import LogRing
from ..loading.opening import LlamaOptions, context_params, ctx_size_of, new_context
from ..threads import ComputeThreads
from .context import Batch


def embed_info(spec: ModelSpec, model: Any, first: Any, values: Mapping[str, object]) -> EmbedInfo:
    """Return how *model* makes embeddings, by its *first* context and the *values* of its file."""
    own = values.get(f"{values.get('general.architecture')}.pooling_type")
    parts = bool(lib.llama_get_memory(first)) and bool(lib.llama_get_causal_attn(first))
    tokens_max = ctx_size_of(spec, model)
    rows_max = min(EMBED_BATCH_TOKENS, spec.batch_size)
    if not parts:  # llama.cpp aborts where a text comes in parts, or is longer than was trained
        trained = int(lib.llama_model_n_ctx_train(model))
        rows_max = tokens_max = min(tokens_max, trained, spec.batch_size)
    known = isinstance(own, int) and 0 < own < len(POOLINGS)
    return EmbedInfo(
        size=int(lib.llama_model_n_embd_out(model)),
        slots=EMBED_SLOTS,
        batch_tokens_max=rows_max,
        tokens_max=tokens_max,
        pooling=POOLINGS[own] if known and isinstance(own, int) else "mean",
        whole=not parts,
    )


def open_embedding_context(
    spec: ModelSpec, options: LlamaOptions, model: Any, info: EmbedInfo, log: LogRing
) -> Any:
    """Return a new context on *model* that makes embeddings; the caller frees it.

    :raises OutOfMemory: there is no memory for it.
    :raises LoadFailed: llama.cpp refuses it.
    """
    params = context_params(spec, options, model)
    params.n_ctx, params.n_seq_max, params.kv_unified = info.tokens_max, info.slots, True
    params.n_batch = params.n_ubatch = params.n_outputs_max = info.batch_tokens_max
    params.embeddings = True
    rank = info.pooling == "rank"
    params.pooling_type = lib.LLAMA_POOLING_TYPE_RANK if rank else lib.LLAMA_POOLING_TYPE_NONE
    return new_context(spec, params, model, log)


def output_bytes(info: EmbedInfo, model: Any) -> int:
    """Return what a step leaves, logits of each row, too: with the first one it grows to that."""
    vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
    return 4 * info.batch_tokens_max * (vocab_size + info.size)


class LlamaEmbedder:
    """See `Embedder`. The model must outlive it."""

    def __init__(self, pointer: Any, model: Any, info: EmbedInfo):
        self._pointer, self._info = pointer, info
        self._memory = lib.llama_get_memory(pointer)
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        self._ranks = int(lib.llama_model_n_cls_out(model))
        self._batch = Batch(info.batch_tokens_max)
        self._threads = ComputeThreads(pointer)
        self._pools: dict[int, Pool] = {}
        self._lengths: dict[int, int] = {}

    @property
    def info(self) -> EmbedInfo:
        """What it can do."""
        return self._info

    def start_text(self, slot: int, pooling: str) -> None:
        """Empty a slot for another text."""
        if not 0 <= slot < self._info.slots:
            raise BackendError(f"slot {slot} is not one of {self._info.slots}")
        self.clear_slot(slot)
        self._pools[slot] = Pool(check_pooling(self._info, pooling))
        self._lengths[slot] = 0

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Compute one batch; see `Embedder.step`."""
        self._check(chunks)
        self._batch.fill(chunks, every=True)
        self._threads.begin()
        result = lib.llama_decode(self._pointer, self._batch.struct)
        if result != 0:
            raise BackendError(f"llama.cpp failed to compute embeddings ({result})")
        self._threads.settle()
        rows = self._rows(sum(len(chunk.tokens) for chunk in chunks))
        for chunk in chunks:
            count = len(chunk.tokens)
            rank = self._info.pooling == "rank"
            self._pools[chunk.slot].add_vectors([self._rank(chunk.slot)] if rank else rows[:count])
            self._lengths[chunk.slot] += count
            del rows[:count]

    def _check(self, chunks: Sequence[Chunk]) -> None:
        """Refuse a batch that llama.cpp would abort the process for, or do wrong."""
        slots = [chunk.slot for chunk in chunks]
        rows = sum(len(chunk.tokens) for chunk in chunks)
        if slots != sorted(set(slots)) or not set(slots) <= set(self._lengths):
            raise BackendError(f"slots {slots}, of which {sorted(self._lengths)} have texts")
        if not 0 < rows <= self._info.batch_tokens_max:
            raise BackendError(
                f"a batch of {rows} rows; 1 … {self._info.batch_tokens_max} are possible"
            )
        if sum(self._lengths.values()) + rows > self._info.tokens_max:
            raise BackendError(f"{rows} tokens more than there is room for")
        for chunk in chunks:
            if not chunk.tokens or chunk.position != self._lengths[chunk.slot]:
                raise BackendError(f"position {chunk.position} in slot {chunk.slot}")
            if min(chunk.tokens) < 0 or max(chunk.tokens) >= self._vocab_size:
                raise BackendError(f"a token outside 0 … {self._vocab_size - 1}")

    def _rows(self, count: int) -> list[list[float]]:
        """Return the rows of the batch in its order; a context of ranks has none."""
        if self._info.pooling == "rank":
            return []
        found = lib.llama_get_embeddings(self._pointer)
        if not found:
            raise BackendError("llama.cpp has left no embeddings")
        rows: list[list[float]] = np.ctypeslib.as_array(found, (count, self._info.size)).tolist()
        return rows

    def _rank(self, slot: int) -> list[float]:
        found = lib.llama_get_embeddings_seq(self._pointer, slot)
        if not found:
            raise BackendError("llama.cpp has left no rank")
        return list(found[: self._ranks])

    def take_embedding(self, slot: int, normalize: int) -> bytes:
        """Return what the slot's text has become, and empty the slot."""
        result = self._pools[slot].result(normalize)
        self.clear_slot(slot)
        return result

    def clear_slot(self, slot: int) -> None:
        """Empty a slot."""
        self._pools.pop(slot, None)
        if self._lengths.pop(slot, None) is not None and self._memory:
            lib.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def set_threads(self, threads: int) -> None:
        """Use this many threads from the next step on."""
        self._threads.use(threads)

    def close(self) -> None:
        """Free the context; twice is once."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            lib.llama_free(pointer)
            self._threads.close()
