"""When waiting tasks are expected to get a slot: a pure simulation, and the rates it runs on.

The simulation knows a task by the tokens that are left of it, and a slot by what a token takes
while its neighbours are busy too: tasks only wait when all slots are, so rates measured on turns
that had company hold for those that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

FORGET = 0.9
"""What the figures before a turn count beside it: the last ten turns weigh about two thirds."""
PROMPT_S, OUTPUT_S, OUTPUT_TOKENS = 0.003, 0.05, 128.0
"""What is assumed before the first turn has ended: a small model on two cores."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of a task: prompt tokens to compute, output tokens to expect."""

    prompt_tokens: int
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds that one slot takes for a prompt token and for an output token."""

    prompt_s: float
    output_s: float

    def seconds(self, work: Work) -> float:
        """Return how long *work* holds a slot."""
        return work.prompt_tokens * self.prompt_s + work.output_tokens * self.output_s


def expected_starts(
    running: Sequence[Work], waiting: Sequence[Work], slots: int, rates: Rates
) -> list[float]:
    """Return when each of *waiting*, in order, gets a slot: seconds from now.

    Each takes the slot that is free first and holds it to its end. Of more *running* tasks than
    *slots* the later ones wait too, before the others.
    """
    over = list(running[slots:])
    free_at = [rates.seconds(work) for work in running[:slots]]
    free_at += [0.0] * (slots - len(free_at))
    heapq.heapify(free_at)
    starts = []
    for work in (*over, *waiting):
        start = free_at[0]
        heapq.heapreplace(free_at, start + rates.seconds(work))
        starts.append(start)
    return starts[len(over) :]


class Pace:
    """Learns from turns that have ended what a token takes and how long answers are.

    Of answers that had a limit it learns what share of it they took: where programs ask for just
    so many tokens, that says more than the mean.
    """

    def __init__(self) -> None:
        self._prompt = Quotient(PROMPT_S)
        self._output = Quotient(OUTPUT_S)
        self._length = Quotient(OUTPUT_TOKENS)
        self._share = Quotient(0.0)

    @property
    def rates(self) -> Rates:
        """What a token takes, by the turns so far."""
        return Rates(self._prompt.value, self._output.value)

    @property
    def output_tokens(self) -> float:
        """The running mean of the answers' lengths."""
        return self._length.value

    def learn_rates(
        self, prompt_tokens: int, prompt_s: float, output_tokens: int, output_s: float
    ) -> None:
        """Note what a turn took that was never parked: for the prompt tokens that were computed,
        and for its output.
        """
        self._prompt.add(prompt_s, prompt_tokens)
        self._output.add(output_s, output_tokens)

    def learn_length(self, output_tokens: int, limit: int = -1) -> None:
        """Note how long an answer was that might have had *limit* tokens (-1: any number)."""
        self._length.add(output_tokens, 1)
        if limit > 0:
            self._share.add(output_tokens, limit)

    def work(self, prompt_tokens: int, done: int = 0, limit: int = -1) -> Work:
        """Return what is left of a task with *prompt_tokens* to compute and *done* output tokens;
        *limit* bounds its output (-1: not).

        An answer that is longer than the mean is expected to be longer still, by a quarter of it.
        """
        mean = self.output_tokens
        if limit < 0:
            return Work(prompt_tokens, max(mean - done, mean / 4))
        whole = max(min(mean, limit), self._share.value * limit)
        return Work(prompt_tokens, min(max(whole - done, mean / 4), max(0, limit - done)))


class Quotient:
    """A running sum over a running sum; turns that have no share in it change nothing.

    What was *assumed* at first is forgotten with the first turn.
    """

    def __init__(self, assumed: float):
        self.value = assumed
        self._sum = self._count = 0.0

    def add(self, sum_: float, count: float) -> None:
        """Note a turn's share."""
        if count > 0:
            self._sum = self._sum * FORGET + sum_
            self._count = self._count * FORGET + count
            self.value = self._sum / self._count
