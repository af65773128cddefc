"""The conditions on a turn's tokens: repetition and surprisal."""

from __future__ import annotations

import math
from collections import Counter, deque

from .ending import StopReason

GRAM = 4
"""Tokens of an n-gram. With 4 it is the measure rep-4 of Welleck et al., "Neural Text Generation
with Unlikelihood Training" (2019).
"""


class Repetition:
    """The share of repeated n-grams in a window of the last tokens: 1 minus the ratio of distinct
    n-grams to all. It is checked once the window is full.
    """

    reason = StopReason("repetition")

    def __init__(self, threshold: float, window: int):
        self._threshold = threshold
        self._size = window - GRAM + 1
        self._last: deque[int] = deque(maxlen=GRAM)
        self._grams: deque[tuple[int, ...]] = deque()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def add_token(self, token: int) -> str | None:
        """Add the next token; return the share, as text, if it reaches the threshold."""
        self._last.append(token)
        if len(self._last) < GRAM:
            return None
        gram = tuple(self._last)
        self._grams.append(gram)
        self._counts[gram] += 1
        if len(self._grams) > self._size:
            oldest = self._grams.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        if len(self._grams) < self._size:
            return None
        share = 1 - len(self._counts) / self._size
        return f"{share:.3f}" if share >= self._threshold else None


class MeanSurprisal:
    """The mean surprisal of the last tokens, in nats. A token's surprisal is −ln of the probability
    that the model gave it, so the mean is the logarithm of the perplexity. It counts once the
    window is full. A high mean shows that the model has lost the thread.
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
