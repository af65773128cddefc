"""The chunks of decoding tasks for which grammars have forced several tokens.

The functions are pure, as in `batch_plan`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ..task import Task
from .cost import StepCost, StepLoad


def plan_forced(
    decoding: Sequence[Task], cost: StepCost, seconds: float, tokens_max: int
) -> list[int]:
    """Return how many tokens of each *decoding* task the next step computes: one, or the size of
    the chunks, as long as the step keeps to *seconds* and to *tokens_max* tokens.

    All chunks have one size, because different sizes are computed one after the other (see
    `StepLoad`). It is the size with which the step computes most tokens. The rest is left for the
    next steps.

    The chunks need a pass of their own, unless each task has one. A step without chunks is a pass
    with one token for each task. So the chunks must add at least as many tokens, or the tasks
    together would get fewer tokens per second. (With 16 tasks and a vocabulary of 262k tokens, a
    pass for 4 tokens made a step longer by 25 of 64 ms.)
    """
    if all(task.pending == 1 for task in decoding):
        return [1] * len(decoding)
    pending = [_pending(task) for task in decoding]
    size, chunks = _most_tokens(pending)

    def load(size_tried: int) -> StepLoad:
        counts = [size_tried if count >= size else 1 for count in pending]
        return StepLoad.of_chunks([(t.computed, c) for t, c in zip(decoding, counts, strict=True)])

    if size > 1:
        most = min(size, 1 + (tokens_max - len(decoding)) // chunks)
        fitting = bisect_right(range(2, most + 1), seconds, key=lambda n: cost.predict(load(n)))
        if chunks == len(decoding) or fitting * chunks >= len(decoding):
            return [1 + fitting if count >= size else 1 for count in pending]
    return [1] * len(decoding)


def _pending(task: Task) -> int:
    """Return how many tokens of *task* may be computed at once."""
    most = min(task.pending, task.tokens_to_checkpoint())
    return min(most, task.reserved_tokens or most)


def _most_tokens(pending: Sequence[int]) -> tuple[int, int]:
    """Return the size of the chunks with which a step computes most tokens, and their number. The
    other tasks have one token each.
    """
    descending = sorted(pending, reverse=True)
    added = [(size - 1) * count for count, size in enumerate(descending, start=1)]
    index = added.index(max(added))
    return descending[index], index + 1
