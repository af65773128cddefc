"""Texts that become embeddings: which wait, which lease a slot of the model's second context."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends import Chunk, EmbedInfo, Model
from ...backends.embedder import EMBEDDING_BYTES_MAX, EmbedSpec, check_pooling
from ...backends.errors import PromptTooLong, TooLarge, UnsupportedOperation
from .. import messages as m
from ..limits import Limits
from ..policy.cost import Load, StepCost
from ..policy.embeddings_plan import plan_text_tokens, plan_texts
from ..policy.plan import Order, ScheduledTokens
from ..task import Task, TaskState


def check_text(task: Task, info: EmbedInfo | None) -> None:
    """Refuse a text that no embedding can be made of.

    :raises UnsupportedOperation: the model makes none, or not by this pooling.
    :raises PromptTooLong: the text is longer than what the model looks at as a whole.
    :raises TooLarge: without pooling its vectors are more than one answer holds.
    """
    if info is None or task.spec.embed is None:
        raise UnsupportedOperation("the model makes no embeddings", hint="use another model")
    pooling = check_pooling(info, task.spec.embed.pooling)
    tokens_max = min(info.tokens_max, task.spec.ctx_size or info.tokens_max)
    if task.prompt_size > tokens_max:
        which = "batch-size" if info.whole else "ctx-size"
        raise PromptTooLong(
            f"the text has {task.prompt_size} tokens; an embedding takes {tokens_max} at most",
            hint=f"split the text, or raise the model's {which} in the configuration",
            data={"prompt_tokens": task.prompt_size, "ctx_size": tokens_max},
        )
    size = 4 * info.size * task.prompt_size
    if pooling == "none" and size > EMBEDDING_BYTES_MAX:
        raise TooLarge(
            f"{task.prompt_size} vectors of {info.size} numbers have {size} bytes; the limit is"
            f" {EMBEDDING_BYTES_MAX}",
            hint=f"send {EMBEDDING_BYTES_MAX // (4 * info.size)} tokens at most, or use a pooling",
            data={"bytes": size, "embedding_bytes_max": EMBEDDING_BYTES_MAX},
        )


class TextQueue:
    """Owned by the engine. A text that is dropped for another one begins anew when it comes back:
    what was computed of it is not kept.
    """

    def __init__(self, model: Model, limits: Limits):
        self.waiting: list[Task] = []
        self.running: list[Task] = []
        self.cost = StepCost()
        self._model, self._limits = model, limits
        self._made = False
        """The second context is there."""

    @property
    def has_work(self) -> bool:
        """Tell whether there are texts."""
        return bool(self.waiting or self.running)

    def add(self, task: Task) -> None:
        """Take a text that was checked."""
        self.waiting.append(task)

    def lease_slots(self, order: Order, clock: int, now: float) -> list[m.Report]:
        """Give slots to the texts whose turn it is; return what is to be told of that."""
        if not self.waiting:
            return []
        plan = plan_texts(self.waiting, self.running, order, self._info)
        for task in plan.drop:
            self._drop(task, clock)
        for task in plan.admit:
            self._admit(task, clock, now)
        return [m.Moved(t.spec.id, t.state.value) for t in (*plan.drop, *plan.admit)]

    def _admit(self, task: Task, clock: int, now: float) -> None:
        self.waiting.remove(task)
        taken = {t.slot for t in self.running}
        task.slot = next(i for i in range(self._info.slots) if i not in taken)
        task.age += clock - task.clock_waiting
        task.state = TaskState.RUNNING
        if task.admitted_at is None:
            task.admitted_at = now
        self.running.append(task)

    def _drop(self, task: Task, clock: int) -> None:
        self._empty(task)
        task.computed, task.state, task.clock_waiting = 0, TaskState.PARKED, clock
        task.parks += 1
        self.waiting.append(task)

    def _empty(self, task: Task) -> None:
        self.running.remove(task)
        if self._made:
            self._model.embedder().drop(task.slot)
        task.slot = -1

    def remove(self, task: Task) -> None:
        """Forget a text."""
        if task.slot >= 0:
            self._empty(task)
        else:
            self.waiting.remove(task)

    def plan(
        self, order: Order, decoding: Sequence[Task], generation: StepCost
    ) -> list[ScheduledTokens]:
        """Return what the next step computes. As with prompts, it is short where tasks decode that
        are not of a lower class, and for the lowest class: with the step of those who decode it
        keeps to `step_target_s`.
        """
        highest = max(map(order.effective, self.running))
        seconds = self._limits.step_alone_s
        if not highest or any(order.effective(t) >= highest for t in decoding):
            own = generation.predict(Load.of([(t.computed, 1) for t in decoding]))
            seconds = max(self._limits.step_target_s - own, own / 2)
        least = self._limits.prompt_tokens_min
        return plan_text_tokens(self.running, order, self._info, self.cost, seconds, least)

    def compute(self, batch: Sequence[ScheduledTokens]) -> list[tuple[Task, m.Embedded]]:
        """Compute a step, and return what texts have become by it.

        :raises InferdError: nothing of the step counts.
        """
        embedder = self._model.embedder()
        self._made = True
        for part in batch:
            if not part.task.computed:
                embedder.begin(part.task.slot, self._spec(part.task).pooling)
        embedder.step([_chunk(part) for part in batch])
        for part in batch:
            part.task.computed += part.count
        return [(part.task, self._embedded(part.task)) for part in batch if not part.task.pending]

    def _embedded(self, task: Task) -> m.Embedded:
        spec = self._spec(task)
        vectors = self._model.embedder().take(task.slot, spec.normalize)
        pooling = check_pooling(self._info, spec.pooling)
        size = len(vectors) // 4 if pooling == "rank" else self._info.size
        return m.Embedded(task.spec.id, size, pooling, vectors)

    @property
    def _info(self) -> EmbedInfo:
        assert self._model.info.embedding is not None, "texts were checked"
        return self._model.info.embedding

    def _spec(self, task: Task) -> EmbedSpec:
        assert task.spec.embed is not None
        return task.spec.embed

    def check_integrity(self) -> None:
        """Assert that every text is in one place, and that those under way fit."""
        slots = [t.slot for t in self.running]
        assert len(set(slots)) == len(slots) and all(s >= 0 for s in slots)
        assert all(t.slot < 0 and not t.computed for t in self.waiting)
        if self.running:
            assert sum(t.prompt_size for t in self.running) <= self._info.tokens_max
            assert len(slots) <= self._info.slots


def _chunk(part: ScheduledTokens) -> Chunk:
    task, start = part.task, part.task.computed
    end = start + part.count
    return Chunk(task.slot, task.tokens[start:end], start, logits=False)
