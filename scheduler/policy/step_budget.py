"""The time and the tokens of one step, and the prompts' chunks that fit into them.

`batch_plan` and `embeddings_plan` decide how long the step may take.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ..task import Task
from .cost import StepCost, StepLoad

CHUNK_MIN = 8
"""A smaller chunk is not scheduled unless it ends its prompt, because each chunk has a cost of its
own.
"""


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

        Each chunk has a cost of its own. So a small rest of the prompt is added to the chunk before
        it, and a prompt does not begin with a few tokens.
        """
        most = min(task.pending, task.tokens_to_checkpoint(), self.tokens_left)
        most = min(most, task.reserved_tokens or most, task.spec.batch_size or most)
        count = max(self._fitting(task.computed, most), min(most, self.tokens_min))
        if most - count <= count // 4:
            count = most
        elif count < CHUNK_MIN:
            count = 0
        if count:
            self.chunks.append((task.computed, count))
            self.tokens_left -= count
            self.tokens_min = max(0, self.tokens_min - count)
        return count

    def _fitting(self, position: int, most: int) -> int:
        """Return the greatest count, up to *most*, with which the step keeps to its time."""

        def seconds(count: int) -> float:
            return self.cost.predict(StepLoad.of_chunks([*self.chunks, (position, count)]))

        return bisect_right(range(1, most + 1), self.seconds, key=seconds)
