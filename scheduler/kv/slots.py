"""Slots: which task leases which sequence of the model, what KV lies idle in the others, and how a
task comes to the state that spares it most.

Owned by the engine. There is one way to move state: save it, restore it into a sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...backends import Model
from ..prefix import common_prefix, equal_runs
from ..task import Task
from .origin import Origin
from .store import Entry, KvStore

__all__ = ("Slot", "SlotTable", "Source")

WORTH_TOKENS = 16
"""Fewer are computed again rather than saved: one small step."""
AHEAD_BYTES_MAX = 64 << 20
"""A larger state is not saved ahead: whoever arrives would wait for it for too long."""
NOBODY = Origin(scope=-2)


@dataclass(eq=False, slots=True)
class Slot:
    """A sequence of the model: leased by a task, or idle with the KV of `tokens`."""

    index: int
    task: Task | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    origin: Origin = NOBODY
    saved: bool = False
    """The idle KV was saved ahead: see `SlotTable.save_ahead`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a task can start from: the first *keep* tokens of a slot or of a saved state."""

    keep: int = 0
    slot: Slot | None = None
    entry: Entry | None = None

    @property
    def approximate(self) -> bool:
        """Tell whether the state there is what shifts have left."""
        holder = self.entry or (self.slot and (self.slot.task or self.slot))
        return holder is not None and holder.origin.approximate

    @property
    def tier(self) -> str:
        """Where the state lies: in a slot, in memory, or, until now, on disk."""
        if self.entry is None:
            return "slot"
        return "disk" if self.entry.fetched else "memory"


class SlotTable:
    """The slots of one model, and the states of parked tasks, which are pinned in *store*.

    Leased slots are kept without gaps between them: rows of a batch must ascend by
    sequence without gaps, or llama.cpp cuts the batch into several (measured: 66 → 92 ms with 16
    sequences). *again* tells the seconds that computing so many tokens again would take.
    """

    def __init__(self, model: Model, store: KvStore, again: Callable[[int], float]):
        self.slots = [Slot(i) for i in range(model.info.slots)]
        self.tasks: tuple[Task, ...] = ()
        """The tasks that lease a slot, by slot. Every step asks for them several times."""
        self.store = store
        self._model = model
        self._memory = model.info.memory
        self._again = again
        self._changes = 0
        self._token_bytes = 1.0
        """Of the state that was saved last."""
        self.reused = {"slot": 0, "memory": 0, "disk": 0}
        """Tokens that tasks were spared when they began, by where these were."""
        self.restores = 0
        """States that were put into a slot."""
        self._parked: dict[int, tuple[Entry | None, object]] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def idle(self) -> list[Slot]:
        """The slots that no task leases."""
        return [s for s in self.slots if s.task is None]

    # Where a task can start from.

    def find(self, origin: Origin, tokens: array[int]) -> Source:
        """Return what spares most of *tokens*; of equals a slot, which need not be copied."""
        best = Source()
        for slot in self.idle:
            keep = self._usable(slot, origin, tokens, best.keep)
            if keep > best.keep:
                best = Source(keep, slot=slot)
        entry, keep = self.store.find(origin, tokens, best.keep)
        if entry is not None:
            best = Source(keep, entry=entry)
        if self._memory == "plain":
            best = self._find_running(origin, tokens, best)
        return best

    def _usable(self, slot: Slot, origin: Origin, tokens: array[int], at_least: int) -> int:
        """Return how many of *tokens* an idle slot spares, by what the model can trim it to."""
        size, most = len(slot.tokens), len(tokens) - 1
        if min(size, most) <= at_least or slot.tokens[at_least] != tokens[at_least]:
            return 0
        if not slot.origin.serves(origin):
            return 0
        shared = common_prefix(slot.tokens, tokens)
        keep = min(shared, most)
        if keep < size and keep < self._model.trim_min(slot.index):
            return 0
        return keep

    def _find_running(self, origin: Origin, tokens: array[int], best: Source) -> Source:
        """Return a running task's slot where it beats *best* by what a copy is worth."""
        for slot in self.slots:
            task = slot.task
            at = best.keep + WORTH_TOKENS
            if task is None or task.computed <= at or task.unsettled or len(tokens) - 1 <= at:
                continue
            if task.tokens[at] != tokens[at] or not task.origin.serves(origin):
                continue
            done = array("i", task.tokens[: task.computed])
            keep = min(common_prefix(done, tokens), len(tokens) - 1)
            if keep > at:
                best = Source(keep, slot=slot)
        return best

    def parting(self, origin: Origin, tokens: array[int]) -> int:
        """Return how far *tokens* go with anything that is or was computed here.

        Where prompts part is worth a snapshot on models whose states serve only as a whole.
        """
        known = [(s.origin, s.tokens) for s in self.idle]
        known += [(t.origin, array("i", t.tokens)) for t in self.tasks]
        known += [(e.origin, e.tokens) for e in self.store]
        serving = (have for whose, have in known if whose.serves(origin))
        return max((common_prefix(have, tokens) for have in serving), default=0)

    @property
    def changes(self) -> int:
        """Counts what came and went in idle slots and in memory: what `find` finds changed."""
        return self._changes + self.store.changes

    # Leases.

    def admit(self, task: Task) -> None:
        """Give *task* a free slot, with its parked state or what else serves it."""
        self._changes += 1
        target = self._nearest()
        entry, row = self._parked.pop(task.spec.id, (None, None))
        if entry is None or not self._return(task, target, entry, row):
            task.row = False
            fresh = task.spec.fresh
            source = Source() if fresh else self.find(task.origin, array("i", task.tokens))
            approximate, tier = source.approximate, source.tier
            if source.slot is not None and source.slot.task is None:
                target = source.slot
            task.computed = self._start(task, target, source)
            if task.admitted_at is None:
                self.reused[tier] += task.computed
            task.shifted |= approximate and task.computed > 0
        target.tokens, target.origin = array("i"), task.origin
        task.slot = target.index
        self._lease(target, task)

    def _lease(self, slot: Slot, task: Task | None) -> None:
        slot.task = task
        self.tasks = tuple(s.task for s in self.slots if s.task is not None)

    def _return(self, task: Task, target: Slot, entry: Entry, row: object) -> bool:
        """Put a parked task's own state into *target*; False if it does not fit any more."""
        self._vacate(target)
        fits = self._model.restore(target.index, entry.state)
        self.restores += fits
        if fits and task.row:
            self._model.put_row(target.index, row)
        self.store.unpin(entry, spent=True)
        return fits

    def _nearest(self) -> Slot:
        """Return the free slot that leaves the leased ones closest together, an empty one first."""
        leased = [t.slot for t in self.tasks] or [0]
        low, high = leased[0], leased[-1]

        def rank(slot: Slot) -> tuple[int, bool]:
            return max(low - slot.index, slot.index - high, 0), bool(slot.tokens)

        return min(self.idle, key=rank)

    def _start(self, task: Task, target: Slot, source: Source) -> int:
        """Put the state that spares *task* most into *target*; return how many tokens it has."""
        if source.entry is not None:
            source.entry.pins += 1  # room is made for others
            self._vacate(target)
            have = self._load(target, source.entry)
            self.store.unpin(source.entry)
        elif source.slot is not None and source.slot.task is not None:
            have = self._copy(source.slot.task, target)
        elif source.slot is not None:
            have = self._take(target, source.keep)
        else:
            self._vacate(target)
            have = array("i")
        if task.spec.cache_reuse:
            reused = self._reuse(task, target, have, min(source.keep, len(have)))
            if reused:
                return reused
        return self._model.trim(target.index, min(source.keep, len(have)))

    def _load(self, target: Slot, entry: Entry) -> array[int]:
        if not self._model.restore(target.index, entry.state):
            return array("i")
        self.restores += 1
        self.store.use(entry)
        return entry.tokens

    def _copy(self, task: Task, target: Slot) -> array[int]:
        """Copy a running task's state, by way of the store: another may want it too."""
        self._vacate(target)
        state = self._model.save(task.slot)
        tokens = array("i", task.tokens[: task.computed])
        self.store.put(task.origin, tokens, state, self._again(len(tokens)))
        if not self._model.restore(target.index, state):
            return array("i")
        self.restores += 1
        return tokens

    def _take(self, slot: Slot, keep: int) -> array[int]:
        """Take over idle KV; what the task will not extend, or cannot give back, is saved first."""
        if len(slot.tokens) - keep >= WORTH_TOKENS or self._memory != "plain":
            self._preserve(slot)
        return slot.tokens

    def _reuse(self, task: Task, target: Slot, have: array[int], keep: int) -> int:
        """Let equal runs behind the common prefix move down; return what *task* then has."""
        if self._memory != "plain" or not self._model.info.can_shift:
            return 0
        runs = equal_runs(have, array("i", task.tokens), keep, task.spec.cache_reuse)
        if not runs:
            return 0
        self._model.reuse(target.index, [(0, 0, keep), *runs] if keep else runs)
        task.shifted = task.unsettled = True
        return keep + sum(count for _, _, count in runs)

    # Idle KV.

    def _vacate(self, slot: Slot) -> None:
        """Make an idle slot free to be overwritten: its KV goes to an empty one, or is saved."""
        empty = next((s for s in self.idle if not s.tokens), None)
        if slot.tokens and empty is not None and not self.store.covers(slot.origin, slot.tokens):
            self._swap(slot, empty)
        elif slot.tokens:
            self._preserve(slot)
            slot.tokens = array("i")

    def _preserve(self, slot: Slot) -> Entry | None:
        """Save idle KV, unless it is small or saved already."""
        if len(slot.tokens) < WORTH_TOKENS or self.store.covers(slot.origin, slot.tokens):
            return None
        state = self._model.save(slot.index)
        self._token_bytes = max(1.0, len(state) / len(slot.tokens))
        return self.store.put(slot.origin, slot.tokens, state, self._again(len(slot.tokens)))

    @property
    def unsaved(self) -> Slot | None:
        """An idle slot whose KV may be worth to be saved before somebody needs the slot."""
        if self.store.thrifty:
            return None
        for slot in self.idle:
            room = min(AHEAD_BYTES_MAX, self.store.bytes_max - self.store.bytes)
            if not slot.saved and WORTH_TOKENS <= len(slot.tokens) <= room / self._token_bytes:
                return slot
        return None

    def save_ahead(self) -> None:
        """Save the KV of one idle slot while there is nothing else to do."""
        slot = self.unsaved
        if slot is not None:
            self._preserve(slot)
            slot.saved = True

    def preserve_idle(self, scope: int | None = None, session: str = "") -> None:
        """Save the KV of idle slots, of all or of one session's, for a slower tier to take."""
        for slot in self.idle:
            if scope is None or (slot.origin.scope, slot.origin.session) == (scope, session):
                self._preserve(slot)

    def empty_idle(self) -> bool:
        """Save and give up all idle KV; tell whether there was any."""
        filled = [s for s in self.idle if s.tokens]
        for slot in filled:
            self._preserve(slot)
            self._empty(slot)
        return bool(filled)

    def forget(self, scope: int, session: str) -> None:
        """Forget the idle and saved KV that a session made."""
        for slot in self.idle:
            if slot.tokens and (slot.origin.scope, slot.origin.session) == (scope, session):
                self._empty(slot)
        self.store.forget(scope, session)

    def _swap(self, a: Slot, b: Slot) -> None:
        self._model.swap(a.index, b.index)
        a_task, b_task = a.task, b.task
        self._lease(a, b_task)
        self._lease(b, a_task)
        a.tokens, b.tokens = b.tokens, a.tokens
        a.origin, b.origin = b.origin, a.origin
        a.saved, b.saved = b.saved, a.saved
        for slot in (a, b):
            if slot.task is not None:
                slot.task.slot = slot.index

    # Ends of leases.

    def give_back(self, task: Task, *, keep: bool = True) -> None:
        """End the lease; with *keep* the KV stays in the slot, for whoever extends it."""
        slot = self.slots[task.slot]
        self._lease(slot, None)
        slot.origin, slot.saved = task.origin, False
        self._changes += 1
        task.slot = -1
        if keep and not task.unsettled:
            slot.tokens = array("i", task.tokens[: task.computed])
        else:
            self._empty(slot)

    def _empty(self, slot: Slot) -> None:
        self._changes += 1
        self._model.trim(slot.index, 0)
        slot.tokens = array("i")

    def clear(self, task: Task) -> None:
        """Forget the KV of a task whose step has failed."""
        task.computed = self._model.trim(task.slot, 0)
        task.row = task.unsettled = False

    def snapshot(self, task: Task) -> None:
        """Save a running task's state as it is, for those who share this beginning."""
        tokens = array("i", task.tokens[: task.computed])
        if len(tokens) >= WORTH_TOKENS and not self.store.covers(task.origin, tokens):
            state = self._model.save(task.slot)
            self.store.put(task.origin, tokens, state, self._again(len(tokens)))

    def park(self, task: Task, *, anyhow: bool = False) -> bool:
        """Save the task's state and give its slot back; False if there is no room for it.

        With *anyhow* it goes without its state then: it is computed again.
        """
        if task.unsettled and not anyhow:
            return False
        entry = None
        if task.computed and not task.unsettled:
            state, seconds = self._model.save(task.slot), self._again(task.computed)
            tokens = task.tokens[: task.computed]
            entry = self.store.put(task.origin, tokens, state, seconds, pin=True)
            if entry is None and not anyhow:
                return False
        if entry is None:
            self.clear(task)
        row = self._model.take_row(task.slot) if task.row else None
        self._parked[task.spec.id] = (entry, row)
        self.give_back(task, keep=False)
        return True

    def drop(self, task: Task) -> None:
        """Let go of the state of a parked task that has ended: others may use it."""
        entry, _ = self._parked.pop(task.spec.id, (None, None))
        if entry is not None:
            self.store.unpin(entry)

    def close_gaps(self) -> None:
        """Move leased slots so that they follow each other, with as few moves as may be."""
        leased = [t.slot for t in self.tasks]
        if not leased or leased[-1] - leased[0] < len(leased):
            return
        starts = range(len(self.slots) - len(leased) + 1)
        runs = [range(start, start + len(leased)) for start in starts]
        run = max(runs, key=lambda run: sum(slot in run for slot in leased))
        free = [s for s in self.idle if s.index in run]
        for task in [t for t in self.tasks if t.slot not in run and not t.unsettled]:
            self._swap(self.slots[task.slot], free.pop())

    def hold_rows(self, stepping: set[int]) -> None:
        """Keep the rows of logits that the next step, over the slots *stepping*, would lose."""
        for task in self.tasks:
            if task.row and task.slot not in stepping:
                self._model.hold(task.slot)

    def check_integrity(self, parked: set[int]) -> None:
        """Assert that every lease is mutual, that just the tasks *parked* are saved, and that
        what is said of the slots is what the model has in them.
        """
        assert all(self.slots[t.slot].task is t for t in self.tasks)
        assert len(self.tasks) == len(self.slots) - len(self.idle)
        assert set(self._parked) == parked
        pinned = [e for e, _ in self._parked.values() if e is not None]
        assert sorted(map(id, pinned)) == sorted(id(e) for e in self.store if e.pins)
        for slot in self.slots:
            size = slot.task.computed if slot.task is not None else len(slot.tokens)
            assert self._model.length(slot.index) == size, f"slot {slot.index}"
        self.store.check_integrity()
