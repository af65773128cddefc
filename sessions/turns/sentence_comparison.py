"""Comparisons of a turn's sentences with the text of `stop-similarity`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ...scheduler.messages import SentenceCompared, SentenceEnded, TaskSpec
from ...scheduler.owner import Owner
from ...scheduler.priority import Priority

PARAMETER = "stop-similarity"


class Comparison(NamedTuple):
    """A sentence and the text to compare it with, for a turn of *owner* with this *priority*."""

    owner: Owner
    priority: Priority
    sentence: str
    text: str


class Similarity(NamedTuple):
    """The cosine of both embeddings, or None if they were not compared, for the reason *why*."""

    cosine: float | None
    why: str = ""


Comparer = Callable[[Comparison, Callable[[Similarity], None]], None]
"""Compares two texts. It reports the result or the failure in bounded time."""


def compare_nothing(_: Comparison, report: Callable[[Similarity], None]) -> None:
    """Report that sentences are not compared."""
    report(Similarity(None, "the comparison of sentences is not available"))


class Comparisons:
    """The comparisons of one turn by *comparer*; a sentence that is similar enough ends it."""

    def __init__(self, comparer: Comparer = compare_nothing):
        self._comparer = comparer
        self._requested = self._missed = 0
        self._why = ""

    def compare_sentence(
        self, spec: TaskSpec, sentence: SentenceEnded, answer: Callable[[SentenceCompared], None]
    ) -> None:
        """Compare a sentence of the task; *answer* gets the result."""
        text = spec.stopping.stop_similarity
        comparison = Comparison(spec.owner, spec.priority, sentence.text, text)
        self._requested += 1
        self._comparer(comparison, partial(self._conclude, spec, sentence.end, answer))

    def _conclude(
        self,
        spec: TaskSpec,
        end: int,
        answer: Callable[[SentenceCompared], None],
        found: Similarity,
    ) -> None:
        detail, cosine = "", found.cosine
        if cosine is None:
            self._missed += 1
            self._why = found.why
        elif cosine >= spec.stopping.stop_similarity_threshold:
            detail = f"{cosine:.3f}"
        answer(SentenceCompared(spec.id, end, detail))

    @property
    def missed(self) -> dict[str, str]:
        """The reason why some sentences were not compared, by the parameter's name."""
        if not self._missed:
            return {}
        count = f"{self._missed} of {self._requested} sentences"
        return {PARAMETER: f"{count} were not compared: {self._why}"}
