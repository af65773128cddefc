"""The condition that an answer repeats itself."""

from __future__ import annotations

from collections import Counter, deque

from .ending import StopReason

GRAM = 4
"""Tokens of an n-gram: rep-4 is the measure of Welleck et al., "Neural Text Generation with
Unlikelihood Training" (2019).
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
