"""Alternation of generations and embeddings, which cannot share a batch, and the order of texts.

The functions are pure, as in `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...backends import EmbedInfo
from ..task import Task
from .cost import StepCost
from .plan import FIRST_STEP_TOKENS, Order, ScheduledTokens, StepBudget


@dataclass(frozen=True, slots=True)
class TextPlan:
    """First drop, then admit. A dropped text is computed again from its start."""

    drop: tuple[Task, ...] = ()
    start: tuple[Task, ...] = ()


def embeds_next(
    generating: Sequence[Task], embedding: Sequence[Task], order: Order, *, embedded: bool
) -> bool:
    """Return whether the next step is one of embeddings; *embedded*: the last one was.

    The two alternate step by step, so that neither starves; decoding tasks get every other step,
    whatever their class. Prompts alone wait for embeddings of a higher class, until they have aged.
    """
    if not embedding or not generating:
        return bool(embedding)
    highest = max(map(order.effective, embedding))
    prompts = [order.effective(t) for t in generating if t.prefilling]
    if embedded:
        return len(prompts) == len(generating) and max(prompts) < highest
    return max(prompts, default=0) <= highest


def plan_texts(
    waiting: Sequence[Task], running: Sequence[Task], order: Order, info: EmbedInfo
) -> TextPlan:
    """Decide which texts are started: in the order of the queue, and none before a text that does
    not fit. A text whose own class is above the effective class of started ones has these dropped,
    the last of them first.
    """
    running = list(running)
    drop: list[Task] = []
    start: list[Task] = []
    for task in sorted(waiting, key=order.key):
        lower = [t for t in running if order.effective(t) < task.spec.priority]
        if not _fits(task, [t for t in running if t not in lower], info):
            break
        while not _fits(task, running, info):
            last = max(lower, key=order.key)
            lower.remove(last)
            running.remove(last)
            drop.append(last)
        running.append(task)
        start.append(task)
    return TextPlan(tuple(drop), tuple(start))


def _fits(task: Task, running: Sequence[Task], info: EmbedInfo) -> bool:
    tokens = sum(t.prompt_size for t in running) + task.prompt_size
    return len(running) < info.slots and tokens <= info.tokens_max


def plan_text_tokens(
    running: Sequence[Task],
    order: Order,
    info: EmbedInfo,
    cost: StepCost,
    seconds: float,
    least: int,
) -> list[ScheduledTokens]:
    """Return the tokens of the next step of embeddings, in ascending slots.

    They fit into *seconds*, but are *least* in any case. Texts come in the order of the queue. If
    the model needs texts *whole*, the step has as many as fit.
    """
    step = StepBudget([], cost)
    step.seconds, step.tokens_left, step.tokens_min = seconds, info.batch_tokens_max, least
    if not (cost.known or info.whole):
        step.tokens_left = min(step.tokens_left, FIRST_STEP_TOKENS)
    counts: dict[int, int] = {}
    for task in sorted(running, key=order.key):
        if not info.whole:
            counts[id(task)] = step.schedule_prompt(task)
        elif task.pending <= step.tokens_left:
            step.tokens_left -= task.pending
            counts[id(task)] = task.pending
    planned = sorted((t for t in running if counts.get(id(t))), key=lambda t: t.slot)
    return [ScheduledTokens(t, counts[id(t)]) for t in planned]
