"""The echo model's draft model, which knows its answers and errs as the options request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..batch import Chunk, check_chunks
from ..errors import BackendError
from .options import EOG, VOCAB_SIZE, EchoOptions, next_token


class EchoDraftModel:
    """See `DraftModel`. *computed* counts its tokens."""

    name = "draft"
    vocab_size = VOCAB_SIZE

    def __init__(self, options: EchoOptions, slots: int, ctx_size: int, batch_size: int):
        self.ctx_size, self.batch_size = ctx_size, batch_size
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.computes_again = options.draft_whole
        self._kept = [0] * slots
        self.steps = self.computed = self._predicted = 0
        self._options = options

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return len(self.slots[slot])

    def skip(self, slot: int, size: int) -> int:
        """Skip nothing."""
        return len(self.slots[slot])

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens of a slot."""
        tokens, kept = self.slots[slot], self._kept[slot]
        if self._options.draft_whole and keep < len(tokens):
            keep = kept if kept <= keep else 0
        del tokens[keep:]
        self._kept[slot] = min(kept, len(tokens))
        return len(tokens)

    def keep_states(self, slots: Sequence[int]) -> None:
        """Keep the numbers of tokens of *slots*."""
        for slot in slots:
            self._kept[slot] = len(self.slots[slot])

    def compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the next token of each slot, or another one if this one errs."""
        lengths = {slot: len(tokens) for slot, tokens in enumerate(self.slots)}
        slots = len(self.slots)
        check_chunks(chunks, lengths, self.batch_size, self.ctx_size, VOCAB_SIZE, slots)
        self.steps += 1
        if self.steps == self._options.draft_fail_at:
            raise BackendError(f"step {self.steps} failed, as requested by draft_fail_at")
        if self._options.draft_ms > 0:
            time.sleep(self._options.draft_ms / 1000)
        found = []
        for chunk in chunks:
            tokens = self.slots[chunk.slot]
            tokens += chunk.tokens
            self.computed += len(chunk.tokens)
            if chunk.logits:
                found.append(self._predict(next_token(tokens)))
        return found

    def _predict(self, right: int) -> int:
        self._predicted += 1
        errs = self._options.draft_errs
        return (right + 1) % EOG if errs and not self._predicted % errs else right
