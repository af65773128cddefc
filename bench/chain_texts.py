"""The texts of a program that runs a chain of models: passages, questions and prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from . import texts


def nearest(vector: Sequence[float], others: Sequence[Sequence[float]]) -> int:
    """Return the index of the vector in *others* that is nearest to *vector*."""
    scores = [sum(a * b for a, b in zip(vector, other, strict=True)) for other in others]
    return scores.index(max(scores))


@dataclass(frozen=True)
class ChainTexts:
    """The collection of one program, and a question for each of its chains."""

    mark: str
    """The front of each prompt, new in each run."""
    number: int
    passages: Sequence[str]
    questions: Sequence[str]

    @classmethod
    def generate(
        cls, mark: str, number: int, rng: random.Random, *, chains: int, passages: int, words: int
    ) -> ChainTexts:
        """Return the texts of the program with this *number*."""
        return cls(
            f"{mark} {number}",
            number,
            [texts.story(rng, words) for _ in range(passages)],
            [texts.question(rng) for _ in range(chains)],
        )

    def label(self, model: str) -> str:
        """Return the name of the program's conversation with *model*."""
        return f"{self.number} {model}"

    def question(self, chain: int, passage: str) -> str:
        """Return the prompt for the model that answers."""
        return f"{self.mark} {chain} {passage}{self.questions[chain]}"

    def summary(self, chain: int, answer: str) -> str:
        """Return the prompt for the model that summarises."""
        return f"{self.mark} {chain} {answer} In short:"
