"""Texts to embed: those that wait, and those with a slot of the model's embedding context, in their
order.

The plans are pure functions, as in `policy.batch_plan`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..backends import EmbedInfo, LanguageModel
from ..backends.embedder import EMBEDDING_BYTES_MAX, EmbedSpec, check_pooling
from ..backends.errors import (
    BackendError,
    InvalidArgument,
    PromptTooLong,
    TooLarge,
    UnsupportedOperation,
)
from . import messages as m
from .owner import Priority
from .policy.batch_plan import (
    FIRST_STEP_TOKENS,
    LOW_STEP,
    ScheduledTokens,
    StepBudget,
    next_trial,
    undisturbed_step_s,
)
from .policy.cost import StepCost, StepLoad
from .policy.guarantees import Part
from .policy.order import Order
from .policy.slot_plan import SlotPlan
from .prefix import common_prefix
from .settings import EngineSettings
from .task import Task, TaskState

LEAD_S_MIN = 0.02
"""Texts that have not begun give way to those of an owner who is behind by this much more."""


class Prefix(NamedTuple):
    """The first tokens of a text, whose KV state is kept for other texts of the same scope."""

    scope: int
    tokens: tuple[int, ...]


def covered_by(prefix: Prefix, task: Task) -> int:
    """Return how many of a text's tokens need not be computed because of *prefix*. Its last token
    is computed in any case.
    """
    assert task.spec.embed is not None
    if prefix.scope != task.scope:
        return 0
    most = min(task.spec.embed.shared, task.prompt_size - 1)
    return common_prefix(prefix.tokens, tuple(task.tokens[:most]))


def own_prefix(task: Task) -> Prefix | None:
    """Return the first tokens of a text that others may have too; None if there are none."""
    assert task.spec.embed is not None
    shared = min(task.spec.embed.shared, task.prompt_size - 1)
    return Prefix(task.scope, tuple(task.tokens[:shared])) if shared > 0 else None


def without_followers(running: Sequence[Task], order: Order) -> list[Task]:
    """Return the texts that may compute. Of those that share a prefix and have not begun to compute
    it, only one does; the others wait until it is kept.
    """
    leaders: dict[Prefix, Task] = {}
    able = []
    for task in sorted(running, key=lambda t: (-t.computed, order.key(t))):
        prefix = own_prefix(task)
        if prefix is not None and task.computed < len(prefix.tokens):
            leader = leaders.setdefault(prefix, task)
            if leader is not task and task.computed <= task.cached:
                continue
        able.append(task)
    return able


def plan_texts(
    waiting: Sequence[Task],
    running: Sequence[Task],
    order: Order,
    info: EmbedInfo,
    kept_tokens: int = 0,
) -> SlotPlan:
    """Decide which texts get a slot, in the order of the queue, beside *kept_tokens* of prefixes.
    No text overtakes one that does not fit. A text parks running ones, the last of them first:
    those whose effective class is below its own class, and those of owners who are less behind (by
    `LEAD_S_MIN`) and have more texts in slots, of which nothing was computed. A text with a
    reserved quantum parks any without one.
    """
    running, parts = list(running), order.guarantees.parts
    park: list[Task] = []
    start: list[Task] = []
    for task in sorted(waiting, key=order.key):
        texts = Counter(part for t in running for part in parts.get(t.spec.owner, ()))
        lower = [t for t in running if not t.reserved_tokens and _gives_way(t, task, order, texts)]
        if not _fits(task, [t for t in running if t not in lower], info, kept_tokens):
            break
        while not _fits(task, running, info, kept_tokens):
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
    return (
        running.computed <= running.cached
        and lead_s >= LEAD_S_MIN
        and not order.is_above(running, task)
    )


def _fits(task: Task, running: Sequence[Task], info: EmbedInfo, kept_tokens: int) -> bool:
    tokens = sum(t.prompt_size for t in running) + task.prompt_size + kept_tokens
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


def check_text(tokens: int, pooling: str, ctx_size: int, info: EmbedInfo | None) -> None:
    """Check that a text of *tokens* tokens can be embedded.

    :raises InvalidArgument: the text is empty.
    :raises UnsupportedOperation: the model makes no embeddings, or none with this pooling.
    :raises PromptTooLong: the text is longer than the model's embedding context.
    :raises TooLarge: there is no pooling, and the vectors exceed the bound on an answer.
    """
    if info is None:
        raise UnsupportedOperation("the model makes no embeddings", hint="use another model")
    if not tokens:
        raise InvalidArgument("the text has no tokens", hint="leave out empty texts")
    pooling = check_pooling(info, pooling)
    tokens_max = text_tokens_max(ctx_size, info)
    if tokens > tokens_max:
        which = "batch-size" if info.whole else "ctx-size"
        raise PromptTooLong(
            f"the text has {tokens} tokens; an embedding takes {tokens_max} at most",
            hint=f"truncate or split the text, or raise the model's {which} in the configuration",
            data={"prompt_tokens": tokens, "ctx_size": tokens_max},
        )
    size = 4 * info.size * tokens
    if pooling == "none" and size > EMBEDDING_BYTES_MAX:
        raise TooLarge(
            f"{tokens} vectors of {info.size} numbers have {size} bytes; the limit is"
            f" {EMBEDDING_BYTES_MAX}",
            hint=f"send {EMBEDDING_BYTES_MAX // (4 * info.size)} tokens at most, or use a pooling",
            data={"bytes": size, "embedding_bytes_max": EMBEDDING_BYTES_MAX},
        )


def text_tokens_max(ctx_size: int, info: EmbedInfo) -> int:
    """Return the maximum number of tokens of a text. A *ctx_size* of 0 is the model's own."""
    return min(info.tokens_max, ctx_size or info.tokens_max)


def truncated_tokens(tokens: list[int], around: list[int], tokens_max: int) -> list[int]:
    """Return *tokens_max* of a text's *tokens*: the first ones, and those that the model adds at
    the end. The tokens *around* an empty text are all that the model adds.
    """
    size, most = len(tokens), len(around)
    added = next(n for n in range(most, -1, -1) if tokens[size - n :] == around[most - n :])
    return [*tokens[: max(0, tokens_max - added)], *tokens[size - added :]]


class EmbeddingQueue:
    """Owned by the engine. A text that loses its slot to another text starts again later."""

    def __init__(self, model: LanguageModel, settings: EngineSettings):
        self.waiting: list[Task] = []
        self.running: list[Task] = []
        self.cost = StepCost()
        self._model, self._settings = model, settings
        self._context_used = False
        """The embedding context was created, by its first use."""
        self._prefixes: dict[int, Prefix] = {}
        """The prefixes that are kept, by their places, the last used one last."""

    def assign_slots(self, order: Order, clock: int, now: float) -> list[m.Report]:
        """Drop and start texts as planned; return the reports of their new states."""
        plan = plan_texts(self.waiting, self.running, order, self._info, self._kept_tokens)
        while self._prefixes and not plan.start and not self.running:  # a text needs the cells
            self._drop_prefix(next(iter(self._prefixes)))
            plan = plan_texts(self.waiting, self.running, order, self._info, self._kept_tokens)
        for task in plan.park:
            self._drop(task, clock)
        for task in plan.start:
            self._start_text(task, clock, now)
        return [m.StateChanged(t.spec.id, t.state.value) for t in (*plan.park, *plan.start)]

    def _start_text(self, task: Task, clock: int, now: float) -> None:
        self.waiting.remove(task)
        taken = {t.slot for t in self.running}
        task.slot = next(i for i in range(self._info.slots) if i not in taken)
        task.age += clock - task.clock_waiting
        task.state, task.cached = TaskState.RUNNING, 0
        if task.started_at is None:
            task.started_at = now
        self.running.append(task)

    def _drop(self, task: Task, clock: int) -> None:
        self._empty(task)
        task.computed, task.state, task.clock_waiting = 0, TaskState.PARKED, clock
        task.parks += 1
        self.waiting.append(task)

    def _empty(self, task: Task) -> None:
        self.running.remove(task)
        if self._context_used:
            self._model.embedder().clear_slot(task.slot)
        task.slot = -1

    def remove_text(self, task: Task) -> None:
        """Remove a text that has ended."""
        if task.slot >= 0:
            self._empty(task)
        else:
            self.waiting.remove(task)

    def plan_step(
        self,
        texts: Sequence[Task],
        order: Order,
        decoding: Sequence[Task],
        generation: StepCost,
        seconds_max: float = math.inf,
    ) -> list[ScheduledTokens]:
        """Return the tokens of the next step of *texts*, which have slots. If tasks of the same or
        a higher class decode, or the texts are of the lowest class, this step and the decoding one
        together keep to `step_s_target`. The step takes *seconds_max* at most.
        """
        trial = next_trial(texts, order, tried=False)
        running = list(texts) if trial is None else [trial]
        if trial is None and self._info.prefixes:
            for task in texts:
                if task.computed <= task.cached:
                    self._copy_prefix(task)
            running = without_followers(texts, order)
        highest = order.highest(running)
        low = all(order.effective(t) == Priority.LOW for t in highest)
        seconds = undisturbed_step_s(self.cost, self._settings)
        below = all(any(order.is_above(text, t) for text in highest) for t in decoding)
        if low or not below:
            own = generation.predict(StepLoad.of_chunks([(t.computed, 1) for t in decoding]))
            users = {t.spec.owner.user for t in (*running, *decoding)}
            target = self._settings.step_s_target * (LOW_STEP if len(users) > 1 else 1.0)
            seconds = max(target - own, own / 2)
        seconds = min(seconds, seconds_max)
        tokens_min = self._settings.prompt_tokens_min
        return plan_text_tokens(running, order, self._info, self.cost, seconds, tokens_min)

    def compute_step(self, batch: Sequence[ScheduledTokens]) -> list[tuple[Task, m.Embedded]]:
        """Compute a step, and return the texts that it completes, with their vectors.

        :raises InferdError: the model failed, and the step has no effect.
        """
        embedder = self._model.embedder()
        self._context_used = True
        for part in batch:
            if not part.task.computed:
                embedder.start_text(part.task.slot, self._spec(part.task).pooling)
        embedder.step([part.chunk() for part in batch])
        for part in batch:
            part.task.computed += part.count
            self._keep_prefix(part.task)
        return [(part.task, self._embedded(part.task)) for part in batch if not part.task.pending]

    @property
    def _kept_tokens(self) -> int:
        return sum(len(prefix.tokens) for prefix in self._prefixes.values())

    def _copy_prefix(self, task: Task) -> None:
        """Begin a text with the prefix that covers most of it, if that is more than it has."""
        covered = {place: covered_by(prefix, task) for place, prefix in self._prefixes.items()}
        place = max(covered, key=covered.__getitem__, default=-1)
        if covered.get(place, 0) <= task.computed:
            return
        embedder, tokens = self._model.embedder(), covered[place]
        task.computed = task.cached = 0
        embedder.start_text(task.slot, self._spec(task).pooling)
        try:
            embedder.copy_prefix(place, task.slot, tokens)
        except BackendError:
            self._drop_prefix(place)
            return  # `compute_step` clears the slot
        task.computed = task.cached = tokens
        prefix = self._prefixes[place]
        if tokens == len(prefix.tokens):
            self._prefixes[place] = self._prefixes.pop(place)

    def _keep_prefix(self, task: Task) -> None:
        """Keep the first tokens of a text, if they are computed and others may have them too."""
        prefix = own_prefix(task) if self._info.prefixes else None
        if prefix is None or task.computed < len(prefix.tokens):
            return
        if any(covered_by(p, task) == len(prefix.tokens) for p in self._prefixes.values()):
            return
        tokens = sum(t.prompt_size for t in self.running) + len(prefix.tokens)
        if tokens > self._info.tokens_max:
            return
        while self._kept_tokens + tokens > self._info.tokens_max or (
            len(self._prefixes) == self._info.prefixes
        ):
            self._drop_prefix(next(iter(self._prefixes)))
        place = next(i for i in range(self._info.prefixes) if i not in self._prefixes)
        with suppress(BackendError):  # the other texts compute it themselves
            self._model.embedder().keep_prefix(place, task.slot, len(prefix.tokens))
            self._prefixes[place] = prefix

    def _drop_prefix(self, place: int) -> None:
        del self._prefixes[place]
        self._model.embedder().clear_prefix(place)

    def _embedded(self, task: Task) -> m.Embedded:
        spec = self._spec(task)
        vectors = self._model.embedder().take_embedding(task.slot, spec.normalize)
        pooling = check_pooling(self._info, spec.pooling)
        size = len(vectors) // 4 if pooling == "rank" else self._info.size
        return m.Embedded(task.spec.id, size, pooling, vectors)

    @property
    def _info(self) -> EmbedInfo:
        assert self._model.info.embedding is not None, "the text was checked"
        return self._model.info.embedding

    def _spec(self, task: Task) -> EmbedSpec:
        assert task.spec.embed is not None
        return task.spec.embed

    def check_integrity(self) -> None:
        """Assert that every text is in one place, and that the running ones fit."""
        slots = [t.slot for t in self.running]
        assert len(set(slots)) == len(slots) and all(s >= 0 for s in slots)
        assert all(t.slot < 0 and not t.computed for t in self.waiting)
        if self.running:
            held = sum(t.prompt_size for t in self.running) + self._kept_tokens
            assert held <= self._info.tokens_max
            assert len(slots) <= self._info.slots
