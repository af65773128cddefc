"""The context of encoders: models without a KV state, which only make embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from ...batch import Chunk
from ...errors import UnsupportedOperation
from .context import LlamaContext


class EncoderContext(LlamaContext):
    """Stands in for the generating context of a model without KV state: its slots stay empty."""

    def __init__(self, slots: int, ctx_size: int, batch_size: int, fingerprint: str):
        self.pointer, self.logits_max = None, 0
        self.slots, self.ctx_size, self.batch_size = slots, ctx_size, batch_size
        self.can_shift = False
        self._key = bytes.fromhex(fingerprint)[:16]
        self._window, self._hybrid, self._whole_only = 0, False, False
        self._lengths = dict.fromkeys(range(slots), 0)
        self._shifted: set[int] = set()

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Refuse every batch."""
        raise UnsupportedOperation(
            "the model only makes embeddings", hint="use embed, or another model"
        )

    def clear(self, slot: int) -> None:
        """Do nothing: every slot is empty."""
        self._checked(slot)

    def set_threads(self, threads: int) -> None:
        """Do nothing: this context computes nothing."""
