"""Encoders: models without a KV state, which make embeddings and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from ...batch import Chunk
from ...errors import UnsupportedOperation
from .context import LlamaContext


class NoContext(LlamaContext):
    """Stands for the first context of a model that has none: its slots stay empty."""

    def __init__(self, slots: int, ctx_size: int, batch_size: int, fingerprint: str):
        self.pointer = None
        self.slots, self.ctx_size, self.batch_size = slots, ctx_size, batch_size
        self.can_shift = False
        self._key = bytes.fromhex(fingerprint)[:16]
        self._window, self._whole_only = 0, False
        self._lengths = [0] * slots
        self._shifted: set[int] = set()

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Refuse every batch."""
        raise UnsupportedOperation(
            "the model makes embeddings and says nothing", hint="use embed, or another model"
        )

    def clear(self, slot: int) -> None:
        """Empty a slot: it is."""
        self._checked(slot)

    def set_threads(self, threads: int) -> None:
        """Do nothing: nothing is computed here."""
