"""A turn ends where it repeats itself."""

from __future__ import annotations

from collections import Counter, deque

from .ending import StopReason

GRAM = 4
"""Tokens of an n-gram: rep-4 is the measure of Welleck et al., "Neural Text Generation with
Unlikelihood Training" (2019).
"""


class Repetition:
    """The share of the n-grams in a window of the last tokens that are there more than once: 1 less
    the distinct ones of all. It is looked at once the window is full.
    """

    reason = StopReason("repetition")

    def __init__(self, threshold: float, window: int):
        self._threshold = threshold
        self._size = window - GRAM + 1
        self._last: deque[int] = deque(maxlen=GRAM)
        self._grams: deque[tuple[int, ...]] = deque()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def feed(self, token: int) -> str | None:
        """Take the next token; return the share, as text, if it is at the threshold or beyond."""
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
