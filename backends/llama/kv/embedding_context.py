"""The embedding context: a second context over the same weights, with slots of its own.

With embeddings enabled in the first context, each step of a generation would take 4 times as long,
and 1 GB more on Gemma 3. This context outputs a vector for every token of a step. They are pooled
here, so that a text may arrive in chunks and each request may have its own pooling; llama.cpp does
only `rank`. The sequences share the cells of one text of full length (`kv_unified`), because
llama.cpp would otherwise split a batch whose chunks differ in length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from ...batch import Chunk
from ...embedder import (
    EMBED_BATCH_TOKENS,
    EMBED_SLOTS,
    POOLINGS,
    PREFIXES,
    EmbeddingSlots,
    EmbedInfo,
)
from ...engine_options import EngineOptions
from ...errors import BackendError
from ...model_spec import ModelSpec
from ..llama_log import LogRing
from ..loading.opening import FLASH_ATTENTION, context_params, ctx_size_of, open_context
from ..text.rank_parts import rank_parts
from .context import Batch, OwnedContext


def _own_pooling(values: Mapping[str, object]) -> int:
    """Return the pooling type that a file's *values* name, or llama.cpp's number for none."""
    own = values.get(f"{values.get('general.architecture')}.pooling_type")
    return own if isinstance(own, int) else int(lib.LLAMA_POOLING_TYPE_UNSPECIFIED)


def embed_info(spec: ModelSpec, model: Any, first: Any, values: Mapping[str, object]) -> EmbedInfo:
    """Return how *model* makes embeddings, from its *first* context and its file's *values*."""
    own = _own_pooling(values)
    whole = not (lib.llama_get_memory(first) and lib.llama_get_causal_attn(first))
    tokens_max = ctx_size_of(spec, model)
    batch_tokens_max = min(EMBED_BATCH_TOKENS, spec.batch_size)
    if whole:  # llama.cpp aborts for a text in several steps, or one longer than trained
        trained = int(lib.llama_model_n_ctx_train(model))
        batch_tokens_max = tokens_max = min(tokens_max, trained, spec.batch_size)
    pooling = POOLINGS[own] if 0 < own < len(POOLINGS) else "mean"
    ranks, copies = pooling == "rank", not whole and _copies_prefixes(model)
    return EmbedInfo(
        size=int(lib.llama_model_n_embd_out(model)),
        slots=EMBED_SLOTS,
        batch_tokens_max=batch_tokens_max,
        tokens_max=tokens_max,
        pooling=pooling,
        whole=whole,
        prefixes=PREFIXES if ranks and copies else 0,
        rank_parts=rank_parts(model) if ranks else (),
        rank_is_probability=values.get("general.architecture") in _SOFTMAX,
    )


_SOFTMAX = ("qwen3", "qwen3vl")
"""The architectures of which llama.cpp returns the softmax of the scores (`build_pooling`)."""


def _copies_prefixes(model: Any) -> bool:
    """Return whether a copy of some of a sequence's cells is the state after these tokens: not in
    recurrent memory, nor if old cells are reused for those in the window.
    """
    recurrent = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
    return not recurrent and not lib.llama_model_n_swa(model)


_BROKEN = {
    **dict.fromkeys(("deepseek4", "qwen4exp"), "llama.cpp would read them past their end"),
    "plamo2": "llama.cpp mixes up the texts that are computed together",
}
"""By architecture, the reason why its embeddings cannot be computed."""


def embedding_refusal(values: Mapping[str, object], start_token: int | None) -> str:
    """Return the reason why a model whose file has *values* makes no embeddings; else an empty
    text. An encoder-decoder has a *start_token*.
    """
    if start_token is not None:
        return "its encoder serves only its decoder"
    return _BROKEN.get(str(values.get("general.architecture")), "")


def open_embedding_context(
    spec: ModelSpec,
    options: EngineOptions,
    model: Any,
    info: EmbedInfo,
    values: Mapping[str, object],
    log: LogRing,
) -> Any:
    """Return a new context for embeddings on *model*, whose file has *values*; see `open_context`.

    llama.cpp warns if the pooling differs from the file's, and takes none if neither is specified.
    """
    params = context_params(spec, options, model)
    params.n_ctx, params.kv_unified = info.tokens_max, True
    params.n_seq_max = info.slots + info.prefixes
    params.n_batch = params.n_ubatch = params.n_outputs_max = info.batch_tokens_max
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]  # its batches are large
    params.embeddings = True
    own = _own_pooling(values)
    none = own if own < 0 else lib.LLAMA_POOLING_TYPE_NONE
    params.pooling_type = lib.LLAMA_POOLING_TYPE_RANK if info.pooling == "rank" else none
    return open_context(spec, params, model, log)


def output_bytes(info: EmbedInfo, model: Any) -> int:
    """Return the bytes of a step's outputs, including the logits of each token.

    The context grows by them at its first step.
    """
    vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
    return 4 * info.batch_tokens_max * (vocab_size + info.size)


class LlamaEmbedder(OwnedContext, EmbeddingSlots):
    """The `Embedder` of a llama.cpp model."""

    def __init__(self, pointer: Any, model: Any, info: EmbedInfo):
        OwnedContext.__init__(self, pointer)
        vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        EmbeddingSlots.__init__(self, info, vocab_size)
        self._memory = lib.llama_get_memory(pointer)
        self._ranks = int(lib.llama_model_n_cls_out(model))
        self._batch = Batch(info.batch_tokens_max)

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Compute one batch; see `Embedder.step`."""
        self.check_batch(chunks)
        self._batch.fill(chunks, all_outputs=True)
        result = self._threads.decode(self._batch.struct)
        if result != 0:
            raise BackendError(f"llama.cpp failed to compute embeddings ({result})")
        for chunk, vectors in zip(chunks, self._outputs(chunks), strict=True):
            self.add_vectors(chunk, vectors)

    def _outputs(self, chunks: Sequence[Chunk]) -> list[list[list[float]]]:
        """Return for each chunk the vectors of its tokens, or, with `rank`, only the rank."""
        if self.info.pooling == "rank":
            return [[self._rank(chunk.slot)] for chunk in chunks]
        found = lib.llama_get_embeddings(self.pointer)
        if not found:
            raise BackendError("llama.cpp returned no embeddings")
        count = sum(len(chunk.tokens) for chunk in chunks)
        vectors = iter(np.ctypeslib.as_array(found, (count, self.info.size)).tolist())
        return [list(islice(vectors, len(chunk.tokens))) for chunk in chunks]

    def _rank(self, slot: int) -> list[float]:
        found = lib.llama_get_embeddings_seq(self.pointer, slot)
        if not found:
            raise BackendError("llama.cpp returned no rank")
        return list(found[: self._ranks])

    def keep_prefix(self, place: int, slot: int, tokens: int) -> None:
        """Keep the state of a slot's first tokens; see `Embedder.keep_prefix`."""
        super().keep_prefix(place, slot, tokens)
        try:
            self._copy_cells(slot, self.info.slots + place, tokens)
        except BackendError:
            self.clear_prefix(place)
            raise

    def copy_prefix(self, place: int, slot: int, tokens: int) -> None:
        """Begin a slot's text with a prefix; see `Embedder.copy_prefix`."""
        super().copy_prefix(place, slot, tokens)
        self._copy_cells(self.info.slots + place, slot, tokens)

    def _copy_cells(self, from_: int, to: int, tokens: int) -> None:
        """Make the cells of a sequence's first tokens those of another one, too. They are copied by
        reference and at once, because all sequences share one stream (`kv_unified`).
        """
        lib.llama_memory_seq_cp(self._memory, from_, to, 0, tokens)
        begin = lib.llama_memory_seq_pos_min(self._memory, to)
        end = lib.llama_memory_seq_pos_max(self._memory, to)
        if (begin, end) != (0, tokens - 1):
            raise BackendError(f"llama.cpp copied the tokens {begin} to {end} instead of {tokens}")

    def clear_prefix(self, place: int) -> None:
        """Clear a place of prefixes and its KV state."""
        if place in self._prefixes:
            lib.llama_memory_seq_rm(self._memory, self.info.slots + place, -1, -1)
        super().clear_prefix(place)

    def clear_slot(self, slot: int) -> None:
        """Clear a slot and its KV state."""
        if slot in self._lengths and self._memory:
            lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        super().clear_slot(slot)
