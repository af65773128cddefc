"""The condition that tokens were too unlikely for too long: the model has lost the thread."""

from __future__ import annotations

import math
from collections import deque

from .ending import StopReason


class MeanSurprisal:
    """The mean surprisal of the last tokens, in nats: −ln of the probability that the model gave
    each; the logarithm of their perplexity. It counts once the window is full.
    """

    reason = StopReason("surprisal")

    def __init__(self, threshold: float, window: int):
        self._threshold = threshold
        self._last: deque[float] = deque(maxlen=window)

    def add_surprisal(self, nats: float) -> str | None:
        """Add a token's surprisal; return the mean, as text, if it exceeds the threshold."""
        self._last.append(nats)
        if len(self._last) < (self._last.maxlen or 0):
            return None
        mean = math.fsum(self._last) / len(self._last)
        return f"{mean:.3f}" if mean > self._threshold else None
