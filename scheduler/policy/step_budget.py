"""The time and the tokens of one step, and the prompts' chunks that fit into them.

`batch_plan` decides which prompts share the step, and `embeddings_plan` the time of a step with
texts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..priority import Priority
from ..settings import EngineSettings
from ..task import Task
from .cost import StepCost, StepLoad
from .order import Order

LOW_STEP = 2 / 3
"""Share of `step_s_target` for a step for which others wait: with prompts of the lowest class, or
of several users.
"""
PASS_SHARE = 0.05
"""A step of prompts that delays no stream is long enough that its pass takes this share of it."""
REST_SHARE, REST_SHARE_ALONE = 1 / 4, 1 / 2
"""A rest of a prompt of at most this share of a chunk is added to the chunk: beside other tasks,
and if the prompt is alone. SmolLM2-135M computes 54 tokens in 107 ms at once, and in 116 ms in two
steps.
"""
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
    logits_left: int = 0
    """Tokens that may have logits besides the last one of each chunk."""
    logits: int = 0
    """Those that have."""
    rest_share: float = REST_SHARE

    def predicted_s(self) -> float:
        """Return the seconds that the chunks so far will take."""
        return self.cost.predict(StepLoad.of_chunks(self.chunks, self.logits))

    def schedule_prompt(self, task: Task) -> int:
        """Add as many tokens of *task* as fit, at least the prompts' minimum; return their number.

        Each chunk has a cost of its own. So a small rest of the prompt is added to the chunk before
        it, and a prompt does not begin with a few tokens. A prompt whose logprobs are wanted gets
        no more tokens than may have logits. An image is scheduled whole.
        """
        if task.item_size:
            return task.item_size
        most = min(task.pending, task.tokens_to_checkpoint(), self.tokens_left)
        most = min(most, task.reserved_tokens or most, task.spec.batch_size or most)
        scored = task.tokens_within(1 + self.logits_left)
        if scored < min(most, CHUNK_MIN) and not self.tokens_min:
            return 0  # the prompts before it use the step's logits
        most = min(most, scored)
        count = max(self._fitting(task, most), min(most, self.tokens_min))
        if most - count <= count * self.rest_share:
            count = most
        elif count < CHUNK_MIN:
            count = 0
        if count:
            self.chunks.append((task.computed, count))
            more = _logits_of(task, count)
            self.logits, self.logits_left = self.logits + more, self.logits_left - more
            self.tokens_left -= count
            self.tokens_min = max(0, self.tokens_min - count)
        return count

    def _fitting(self, task: Task, most: int) -> int:
        """Return the greatest count, up to *most*, with which the step keeps to its time."""
        position = task.computed

        def seconds(count: int) -> float:
            logits = self.logits + _logits_of(task, count)
            return self.cost.predict(StepLoad.of_chunks([*self.chunks, (position, count)], logits))

        return bisect_right(range(1, most + 1), self.seconds, key=seconds)


def _logits_of(task: Task, count: int) -> int:
    """Return the tokens with logits among the next *count*, without one for the chunk."""
    return max(0, task.logits_of(count) - 1)


def forced_tokens_s(
    decoding: Sequence[Task], prompts: Sequence[Task], order: Order, settings: EngineSettings
) -> float:
    """Return the time of a step in which its decoding tasks may compute chunks of forced tokens,
    planned before its prompts. Other streams wait for these chunks as for a prompt's chunk.
    """
    if prompts:
        return settings.step_s_target / 2
    if len(decoding) > 1:
        return settings.step_s_target
    low = any(order.effective(t) == Priority.LOW for t in decoding)
    return LOW_STEP * settings.step_s_target if low else settings.step_s_max


def undisturbed_step_s(cost: StepCost, settings: EngineSettings) -> float:
    """Return the time for a step that delays no stream of its class. Arrivals wait for it, so it is
    no longer than `PASS_SHARE` demands, between `LOW_STEP` of `step_s_target` and `step_s_max`.
    """
    least = LOW_STEP * settings.step_s_target
    return min(settings.step_s_max, max(least, cost.pass_s / PASS_SHARE))


def step_s_max(absent: Sequence[Task], order: Order) -> float:
    """Return the time that prompts and texts of a step may take, where the readers of the *absent*
    tasks are away for a moment and then request the next token. A reader of a user who is behind
    its guarantee waits no longer than it was away the last time, so that readers who are far away
    keep their part too.
    """
    behind = order.guarantees.behind_of
    return min((t.reader_away_s for t in absent if any(behind(t.spec.owner))), default=math.inf)


def prompts_step_s(
    effective: int,
    decoding: Sequence[Task],
    prompts: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    cost: StepCost,
) -> float:
    """Return the time for a step in which *prompts* of one class are computed:

    - of the lowest class: `LOW_STEP` of `step_s_target`. Any arrival precedes them, but must wait
      for the step under way;
    - while tasks of a higher class decode: `step_s_target`;
    - while only tasks of lower classes decode, or none: `undisturbed_step_s`;
    - while tasks of their own class decode: `step_s_target`, or `step_s_max` for a burst, for which
      the streams wait. Prompts are a burst if they take at most `burst_s` together, and got their
      slots soon after the oldest stream's first token, within `step_s_max`;
    - while several users have prompts or decode: `LOW_STEP` of `step_s_target`.

    A reserved quantum does not change the class here.
    """
    highest = max(map(order.effective_unreserved, decoding), default=-1)
    users = {t.spec.owner.user for t in (*prompts, *decoding)}
    if effective == Priority.LOW or len(users) > 1:
        return LOW_STEP * settings.step_s_target
    if highest > effective:
        return settings.step_s_target
    if highest < effective:
        return undisturbed_step_s(cost, settings)
    equals = [t for t in decoding if order.effective_unreserved(t) == effective]
    streaming_since = min(t.first_logits_at or 0.0 for t in equals)
    left = StepLoad.of_chunks([(t.computed, t.pending) for t in prompts])
    late = streaming_since + settings.step_s_max < max(t.slot_since for t in prompts)
    if late or cost.predict(left) > settings.burst_s:
        return settings.step_s_target
    return max(settings.step_s_target, settings.step_s_max)
