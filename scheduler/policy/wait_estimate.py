"""Estimated starts of waiting tasks: a pure simulation, and the token times that it uses.

The simulation knows a task by its remaining tokens, and a slot by the time that a token takes while
the other slots are busy. Tasks only wait when all slots are busy, so times measured on turns that
shared the model hold for those that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

FORGET = 0.9
"""Weight of earlier turns beside a new one: the last ten turns weigh about two thirds."""
PROMPT_S, OUTPUT_S, OUTPUT_TOKENS = 0.003, 0.05, 128.0
"""Assumptions before the first turn has ended; they fit a small model on two cores."""


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """The rest of a task: prompt tokens to compute, output tokens to expect."""

    prompt_tokens: int
    output_tokens: float


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Seconds that one slot takes for a prompt token and for an output token."""

    prompt_s: float
    output_s: float

    def seconds(self, work: RemainingWork) -> float:
        """Return how long *work* occupies a slot."""
        return work.prompt_tokens * self.prompt_s + work.output_tokens * self.output_s


def expected_starts(
    running: Sequence[RemainingWork],
    waiting: Sequence[RemainingWork],
    slots: int,
    times: TokenTimes,
) -> list[float]:
    """Return when each of *waiting*, in order, gets a slot: seconds from now.

    Each takes the slot that is free first and keeps it to its end. If more tasks are *running* than
    there are *slots*, the later ones wait too, before the others.
    """
    extra = list(running[slots:])
    free_at = [times.seconds(work) for work in running[:slots]]
    free_at += [0.0] * (slots - len(free_at))
    heapq.heapify(free_at)
    starts = []
    for work in (*extra, *waiting):
        start = free_at[0]
        heapq.heapreplace(free_at, start + times.seconds(work))
        starts.append(start)
    return starts[len(extra) :]


class TurnEstimator:
    """Learns from ended turns how long tokens take and how long answers are.

    For answers with a limit it learns the share of the limit that they reached, which predicts more
    than the mean length if programs request exact numbers of tokens.
    """

    def __init__(self) -> None:
        self._prompt = RunningRatio(PROMPT_S)
        self._output = RunningRatio(OUTPUT_S)
        self.mean_length = RunningRatio(OUTPUT_TOKENS)
        self._share = RunningRatio(0.0)

    @property
    def token_times(self) -> TokenTimes:
        """The time of a token, by the turns so far."""
        return TokenTimes(self._prompt.value, self._output.value)

    def learn_rates(
        self, prompt_tokens: int, prompt_s: float, output_tokens: int, output_s: float
    ) -> None:
        """Add the times of a turn that was never parked, for its computed prompt and its output."""
        self._prompt.add_sample(prompt_s, prompt_tokens)
        self._output.add_sample(output_s, output_tokens)

    def learn_length(self, output_tokens: int, limit: int = -1) -> None:
        """Add the length of an answer that was bounded by *limit* tokens (-1: unbounded)."""
        self.mean_length.add_sample(output_tokens, 1)
        if limit > 0:
            self._share.add_sample(output_tokens, limit)

    def remaining_work(self, prompt_tokens: int, done: int = 0, limit: int = -1) -> RemainingWork:
        """Return the rest of a task with *prompt_tokens* to compute and *done* output tokens, whose
        output is bounded by *limit* (-1: unbounded).

        An answer that exceeds the mean is expected to continue for another quarter of it.
        """
        mean = self.mean_length.value
        if limit < 0:
            return RemainingWork(prompt_tokens, max(mean - done, mean / 4))
        whole = max(min(mean, limit), self._share.value * limit)
        return RemainingWork(prompt_tokens, min(max(whole - done, mean / 4), max(0, limit - done)))


class RunningRatio:
    """The ratio of two sums that forget exponentially; *assumed* until the first sample."""

    def __init__(self, assumed: float):
        self.value = assumed
        self._sum = self._count = 0.0

    def add_sample(self, sum_: float, count: float) -> None:
        """Add to both sums; a *count* of 0 changes nothing."""
        if count > 0:
            self._sum = self._sum * FORGET + sum_
            self._count = self._count * FORGET + count
            self.value = self._sum / self._count
