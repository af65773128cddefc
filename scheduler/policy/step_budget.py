"""The time and the tokens of one step, and the prompts' chunks that fit into them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..task import Task
from .cost import WIDE, StepCost, StepLoad, greatest_fitting

CHUNK_MIN = 8
"""A smaller chunk is not scheduled unless it ends its prompt: its own cost is too high."""
TIMES_MAX = 2.0
"""A wide chunk makes a step at most this many times as long as otherwise."""


@dataclass
class StepBudget:
    """The chunks (position, count) of a step, and the time and tokens that are left for more."""

    chunks: list[tuple[int, int]]
    cost: StepCost
    tokens_left: int
    tokens_min: int
    seconds: float = 0.0

    def predicted_s(self) -> float:
        """Return the seconds that the chunks so far will take."""
        return self.cost.predict(StepLoad.of_chunks(self.chunks))

    def schedule_prompt(self, task: Task) -> int:
        """Add as many tokens of *task* as fit, at least the prompts' minimum; return their number.

        Each chunk has a cost of its own. So the last tokens of a prompt are added to the previous
        ones, and a prompt does not begin with a few.

        Wide chunks may take longer (`_prefers_wide`). The tokens that are left over by them come
        first, as the cost of narrow chunks rises with the depth.
        """
        left = min(task.pending, task.tokens_to_checkpoint())
        most = min(left, self.tokens_left)
        most = min(most, task.reserved_tokens or most, task.spec.batch_size or most)
        wide = self._wide_count()
        count = self._fitting(task.computed, most, wide)
        count = max(count, min(most, self.tokens_min))
        if most - count <= count // 4:
            count = most
        elif count < CHUNK_MIN:
            count = 0
        elif count < wide <= most and self._prefers_wide(task.computed, count, wide):
            count = min(count, left % wide) or wide
        if count:
            self.chunks.append((task.computed, count))
            self.tokens_left -= count
            self.tokens_min = max(0, self.tokens_min - count)
        return count

    def _wide_count(self) -> int:
        """Return the least count of another chunk whose last tokens are in a wide ubatch."""
        return WIDE + max((count for _, count in self.chunks), default=0)

    def _seconds_with(self, position: int, count: int) -> float:
        return self.cost.predict(StepLoad.of_chunks([*self.chunks, (position, count)]))

    def _fitting(self, position: int, most: int, wide: int) -> int:
        """Return the greatest count, up to *most*, with which the step keeps to its time."""
        return greatest_fitting(most, wide, self.seconds, partial(self._seconds_with, position))

    def _prefers_wide(self, position: int, count: int, wide: int) -> bool:
        """Return whether a chunk of *wide* tokens is better than one of *count* tokens although the
        step exceeds its time: at most by as much again, and only if each token then takes at most
        half as long.
        """
        others_s = self.predicted_s()
        narrow_s, wide_s = self._seconds_with(position, count), self._seconds_with(position, wide)
        if wide_s > TIMES_MAX * max(self.seconds, narrow_s):
            return False
        return (wide_s - others_s) / wide <= (narrow_s - others_s) / count / 2
