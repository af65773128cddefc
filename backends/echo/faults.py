"""The echo model's configured pauses and faults, counted over the steps of both contexts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ..errors import BackendError
from .options import EchoOptions
from .vocabulary import EchoVocabulary


class EchoFaults:
    """Counts steps, and slows down or breaks them as the options request."""

    def __init__(self, options: EchoOptions, vocabulary: EchoVocabulary):
        self.steps = 0
        self._options, self._vocabulary = options, vocabulary

    def begin_step(self) -> None:
        """Count a step, pause, and fail if the options request it."""
        self.steps += 1
        if self._options.step_ms:
            time.sleep(self._options.step_ms / 1000)
        if self.steps == self._options.crash_at_step:
            os.abort()
        if self.steps == self._options.fail_at_step:
            raise BackendError(f"step {self.steps} failed, as requested by fail_at_step")

    def abort_on_text(self, tokens: Sequence[int]) -> None:
        """Abort the process if a slot's *tokens* contain the text of the option `abort_on`."""
        text = self._options.abort_on
        if text and text.encode() in self._vocabulary.text(tokens):
            os.abort()
