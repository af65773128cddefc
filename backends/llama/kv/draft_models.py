"""The models that draft for another one: the NextN layers of a model (multi-token prediction), in a
context of their own, and a draft model with its context.

At a position, the layers compute the token there with the model's hidden state of the token before,
and predict the token that follows. Behind the last token of the model, their own hidden state
stands in for the model's. `src/models/*.cpp` and `common/speculative.cpp` in llama.cpp do the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...batch import Chunk, check_chunks
from ...errors import BackendError
from ..loading.nextn import nextn_calls
from .context import Batch, LlamaContext, OwnedContext

STATES_MAX = 256
"""The hidden states of a slot that are kept, those of its last tokens. For tokens further back the
layers have no states, and predict without these tokens.
"""
STATE_BYTES = 4
"""The bytes of a number in a hidden state."""


class HiddenStates:
    """The hidden states of the last tokens of each slot, as the model has computed them. Owned by
    the model, whose context is *pointer*.
    """

    def __init__(self, pointer: Any, width: int):
        self.width = width
        self._pointer = pointer
        self._calls = nextn_calls()
        self._calls.llama_set_embeddings_nextn(pointer, True, False)
        slots = int(lib.llama_n_seq_max(pointer))
        self._states = np.zeros((slots, STATES_MAX, width), np.float32)
        """The state of token *n* is in place *n* modulo `STATES_MAX`."""
        self._spans = [range(0)] * slots
        """By slot, the tokens whose states are there."""

    def span(self, slot: int) -> range:
        """Return the tokens of a slot whose states are kept."""
        return self._spans[slot]

    def keep(self, chunks: Sequence[Chunk]) -> None:
        """Keep the states of a batch that the model's context has just computed."""
        total = sum(len(chunk.tokens) for chunk in chunks)
        pointer = self._calls.llama_get_embeddings_nextn(self._pointer)
        if not pointer:
            raise BackendError("llama.cpp returned no hidden states of the last batch")
        computed = np.ctypeslib.as_array(pointer, (total, self.width))
        done = 0
        for chunk in chunks:
            count, slot = len(chunk.tokens), chunk.slot
            done += count
            if chunk.media is not None:
                self.cut(slot, 0)
                continue
            begin, end = chunk.position, chunk.position + count
            if len(self._spans[slot]) and self._spans[slot].stop == begin:
                begin = self._spans[slot].start
            self._spans[slot] = range(max(begin, end - STATES_MAX), end)
            kept = min(count, STATES_MAX)
            self._states[slot, _places(end - kept, end)] = computed[done - kept : done]

    def read(self, slot: int, begin: int, end: int) -> NDArray[np.float32]:
        """Return the states of tokens *begin* to *end*, a row each; of zeros where one is missing,
        as before the first token.
        """
        found = np.zeros((end - begin, self.width), np.float32)
        low, high = max(begin, self._spans[slot].start), min(end, self._spans[slot].stop)
        if low < high:
            found[low - begin : high - begin] = self._states[slot, _places(low, high)]
        return found

    def cut(self, slot: int, keep: int) -> None:
        """Drop the states of all but the first *keep* tokens of a slot."""
        span = self._spans[slot]
        self._spans[slot] = span[: max(0, keep - span.start)]

    def swap(self, a: int, b: int) -> None:
        """Exchange the states of two slots."""
        self._states[[a, b]] = self._states[[b, a]]
        self._spans[a], self._spans[b] = self._spans[b], self._spans[a]


def _places(begin: int, end: int) -> NDArray[np.int64]:
    return np.arange(begin, end) % STATES_MAX


class NextnDraftModel(OwnedContext):
    """The NextN layers of a model; see `DraftModel`. *pointer* is their context, of llama.cpp's
    type MTP.
    """

    name = "mtp"
    computes_again = True

    def __init__(self, pointer: Any, states: HiddenStates, vocab_size: int):
        super().__init__(pointer)
        self.states, self.vocab_size = states, vocab_size
        self.ctx_size = int(lib.llama_n_ctx_seq(pointer))
        self.batch_size = int(lib.llama_n_batch(pointer))
        self._slots = int(lib.llama_n_seq_max(pointer))
        self._memory = lib.llama_get_memory(pointer)
        self._calls = nextn_calls()
        self._calls.llama_set_embeddings_nextn(pointer, True, True)
        self._batch = Batch(self.batch_size)
        self._lengths = dict.fromkeys(range(self._slots), 0)
        """By slot, the number of tokens that were computed with states of the model, or skipped."""
        self._ends = dict(self._lengths)
        """The same with the drafts behind them."""
        self._last = dict[int, NDArray[np.float32]]()
        """By slot, the layers' own hidden state of its last token, which was computed last."""

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds, without drafts."""
        return self._lengths[slot]

    def skip(self, slot: int, size: int) -> int:
        """Skip tokens whose states are no longer there; see `DraftModel`."""
        length, span = self._lengths[slot], self.states.span(slot)
        if span and span.start <= max(length - 1, 0):
            return length
        begin = min(span.start + 1, size) if span else size
        if begin > length:
            self.trim(slot, 0)
            self._lengths[slot] = self._ends[slot] = begin
        return self._lengths[slot]

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens of a slot; return how many remain."""
        self._last.pop(slot, None)
        if keep < self._ends[slot]:
            lib.llama_memory_seq_rm(self._memory, slot, keep or -1, -1)
            if lib.llama_memory_seq_pos_max(self._memory, slot) >= keep:
                lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
                keep = 0
            self._ends[slot] = keep
            self._lengths[slot] = min(self._lengths[slot], keep)
        return self._lengths[slot]

    def keep_states(self, slots: Sequence[int]) -> None:
        """Do nothing: the layers attend, so their states can be cut."""

    def compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute a batch; return the most probable next token of each chunk with logits.

        The last tokens are computed by themselves: a context of this type returns its own hidden
        states only for batches in which all tokens have logits (`glm4-moe.cpp`).
        """
        for chunk in chunks:  # what follows the slot's tokens replaces its drafts
            slot, place = chunk.slot, chunk.position
            if slot in self._ends and place == self._lengths[slot] < self._ends[slot]:
                self.trim(slot, place)
        limits = self.batch_size, self.ctx_size, self.vocab_size, self._slots
        check_chunks(chunks, self._ends, *limits)
        rows = {c.slot: self._states_before(c) for c in chunks}
        first, last = [], []
        for chunk in chunks:
            before = len(chunk.tokens) - chunk.logits
            if before:
                part = msgspec.structs.replace(chunk, tokens=chunk.tokens[:before], logits=0)
                first.append((part, rows[chunk.slot][:before]))
            if chunk.logits:
                place = chunk.position + before
                part = msgspec.structs.replace(chunk, tokens=chunk.tokens[before:], position=place)
                last.append((part, rows[chunk.slot][before:]))
        if first:
            self._decode(first)
        return self._predict(last) if last else []

    def _states_before(self, chunk: Chunk) -> NDArray[np.float32]:
        """Return the hidden states with which the tokens of *chunk* are computed."""
        begin, own = chunk.position - 1, self._last.get(chunk.slot)
        if (
            own is not None
            and len(chunk.tokens) == 1
            and begin >= self.states.span(chunk.slot).stop
        ):
            return own.reshape(1, -1)
        return self.states.read(chunk.slot, begin, begin + len(chunk.tokens))

    def _predict(self, parts: Sequence[tuple[Chunk, NDArray[np.float32]]]) -> list[int]:
        found = self._decode(parts)
        tokens = []
        for chunk, _ in parts:
            index = found[chunk.slot][-1]
            logits = lib.llama_get_logits_ith(self.pointer, index)
            state = self._calls.llama_get_embeddings_nextn_ith(self.pointer, index)
            if not logits or not state:
                raise BackendError("llama.cpp returned no prediction of the NextN layers")
            self._last[chunk.slot] = np.ctypeslib.as_array(state, (self.states.width,)).copy()
            tokens.append(int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()))
        return tokens

    def _decode(self, parts: Sequence[tuple[Chunk, NDArray[np.float32]]]) -> dict[int, range]:
        found = self._batch.fill([chunk for chunk, _ in parts])
        rows = np.concatenate([rows for _, rows in parts])
        batch = self._batch.struct
        batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        result = self._threads.decode(batch)
        if result != 0:
            for chunk, _ in parts:
                self.trim(chunk.slot, 0)
            raise BackendError(f"the NextN layers failed to compute (llama_decode: {result})")
        for chunk, _ in parts:
            slot, end = chunk.slot, chunk.position + len(chunk.tokens)
            drafted = chunk.position > self.states.span(slot).stop
            self._ends[slot] = end
            if not drafted:
                self._lengths[slot] = end
        return found


class LlamaDraftModel:
    """A GGUF model that drafts for another one; see `DraftModel`. It owns *pointer*, the model.
    *predicted_max* is the number of tokens that the other model has.
    """

    name = "draft"

    def __init__(self, pointer: Any, context: LlamaContext, vocab_size: int, predicted_max: int):
        self._pointer, self._context = pointer, context
        self.vocab_size = vocab_size
        self._predicted_max = min(vocab_size, predicted_max)
        self.ctx_size, self.batch_size = context.ctx_size, context.batch_size
        self.length, self.trim = context.length, context.trim
        self.set_threads = context.set_threads
        self.computes_again = context.keeps_states

    def skip(self, slot: int, size: int) -> int:
        """Skip nothing."""
        return self.length(slot)

    def keep_states(self, slots: Sequence[int]) -> None:
        """Keep the states of *slots* if they cannot be cut."""
        for slot in slots:
            self._context.keep_state(slot)

    def compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute a batch; return the most probable next tokens."""
        self._context.check(chunks)
        found = self._context.decode(chunks)
        return [self._most_probable(found[c.slot][-1]) for c in chunks if c.logits]

    def _most_probable(self, index: int) -> int:
        return int(self._context.logits_at(index)[: self._predicted_max].argmax())

    def close(self) -> None:
        """Free the context and the model; a second call does nothing."""
        self._context.close()
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            lib.llama_model_free(pointer)
