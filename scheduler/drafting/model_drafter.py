"""The drafter of a draft model, or of a model's NextN layers. Its slots follow those of the model.

A slot of the draft model has tokens of the task in the model's slot of the same number. Nothing
notifies it of changes: before it computes, it drops what differs from the task's tokens. So drafts
that were rejected, shifts, parking and other slots need no care, and a state that was dropped is
computed again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...backends import Chunk, DraftModel
from ..kv.slots import SlotTable
from ..kv.store import Origin
from ..policy.cost import KeepTime, StepCost, StepLoad
from ..prefix import common_prefix
from ..task import Task

LAG_MAX = 16
"""The most tokens that are computed before the first draft of a step. A task that lags further
behind has no drafts before `catch_up` was called.
"""
FIRST_TOKENS = 32
"""The most tokens of a step before the first one's time is known."""

UNKNOWN = -1


@dataclass(slots=True)
class _Held:
    """The *tokens* in a slot, of which the first *agreed* are those of the task."""

    task_id: int
    origin: Origin
    dropped: int
    tokens: array[int]
    agreed: int = 0
    checked: int = 0
    """Tokens of the task that the draft model knows, or `UNKNOWN` if it does not know one."""


class ModelDrafter:
    """Owned by the engine's thread. *seconds* is its clock, *is_eog* whether a token ends answers,
    behind which nothing is drafted.
    """

    def __init__(
        self, model: DraftModel, seconds: Callable[[], float], is_eog: Callable[[int], bool]
    ):
        self.cost = StepCost()
        self._keep_time = KeepTime()
        self._model, self._seconds, self._is_eog = model, seconds, is_eog
        self._held: dict[int, _Held] = {}
        """By slot."""

    def lag(self, task: Task) -> int:
        """Return how many tokens of *task* are not computed, at least one."""
        return len(task.tokens) - len(self._follow(task).tokens)

    def drafts_max(self, task: Task) -> int:
        """Return the most drafts for *task*; 0 if its context has no place for more, or it has
        entries or tokens that the draft model does not know.
        """
        held = self._follow(task)
        if task.media or held.checked < 0:
            return 0
        new, held.checked = task.tokens[held.checked :], len(task.tokens)
        if new and not 0 <= min(new) <= max(new) < self._model.vocab_size:
            held.checked = UNKNOWN
            return 0
        most = max(0, self._model.ctx_size - len(task.tokens) + 1)
        return min(most, LAG_MAX - 1) if self._model.computes_again else most

    def lag_s(self, task: Task, tokens: int) -> float:
        """Return the seconds in which the next *tokens* of *task* are computed."""
        held = self._held.get(task.slot)
        begin = 0 if held is None else len(held.tokens)
        return self.cost.predict(StepLoad.of_chunks([(begin, tokens)]))

    def draft_s(self, streams: int, drafts: int) -> float:
        """Return the seconds in which each of *streams* gets that many *drafts*."""
        keep_s = self._keep_time.seconds * streams if drafts > 1 else 0.0
        return drafts * self.cost.decode_s(streams) + keep_s

    def catch_up(self, task: Task, seconds: float) -> None:
        """Compute the next tokens of *task*, but its last one, for about that many *seconds*.

        :raises BackendError: the draft model failed.
        """
        held = self._follow(task)
        most = min(len(task.tokens) - 1 - len(held.tokens), self._model.batch_size)
        if not self.cost.known:
            most = min(most, FIRST_TOKENS)
        while most > LAG_MAX and self.lag_s(task, most) > seconds:
            most //= 2
        begin = len(held.tokens)
        if most > 0:
            tokens = task.tokens[begin : begin + most]
            self._compute([Chunk(task.slot, tokens, begin, 0)])

    def propose(self, wanted: Sequence[tuple[Task, int]]) -> dict[int, list[int]]:
        """Return by the task's id the tokens that are expected next, at most the number that is
        *wanted* of each. The tasks are in the order of their slots.

        :raises BackendError: the draft model failed.
        """
        drafts: dict[int, list[int]] = {}
        chunks, tokens_left = [], self._model.batch_size
        most = {task.slot: count for task, count in wanted}
        for task, _ in wanted:
            begin = len(self._follow(task).tokens)
            tokens = task.tokens[begin:]
            if len(tokens) <= min(LAG_MAX, tokens_left):
                tokens_left -= len(tokens)
                chunks.append(Chunk(task.slot, tokens, begin, 1))
                drafts[task.slot] = []
        confirmed = True
        while chunks:
            found = self._compute(chunks)
            following = []
            for chunk, token in zip(chunks, found, strict=True):
                drafts[chunk.slot].append(token)
                if len(drafts[chunk.slot]) < most[chunk.slot] and not self._is_eog(token):
                    position = chunk.position + len(chunk.tokens)
                    following.append(Chunk(chunk.slot, [token], position, 1))
            chunks = following
            if confirmed and chunks:
                self._keep_states([chunk.slot for chunk in chunks])
            confirmed = False
        return {task.spec.id: drafts.get(task.slot, []) for task, _ in wanted}

    def _keep_states(self, slots: Sequence[int]) -> None:
        """Keep the states of *slots*, which have no drafts yet, and learn how long that takes."""
        started = time.thread_time()
        self._model.keep_states(slots)
        self._keep_time.learn(time.thread_time() - started, len(slots))

    def _compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute a step, and learn its time."""
        started = self._seconds()
        found = self._model.compute(chunks)
        load = StepLoad.of_chunks([(c.position, len(c.tokens)) for c in chunks])
        self.cost.learn_step(load, self._seconds() - started)
        for chunk in chunks:
            self._held[chunk.slot].tokens.extend(chunk.tokens)
        return found

    def _follow(self, task: Task) -> _Held:
        """Drop the tokens of the task's slot that are not those of *task*; return the others. The
        last token of *task* is not among them, because its logits are needed.
        """
        held, end = self._held.get(task.slot), len(task.tokens) - 1
        if held is None or held.task_id != task.spec.id or held.dropped != task.dropped:
            tokens = array("i")
            if held is not None and held.origin.serves(task.origin):
                tokens = held.tokens
            held = _Held(task.spec.id, task.origin, task.dropped, tokens)
            held.agreed = min(end, common_prefix(tokens, array("i", task.tokens)))
            self._held[task.slot] = held
        del held.tokens[self._model.length(task.slot) :]  # drafts that are computed again
        tokens, keep, most = held.tokens, held.agreed, min(len(held.tokens), end)
        while keep < most and tokens[keep] == task.tokens[keep]:
            keep += 1
        if keep < len(tokens) or self._model.length(task.slot) > keep:
            keep = self._model.trim(task.slot, keep)
            del tokens[keep:]
        if (begin := self._model.skip(task.slot, end)) > keep:
            tokens.extend(task.tokens[keep:begin])
            keep = begin
        held.agreed = keep
        return held

    def follow_slots(self, slots: SlotTable) -> None:
        """Clear the slots whose tokens no task may use now: the model's slot was cleared, or
        has the state of others.
        """
        for index, held in list(self._held.items()):
            slot = slots.slots[index]
            task = slot.task
            if task is not None:
                serves = task.spec.id == held.task_id or held.origin.serves(task.origin)
            else:
                serves = bool(slot.tokens) and slot.origin == held.origin
            if not serves:
                self.clear_slot(index)

    def forget_session(self, session: str) -> None:
        """Clear the slots with tokens of a session. Another user's session of the same name is
        computed again.
        """
        for slot in [s for s, held in self._held.items() if held.origin.session == session]:
            self.clear_slot(slot)

    def clear_slot(self, slot: int) -> None:
        """Drop the tokens of a slot."""
        del self._held[slot]
        self._model.trim(slot, 0)
