"""Plans of batches: functions of the engine's state, without model or clock.

`adapter_quantum.plan_adapters` decides which tasks with slots share the next batch, and
`plan_tokens` plans its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...backends import Chunk
from ..settings import EngineSettings
from ..task import Task
from .cost import StepCost
from .forced_chunks import plan_forced
from .order import Order
from .step_budget import StepBudget, forced_tokens_s, prompts_step_s

FIRST_STEP_TOKENS = 32
"""Prompt tokens of the very first step, before the machine's speed is known."""


class ScheduledTokens(msgspec.Struct, frozen=True):
    """The next *count* pending tokens of *task* go into the batch."""

    task: Task
    count: int

    def chunk(self, *, generates: bool = True) -> Chunk:
        """Return the chunk for the model. It has logits if the task *generates* and the chunk ends
        with the last of its tokens.
        """
        task, start = self.task, self.task.computed
        end = start + self.count
        logits = generates and end == len(task.tokens)
        return Chunk(task.slot, task.tokens[start:end], start, logits)


def next_trial(tasks: Sequence[Task], order: Order, *, tried: bool) -> Task | None:
    """Return the task on trial that the next step computes alone, or None if the next step computes
    the other tasks. Both kinds of steps alternate; *tried* means that the last one was a trial.
    """
    trials = [t for t in tasks if t.trial_tokens and t.has_work]
    if not trials or (tried and any(t.has_work and not t.trial_tokens for t in tasks)):
        return None
    return min(trials, key=order.key)


def plan_trial(
    task: Task, settings: EngineSettings, batch_size: int, cost: StepCost
) -> list[ScheduledTokens]:
    """Return the tokens of a step that computes only *task*."""
    left = batch_size if cost.known else min(batch_size, FIRST_STEP_TOKENS)
    step = StepBudget([], cost, left, settings.prompt_tokens_min, settings.step_s_target)
    return [ScheduledTokens(task, step.schedule_prompt(task))]


def plan_tokens(
    running: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    batch_size: int,
    cost: StepCost,
    adapters: tuple[str, ...] = (),
) -> list[ScheduledTokens]:
    """Return the next batch: tokens of the *running* tasks with *adapters*, in the tasks' order.

    Every decoding task gets one token, or a chunk of forced ones (`plan_forced`). Prompts share the
    rest of the step's time (`prompts_step_s`), in the order of the queue. They get at least half as
    much time as the decoding tokens take, even if the step then exceeds its target. Prompts of a
    lower class wait for those of a higher one.
    """
    tasks = [t for t in running if t.has_work and t.spec.adapters == adapters]
    prompts = [t for t in tasks if t.prefilling]
    decoding = [t for t in tasks if not t.prefilling]
    most = batch_size if cost.known else min(batch_size, len(decoding) + FIRST_STEP_TOKENS)
    most_forced = most - settings.prompt_tokens_min if prompts else most
    seconds = forced_tokens_s(decoding, prompts, order, settings)
    planned = plan_forced(decoding, cost, seconds, max(most_forced, len(decoding)))
    if not prompts:
        return [ScheduledTokens(t, n) for t, n in zip(decoding, planned, strict=True)]
    counts = {id(t): n for t, n in zip(decoding, planned, strict=True)}
    chunks = [(t.computed, counts[id(t)]) for t in decoding]
    step = StepBudget(chunks, cost, most - sum(planned), settings.prompt_tokens_min)
    prompts.sort(key=order.key)
    first = order.effective(prompts[0])
    prompts = [t for t in prompts if order.effective(t) == first]
    own = max(map(order.effective_unreserved, prompts))
    step.seconds = prompts_step_s(own, decoding, prompts, order, settings, cost)
    step.seconds = max(step.seconds, 1.5 * step.predicted_s())
    for task in prompts:
        counts[id(task)] = step.schedule_prompt(task)
    return [ScheduledTokens(t, counts[id(t)]) for t in tasks if counts.get(id(t))]
