"""A draft model with its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as lib

from ...batch import Chunk
from .context import LlamaContext


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
