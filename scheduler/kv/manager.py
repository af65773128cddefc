"""The KV states of one model: requests about them, and their traffic between memory and disk."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from ...backends import LanguageModel
from ...backends.memory import return_free_memory
from .. import messages as m
from ..settings import EngineSettings
from ..task import Task
from .disk import QUEUE_BYTES_MAX, DiskTier, KvFiles
from .file_format import KvFile
from .slots import SlotTable, StateSearch
from .store import KvStore, Origin, SavedState, scoped
from .task_states import SAVE_TOKENS_MIN, IdleStates, TaskStates

PREFETCH_BYTES_MAX, PREFETCH_SHARE = QUEUE_BYTES_MAX // 2, 4
"""Bounds on the named states that are read after a start: their bytes, half of the queue's bound so
that it has space for reads of tasks, and the divisor of `kv_ram_bytes`.
"""
CLOSE_S = 10.0
"""Bound on writing the KV states to disk when the engine exits."""


class KvManager:
    """The slots of *model*, its states in memory and, with *files*, on disk. Owned by the engine.
    *recompute_s* estimates the time to compute a number of tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: EngineSettings,
        recompute_s: Callable[[int], float],
        files: KvFiles | None,
    ):
        kv_kind = model.info.kv_kind
        self.store = KvStore(settings.kv_ram_bytes, kv_kind, settings.checkpoints_max)
        self.slots = SlotTable(model)
        self.disk = DiskTier(files, self.store, kv_kind) if files is not None else None
        if self.disk is not None:
            bytes_max = settings.kv_ram_bytes // PREFETCH_SHARE
            self.disk.prefetch_named_states(min(PREFETCH_BYTES_MAX, bytes_max))
        self.idle = IdleStates(model, self.slots, self.store, recompute_s)
        self.search = StateSearch(model, self.slots, self.store)
        self.task_states = TaskStates(
            model, self.slots, self.store, self.idle, self.search, recompute_s
        )
        self.fetches = 0
        """Tasks for which a state was read from disk."""
        self._kv_kind = kv_kind
        self._recompute_s = recompute_s
        self._settings = settings
        self._writing = False

    # Commands.

    def look_up(self, command: m.Lookup | m.PersistState) -> m.CommandResult:
        """Return how many tokens of a history a state covers. `PersistState` writes it to disk."""
        shared = self._settings.kv_shared
        scope, session = scoped(command.user, command.session, shared=shared)
        origin = Origin(scope, session, command.adapters, approximate=True)
        tokens = array("i", command.tokens)
        tokens.append(-1)  # the last token is never reused; with this one a whole history counts
        find = self._persist if isinstance(command, m.PersistState) else self._find_cached
        return m.CommandResult(command.id, find(origin, tokens))

    def export_state(self, command: m.ExportState) -> Iterator[m.CommandResult]:
        """Write the state that covers most of a dormant session's history, unless a file covers
        more. The answer is the name of the file, or empty if there is none. It is yielded here, or
        by `poll` if the file has to be written first.
        """
        scope, session = scoped(command.user, command.session, shared=self._settings.kv_shared)
        origin = Origin(scope, session, command.adapters, approximate=True)
        tokens = array("i", command.tokens)
        tokens.append(-1)  # as in `look_up`
        for slot in self.idle.slots_of(scope, session):
            self.idle.save_slot(slot)
        entry, kept = self.store.find_state(origin, tokens)
        if self.disk is None:
            yield m.CommandResult(command.id, "")
            return
        file, _ = self.disk.find_file(origin, tokens, kept)
        if file is not None or entry is None:
            yield m.CommandResult(command.id, "" if file is None else file.key.name)
        else:
            yield from self.disk.export_state(entry, command.id)

    def save_named_state(self, command: m.SaveNamedState) -> Iterator[m.CommandResult]:
        """Write the state of a named prompt, from which sessions start, under the prompt's name,
        unless it is on disk. Yield the answer here, or by `poll` if it has to be written first.

        If it is on disk only, it is read into memory. A state that covers more tokens is not
        written in its place, because these may belong to another session.
        """
        scope, name = scoped(command.user, command.name, shared=self._settings.kv_shared)
        origin = Origin(scope, name, command.adapters, persist=True)
        tokens = array("i", command.tokens)
        file = None if self.disk is None else self.disk.find_named_state(origin, tokens)
        found = None
        if self.disk is not None and file is not None:
            if self._is_missing(origin, tokens):
                self.disk.prefetch_state(file, origin)
            yield m.CommandResult(command.id, len(file.key.tokens) // tokens.itemsize)
        elif self.disk is not None and (found := self._find_whole(origin, tokens)) is not None:
            have = found.tokens
            entry = SavedState(origin, have, found.state, self._recompute_s(len(have)))
            yield from self.disk.save_named_state(entry, command.id)
        else:
            yield m.CommandResult(command.id, 0)

    def share_kv(self, command: m.ShareKv) -> None:
        """Bring the KV state of a shared named state into memory for another user."""
        target = Origin(command.for_user, "", command.adapters)
        self._share(command.user, command.name, target, array("i", command.tokens))

    def share_with_task(self, task: Task) -> None:
        """Bring the KV state that another user shares with a new task into memory for the task."""
        shared = task.spec.shared_kv
        if shared is not None and not task.ignores_cache:
            target = Origin(task.spec.owner.user, "", task.spec.adapters)
            self._share(shared.user, shared.name, target, array("i", task.tokens[: shared.size]))

    def _share(self, user: int, name: str, target: Origin, tokens: array[int]) -> None:
        """Copy a KV state of exactly *tokens* from *user*'s states to those of *target*, another
        user. So neither user's tasks start from turns of the other. A file is read for the other
        user alone; otherwise a faster turn would show its owner that it was used.
        """
        scope, session = scoped(user, name, shared=self._settings.kv_shared)
        origin = Origin(scope, session, target.adapters, persist=True)
        if self._settings.kv_shared:
            target = origin  # one state serves every user
        if not self._is_missing(target, tokens):
            return
        found = self._find_whole(origin, tokens)
        file = None if self.disk is None else self.disk.find_named_state(origin, tokens)
        if found is not None:
            self.store.add_state(target, found.tokens, found.state, found.seconds)
        elif self.disk is not None and file is not None:
            self.disk.prefetch_state(file, target)

    def _is_missing(self, origin: Origin, tokens: array[int]) -> bool:
        """Return whether reading a file is worthwhile for those *tokens* that are not in memory."""
        cached = self.search.find_source(origin, array("i", [*tokens, -1])).keep
        return len(tokens) - cached >= self._settings.shared_prefix_tokens_min

    def _find_whole(self, origin: Origin, tokens: array[int]) -> SavedState | None:
        """Return a state in memory of exactly *tokens*, or of all but the last one, which is not
        computed if a turn ended with it.
        """
        for have in (tokens, tokens[:-1]):
            for slot in self.slots.idle:
                if slot.tokens == have and slot.origin.serves(origin):
                    self.idle.save_slot(slot)
            for entry in self.store:
                whole = self.store.is_whole(entry) and entry.origin.serves(origin)
                if whole and entry.tokens == have:
                    return entry
        return None

    def _find_cached(self, origin: Origin, tokens: array[int]) -> int:
        cached = self.search.find_source(origin, tokens).keep
        return max(cached, self._find_on_disk(origin, tokens, cached))

    def _find_on_disk(self, origin: Origin, tokens: array[int], more_than: int = 0) -> int:
        return 0 if self.disk is None else self._find_files(self.disk, origin, tokens, more_than)[1]

    def _find_files(
        self, disk: DiskTier, origin: Origin, tokens: array[int], more_than: int
    ) -> tuple[list[KvFile], int]:
        """Return the files with which a task can start, and how many of its tokens they cover, if
        these are more than *more_than*.
        """
        file, keep = disk.find_file(origin, tokens, more_than)
        if self._kv_kind == "hybrid":
            files, cut = disk.find_cut(origin, tokens, max(more_than, keep), self.search)
            if files:
                return files, cut
        return [] if file is None else [file], keep

    def _persist(self, origin: Origin, tokens: array[int]) -> int:
        for slot in self.idle.slots_of(origin.scope, origin.session):
            self.idle.save_slot(slot)
        entry, kept = self.store.find_state(origin, tokens)
        if entry is not None and self.disk is not None and self.disk.save_with_checkpoints(entry):
            return kept
        return self._find_on_disk(origin, tokens)

    def delete_session_states(self, command: m.DeleteSessionStates) -> Iterator[m.CommandResult]:
        """Delete a session's states. Yield the answer, unless the session may have files: then
        `poll` yields it once they are deleted.
        """
        scope, session = scoped(command.user, command.session, shared=self._settings.kv_shared)
        for slot in self.idle.slots_of(scope, session):
            self.slots.clear_slot(slot)
        self.store.delete_session_states(scope, session)
        if self.disk is None:
            yield m.CommandResult(command.id, None)
        else:
            self.disk.delete_session_files(scope, session, command.id)

    def add_file(self, owner: int, name: str) -> None:
        """Find states in a file that the daemon has written."""
        if self.disk is not None:
            self.disk.add_file(owner, name)

    def forget_file(self, name: str) -> None:
        """Forget a file that the daemon has deleted to free disk space."""
        if self.disk is not None:
            self.disk.forget_file(name)

    def set_low_memory(self, command: m.SetLowMemory) -> m.CommandResult:
        """Start or end low-memory mode, in which only pinned states stay in memory. Return the
        bytes of the others.
        """
        self.store.low_memory = command.on
        droppable = self.store.unpinned if command.on else []
        return m.CommandResult(command.id, sum(len(entry.state) for entry in droppable))

    # Every iteration.

    def poll(self, queue: Iterable[Task], now: float) -> Iterator[m.Report]:
        """Apply the file thread's results, and have it read the states that new tasks need."""
        if self.disk is None:
            return
        yield from self.disk.poll()
        for task in queue:
            if not task.looked_up:
                task.looked_up = True
                if not task.ignores_cache:
                    self._fetch(task, self.disk)
            elif task.fetching and now >= task.arrived_at + self._settings.fetch_timeout_s:
                task.fetching = False

    def _fetch(self, task: Task, disk: DiskTier) -> None:
        """Have the state of a new task read from disk, if it covers enough more tokens."""
        tokens = array("i", task.tokens)
        cached = self.search.find_source(task.origin, tokens).keep
        files, keep = self._find_files(disk, task.origin, tokens, cached)
        if files and keep - cached >= self._fetch_tokens_min(files[0], task.origin):
            for file in files:
                disk.fetch_state(task, file)
            self.fetches += task.fetching

    def _fetch_tokens_min(self, file: KvFile, origin: Origin) -> int:
        """Return the number of tokens for which reading *file* is worthwhile. A session's own file
        is short if its history is short. Another session's may be long, though the task uses only
        the beginning of it.
        """
        own = bool(origin.session) and file.key.session == origin.session
        return SAVE_TOKENS_MIN if own else self._settings.shared_prefix_tokens_min

    def spill(self) -> None:
        """Write to disk those evicted states that may be persisted."""
        if self.store.low_memory:
            self._empty_memory()
        if self.disk is not None:
            for entry in self.store.evicted:
                self.disk.save_state(entry)
        self.store.evicted.clear()

    def _empty_memory(self) -> None:
        """Free memory as fast as the disk accepts the states that may be persisted."""
        disk = self.disk
        droppable = [
            entry
            for entry in self.store.unpinned
            if disk is None or not entry.origin.persist or disk.save_state(entry)
        ]
        for entry in droppable:
            self.store.remove(entry)
        was_writing, self._writing = self._writing, disk is not None and disk.writing
        if droppable or (was_writing and not self._writing):
            return_free_memory()

    def close(self) -> list[m.Report]:
        """Write the states that may be persisted, for at most `CLOSE_S`; return the reports."""
        if self.disk is None:
            return []
        for slot in self.slots.idle:
            self.idle.save_slot(slot)
        reports = self.disk.save_all(CLOSE_S)
        self.disk.close()
        return reports

    def statistics(self) -> dict[str, int | str]:
        """Return the numbers of states and bytes, in memory and on disk."""
        disk, checkpoints = self.disk, self.store.checkpoints
        return {
            "fetches": self.fetches,
            "kv_ram_bytes": self.store.bytes,
            "kv_ram_entries": len(self.store),
            "kv_ram_checkpoints": len(checkpoints),
            "kv_ram_checkpoint_bytes": sum(len(entry.state) for entry in checkpoints),
            "checkpoint_bytes": self.store.checkpoint_bytes,
            "kv_disk_files": len(disk) if disk is not None else 0,
            "kv_disk_bytes": disk.bytes if disk is not None else 0,
            "kv_disk_failures": disk.failures if disk is not None else 0,
            "kv_disk_cause": disk.cause if disk is not None else "",
        }

    def check_integrity(self, parked: set[int]) -> None:
        """Assert that slots and states agree, and that *parked* are all parked tasks."""
        self.slots.check_integrity()
        self.task_states.check_integrity(parked)
        self.store.check_integrity()
