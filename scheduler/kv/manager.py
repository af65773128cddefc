"""The KV states of one model: answers about them, and their traffic between memory and disk."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ...backends import Model
from .. import messages as m
from ..limits import Limits
from ..task import Task
from . import heap
from .disk import DiskTier
from .files import KvFiles
from .idle_states import IdleStates
from .origin import Origin, scoped
from .search import StateSearch
from .slots import SlotTable
from .store import KvStore, SavedState
from .task_states import TaskStates

CLOSE_S = 10.0
"""What writing the KV states to disk may take when the engine ends."""


class KvManager:
    """The slots of *model*, its states in memory and, where *files* are given, on disk. Owned by
    the engine. *recompute_s* estimates the seconds that computing so many tokens would take.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        recompute_s: Callable[[int], float],
        files: KvFiles | None,
    ):
        memory = model.info.memory
        self.store = KvStore(limits.kv_ram_bytes, memory)
        self.slots = SlotTable(model)
        self.disk = DiskTier(files, self.store, memory) if files is not None else None
        self.idle = IdleStates(model, self.slots, self.store, recompute_s)
        self.search = StateSearch(model, self.slots, self.store)
        self.task_states = TaskStates(
            model, self.slots, self.store, self.idle, self.search, recompute_s
        )
        self.fetches = 0
        """Tasks for which a state was read from disk."""
        self._limits = limits
        self._forgetting: deque[int] = deque()
        self._writing = False

    # Commands.

    def look_up(self, command: m.Lookup | m.Keep) -> m.CommandResult:
        """Answer how much of a history is here; with `Keep`, put it on disk, too."""
        shared = self._limits.kv_shared
        scope, session = scoped(command.owner, command.session, shared=shared)
        origin = Origin(scope, session, command.adapters, approximate=True)
        tokens = array("i", command.tokens)
        tokens.append(-1)  # the last token is never spared: here, all of the history can be
        find = self._keep if isinstance(command, m.Keep) else self._kept
        return m.CommandResult(command.id, find(origin, tokens))

    def _kept(self, origin: Origin, tokens: array[int]) -> int:
        kept = self.search.find_source(origin, tokens).keep
        return max(kept, self._on_disk(origin, tokens))

    def _on_disk(self, origin: Origin, tokens: array[int]) -> int:
        return self.disk.find(origin, tokens, 0)[1] if self.disk is not None else 0

    def _keep(self, origin: Origin, tokens: array[int]) -> int:
        self.idle.save_session(origin.scope, origin.session)
        entry, kept = self.store.find(origin, tokens)
        if entry is not None and self.disk is not None and self.disk.save(entry):
            return kept
        return self._on_disk(origin, tokens)

    def forget(self, command: m.Forget) -> Iterator[m.CommandResult]:
        """Forget a session's states; the answer comes now, or with `poll` once files are gone."""
        scope, session = scoped(command.owner, command.session, shared=self._limits.kv_shared)
        self.idle.forget_session(scope, session)
        self.store.forget(scope, session)
        if self.disk is None:
            yield m.CommandResult(command.id, None)
        else:
            self.disk.forget(scope, session)
            self._forgetting.append(command.id)

    def evicted(self, name: str) -> None:
        """Take note that a file was deleted to make room on the disk."""
        if self.disk is not None:
            self.disk.evicted(name)

    def set_low_memory(self, command: m.SetLowMemory) -> m.CommandResult:
        """Hold no states but those of parked tasks, or do so again."""
        self.store.low_memory = command.on
        leaving = self.store.unpinned if command.on else []
        return m.CommandResult(command.id, sum(len(entry.state) for entry in leaving))

    # Every turn.

    def poll(self, queue: Iterable[Task], now: float) -> Iterator[m.Report]:
        """Take what the file thread has done, and have it read what new tasks need."""
        if self.disk is None:
            return
        yield from self.disk.poll()
        done, self.disk.forgotten = self.disk.forgotten, 0
        for _ in range(done):
            yield m.CommandResult(self._forgetting.popleft(), None)
        for task in queue:
            if not task.looked_up:
                task.looked_up = True
                if not task.spec.no_cache:
                    self._fetch(task, self.disk)
            elif task.fetching and now >= task.arrived_at + self._limits.fetch_timeout_s:
                task.fetching = False

    def _fetch(self, task: Task, disk: DiskTier) -> None:
        """Have the state of a task that has just come read from disk, where it spares much."""
        tokens = array("i", task.tokens)
        here = self.search.find_source(task.origin, tokens).keep
        file, keep = disk.find(task.origin, tokens, here)
        if file is not None and keep - here >= self._limits.shared_prefix_tokens_min:
            disk.fetch(task, file)
            self.fetches += task.fetching

    def spill(self) -> None:
        """Write to disk what memory has had no room for, as far as that may be."""
        if self.store.low_memory:
            self._let_go()
        if self.disk is not None:
            self.disk.spill()
        self.store.evicted.clear()

    def _let_go(self) -> None:
        """Empty memory, as fast as the disk takes what may go there."""
        leaving = [entry for entry in self.store.unpinned if self._is_safe(entry)]
        for entry in leaving:
            self.store.remove(entry)
        was_writing, self._writing = self._writing, self.disk is not None and self.disk.writing
        if leaving or (was_writing and not self._writing):
            heap.give_back()

    def _is_safe(self, entry: SavedState) -> bool:
        """Tell whether an entry can go: it is on disk, on its way there, or not to be there."""
        return self.disk is None or not entry.origin.persist or self.disk.save(entry)

    def close(self) -> list[m.Report]:
        """Write the KV states that may be on disk there, for at most `CLOSE_S`, and end; return
        which these are.
        """
        if self.disk is None:
            return []
        self.idle.save_all()
        reports = self.disk.save_all(CLOSE_S)
        self.disk.close()
        return reports

    def statistics(self) -> dict[str, int | str]:
        """Return what there is, in memory and on disk."""
        disk = self.disk
        return {
            "fetches": self.fetches,
            "kv_ram_bytes": self.store.bytes,
            "kv_ram_entries": len(self.store),
            "kv_disk_files": len(disk) if disk is not None else 0,
            "kv_disk_bytes": disk.bytes if disk is not None else 0,
            "kv_disk_failures": disk.failures if disk is not None else 0,
            "kv_disk_cause": disk.cause if disk is not None else "",
        }

    def check_integrity(self, parked: set[int]) -> None:
        """Assert that slots, states and leases agree, where just the tasks *parked* are parked."""
        self.slots.check_integrity()
        self.task_states.check_integrity(parked)
        self.store.check_integrity()
