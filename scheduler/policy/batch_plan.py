"""Plans of batches: functions of the engine's state, without model or clock.

`adapter_quantum.plan_adapters` decides which tasks with slots share the next batch, and
`plan_tokens` plans its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ...backends import Chunk
from ..priority import Priority
from ..settings import EngineSettings
from ..task import Task
from .cost import StepCost, StepLoad
from .forced_chunks import plan_forced
from .order import Order
from .step_budget import REST_SHARE_ALONE, StepBudget, forced_tokens_s, prompts_step_s

FIRST_STEP_TOKENS = 32
"""Prompt tokens of the very first step, before the machine's speed is known."""


class ScheduledTokens(msgspec.Struct, frozen=True):
    """The next *count* pending tokens of *task* go into the batch. The last *logits* of them have
    logits.
    """

    task: Task
    start: int
    """The position of the first of these tokens."""
    count: int
    logits: int

    @classmethod
    def of_task(cls, task: Task, count: int) -> ScheduledTokens:
        """Return the next *count* tokens of *task*, with the logits that it needs."""
        return cls(task, task.computed, count, task.logits_of(count))

    def chunk(self) -> Chunk:
        """Return the chunk for the model."""
        tokens = self.task.tokens[self.start : self.start + self.count]
        return Chunk(self.task.slot, tokens, self.start, self.logits)

    @property
    def logits_read(self) -> int:
        """The tokens with logits, except the last one."""
        return max(0, self.logits - 1)


def load_of(batch: Sequence[ScheduledTokens]) -> StepLoad:
    """Return the load of a step, before or after its tokens were counted as computed."""
    chunks = [(part.start, part.count) for part in batch]
    return StepLoad.of_chunks(chunks, sum(part.logits_read for part in batch))


def next_trial(tasks: Sequence[Task], order: Order, *, tried: bool) -> Task | None:
    """Return the task that the next step computes alone, on trial or with an image next. Return
    None if the next step computes the other tasks. Both kinds of steps alternate; *tried* means
    that the last one computed a task alone.
    """
    trials = [t for t in tasks if t.computes_alone and t.has_work]
    if not trials or (tried and any(t.has_work and not t.computes_alone for t in tasks)):
        return None
    return min(trials, key=order.key)


def plan_trial(
    task: Task, settings: EngineSettings, batch_size: int, cost: StepCost, logits_max: int
) -> list[ScheduledTokens]:
    """Return the tokens of a step that computes only *task*."""
    left = batch_size if cost.known else min(batch_size, FIRST_STEP_TOKENS)
    tokens_min, seconds = settings.prompt_tokens_min, settings.step_s_target
    step = StepBudget([], cost, left, tokens_min, seconds, logits_max - 1)
    return [ScheduledTokens.of_task(task, step.schedule_prompt(task))]


def first_prompts(prompts: Sequence[Task], order: Order) -> list[Task]:
    """Return the prompts that share the next step, in the order of the queue: of each user, those
    of the user's highest class, if no prompt of another user is above them.
    """
    highest = max(map(order.level, prompts))
    of_user: dict[int, int] = {}
    for task in prompts:
        user = task.spec.owner.user
        of_user[user] = max(of_user.get(user, 0), order.effective(task))
    first = [
        t
        for t in prompts
        if order.level(t) == highest and order.effective(t) == of_user[t.spec.owner.user]
    ]
    return sorted(first, key=order.key)


def plan_tokens(
    running: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    batch_size: int,
    cost: StepCost,
    adapters: tuple[str, ...] = (),
    logits_max: int = 0,
    seconds_max: float = math.inf,
) -> list[ScheduledTokens]:
    """Return the next batch: tokens of the *running* tasks with *adapters*, in the tasks' order.

    Every decoding task gets one token, or a chunk of forced ones (`plan_forced`). Prompts share the
    rest of the step's time (`prompts_step_s`, at most *seconds_max*), in the order of the queue.
    They get at least half as much time as the decoding tokens take, even if the step then exceeds
    its target. Prompts of a lower class wait for those of a higher one (`first_prompts`). Each task
    may have logits after its last token; prompts whose logprobs are wanted share the others of the
    *logits_max* tokens with logits.
    """
    tasks = [t for t in running if t.has_work and t.spec.adapters == adapters]
    prompts = [t for t in tasks if t.prefilling]
    if not prompts and all(t.pending == 1 for t in tasks):
        return [ScheduledTokens.of_task(t, 1) for t in tasks]
    decoding = [t for t in tasks if not t.prefilling]
    most = batch_size if cost.known else min(batch_size, len(decoding) + FIRST_STEP_TOKENS)
    most_forced = most - settings.prompt_tokens_min if prompts else most
    seconds = forced_tokens_s(decoding, prompts, order, settings)
    planned = plan_forced(decoding, cost, seconds, max(most_forced, len(decoding)))
    if not prompts:
        return [ScheduledTokens.of_task(t, n) for t, n in zip(decoding, planned, strict=True)]
    counts = {id(t): n for t, n in zip(decoding, planned, strict=True)}
    chunks = [(t.computed, counts[id(t)]) for t in decoding]
    tokens_min, logits_left = settings.prompt_tokens_min, max(0, logits_max - len(tasks))
    step = StepBudget(chunks, cost, most - sum(planned), tokens_min, logits_left=logits_left)
    prompts = first_prompts(prompts, order)
    own = max(map(order.effective_unreserved, prompts))
    step.seconds = prompts_step_s(own, decoding, prompts, order, settings, cost)
    step.seconds = max(min(step.seconds, seconds_max), 1.5 * step.predicted_s())
    if len(tasks) == 1 and own > Priority.LOW and not order.guarantees.parts:
        step.rest_share = REST_SHARE_ALONE
    for task in prompts:
        counts[id(task)] = step.schedule_prompt(task)
    return [ScheduledTokens.of_task(t, counts[id(t)]) for t in tasks if counts.get(id(t))]
