"""The sentences of a turn that are compared with a text, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ...scheduler.messages import SentenceEnded, TaskSpec, Verdict
from ...scheduler.priority import Priority

PARAMETER = "stop-similarity"


class Comparison(NamedTuple):
    """A sentence and the text to compare it with, for *owner*, whose turn has this *priority*."""

    owner: int
    priority: Priority
    sentence: str
    text: str


class Similarity(NamedTuple):
    """The cosine of both embeddings; None: nobody has compared them, and *why*."""

    cosine: float | None
    why: str = ""


Judge = Callable[[Comparison, Callable[[Similarity], None]], None]
"""Has two texts compared, and tells what came out: soon, and in any case."""


def no_judge(_: Comparison, tell: Callable[[Similarity], None]) -> None:
    """Compare nothing."""
    tell(Similarity(None, "nobody compares sentences here"))


class Comparisons:
    """Those of one turn: it asks *judge*, and ends with a sentence that is similar enough."""

    def __init__(self, judge: Judge = no_judge):
        self._judge = judge
        self._asked = self._missed = 0
        self._why = ""

    def compare_sentence(
        self, spec: TaskSpec, asked: SentenceEnded, answer: Callable[[Verdict], None]
    ) -> None:
        """Have a sentence of the task compared; *answer* gets the verdict."""
        text = spec.stopping.stop_similarity
        comparison = Comparison(spec.owner, spec.priority, asked.text, text)
        self._asked += 1
        self._judge(comparison, partial(self._conclude, spec, asked.end, answer))

    def _conclude(
        self, spec: TaskSpec, end: int, answer: Callable[[Verdict], None], found: Similarity
    ) -> None:
        detail, cosine = "", found.cosine
        if cosine is None:
            self._missed += 1
            self._why = found.why
        elif cosine >= spec.stopping.stop_similarity_threshold:
            detail = f"{cosine:.3f}"
        answer(Verdict(spec.id, end, detail))

    @property
    def missed(self) -> dict[str, str]:
        """Why the condition did not hold for some sentences, by the parameter's name."""
        if not self._missed:
            return {}
        count = f"{self._missed} of {self._asked} sentences"
        return {PARAMETER: f"{count} were not compared: {self._why}"}
