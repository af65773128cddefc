"""The choice between steps of generation and of embeddings, and the order of texts.

The functions are pure, as in `batch_plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...backends import EmbedInfo
from ..task import Task
from .batch_plan import FIRST_STEP_TOKENS, ScheduledTokens, StepBudget
from .cost import StepCost
from .guarantees import Part
from .order import Order
from .slot_plan import SlotPlan

LEAD_S_MIN = 0.02
"""Texts that have not begun give way to those of an owner who is behind by this much more."""


def embeds_next(
    generating: Sequence[Task], embedding: Sequence[Task], order: Order, *, embedded: bool
) -> bool:
    """Return whether the next step is one of embeddings; *embedded* means that the last one was.

    The two alternate step by step, so that neither starves. Decoding tasks get every other step,
    whatever their class. Embeddings wait for prompts of a higher class until they have aged. While
    no task decodes, prompts wait for embeddings of a higher class in the same way.
    """
    if not embedding or not generating:
        return bool(embedding)
    texts = order.highest(embedding)
    prompts = order.highest(t for t in generating if t.prefilling)
    if embedded:
        decodes = any(not t.prefilling for t in generating)
        return not decodes and all(any(order.is_above(t, p) for t in texts) for p in prompts)
    return not any(all(order.is_above(p, t) for t in texts) for p in prompts)


def plan_texts(
    waiting: Sequence[Task], running: Sequence[Task], order: Order, info: EmbedInfo
) -> SlotPlan:
    """Decide which texts get a slot, in the order of the queue. No text overtakes one that does not
    fit. A text parks running ones, the last of them first: those whose effective class is below its
    own class, and those of owners who are less behind (by `LEAD_S_MIN`) and have more texts in
    slots, of which nothing was computed. A text with a reserved quantum parks any without one.
    """
    running, parts = list(running), order.guarantees.parts
    park: list[Task] = []
    start: list[Task] = []
    for task in sorted(waiting, key=order.key):
        texts = Counter(part for t in running for part in parts.get(t.spec.owner, ()))
        lower = [t for t in running if not t.reserved_tokens and _gives_way(t, task, order, texts)]
        if not _fits(task, [t for t in running if t not in lower], info):
            break
        while not _fits(task, running, info):
            last = max(lower, key=order.key)
            lower.remove(last)
            running.remove(last)
            park.append(last)
        running.append(task)
        start.append(task)
    return SlotPlan(tuple(park), tuple(start))


def _gives_way(running: Task, task: Task, order: Order, texts: Mapping[Part, int]) -> bool:
    if task.reserved_tokens or order.preempts(task, running):
        return True
    rivals = order.guarantees.rivals(task.spec.owner, running.spec.owner)
    if rivals is None or texts.get(rivals[0], 0) + 1 >= texts[rivals[1]]:
        return False  # otherwise two owners would displace each other's texts before every step
    lead_s = order.guarantees.lead_s(task.spec.owner, running.spec.owner)
    return not running.computed and lead_s >= LEAD_S_MIN and not order.is_above(running, task)


def _fits(task: Task, running: Sequence[Task], info: EmbedInfo) -> bool:
    tokens = sum(t.prompt_size for t in running) + task.prompt_size
    return len(running) < info.slots and tokens <= info.tokens_max


def plan_text_tokens(
    running: Sequence[Task],
    order: Order,
    info: EmbedInfo,
    cost: StepCost,
    seconds: float,
    tokens_min: int,
) -> list[ScheduledTokens]:
    """Return the tokens of the next step of embeddings, in ascending slots.

    They fit into *seconds*, but are at least *tokens_min*. Texts come in the order of the queue. If
    the model needs texts *whole*, the step has as many texts as fit into its batch.
    """
    left = info.batch_tokens_max
    left = left if cost.known or info.whole else min(left, FIRST_STEP_TOKENS)
    step = StepBudget([], cost, left, tokens_min, seconds)
    counts: dict[int, int] = {}
    for task in sorted(running, key=order.key):
        if not info.whole:
            counts[id(task)] = step.schedule_prompt(task)
        elif task.pending <= step.tokens_left:
            step.tokens_left -= task.pending
            counts[id(task)] = task.pending
    planned = sorted((t for t in running if counts.get(id(t))), key=lambda t: t.slot)
    return [ScheduledTokens(t, t.computed, counts[id(t)], logits=0) for t in planned]
