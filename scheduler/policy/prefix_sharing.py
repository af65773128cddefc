"""Shared prefixes: the running task whose prompt a waiting task can reuse."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...backends.base import KvKind
from ...backends.media import cut_point
from ..kv.slots import StateSearch
from ..prefix import common_prefix
from ..task import Task

OTHERS_MAX = 256
"""Number of tasks with which a task's common prefix is remembered: the most slots of a model."""


def prefix_hash_of(task: Task, shared_prefix_tokens_min: int) -> int:
    """Return a hash of the first tokens of *task*; 0 if it cannot share a prefix."""
    if task.ignores_cache or len(task.tokens) <= shared_prefix_tokens_min:
        return 0
    prefix = tuple(task.tokens[:shared_prefix_tokens_min])
    return hash((task.scope, task.spec.adapters, prefix)) or 1


class Leaders:
    """Finds the leader of each waiting task; owned by the engine."""

    def __init__(self, search: StateSearch, kv_kind: KvKind, shared_prefix_tokens_min: int):
        self._search, self._kv_kind = search, kv_kind
        self._shared_tokens_min = shared_prefix_tokens_min
        self._cached: dict[int, tuple[int, int]] = {}
        """By task, `changes` of the search, and the number of cached tokens at that time."""
        self._shared: dict[int, dict[int, int]] = {}
        """By task, the length of its common prefix with each other task."""

    def find_leader(self, task: Task, running: Sequence[Task]) -> Task | None:
        """Return the *running* task that *task* should wait for, if any, and have the leader's
        state saved at the end of their common prefix.

        A task waits while the leader computes a prompt with a common prefix that is at least
        `shared_prefix_tokens_min` longer than the cached one. It loses no time by this: two tasks
        that share the steps would not compute the prefix faster, and the leader gets the class of
        the tasks that wait for it.
        """
        if not task.prefix_hash or task.computed or task.shifted:
            return None
        best, end = None, 0
        for other in running:
            if other.prefix_hash == task.prefix_hash and other.prefilling and not other.shifted:
                shared = self._common(task, other)
                if shared > max(other.computed, end):
                    best, end = other, shared
        if best is None:
            return None
        gain = end - self._cached_tokens(task, best)
        if gain <= 0 or (gain < self._shared_tokens_min and not task.follows):
            return None  # a task that already waits does so until the whole prefix is computed
        best.checkpoints.add(end)
        return best

    def _common(self, task: Task, other: Task) -> int:
        shared, number = self._shared.setdefault(task.spec.id, {}), other.spec.id
        if number not in shared:
            if len(shared) >= OTHERS_MAX:
                shared.clear()
            most = min(len(task.tokens) - 1, other.prompt_size)
            common = min(common_prefix(task.tokens, other.tokens), most)
            shared[number] = cut_point(task.tokens, common)
        return shared[number]

    def _cached_tokens(self, task: Task, other: Task) -> int:
        """Return how many tokens *task* could reuse if it did not wait for *other*."""
        copied = other.computed if self._kv_kind == "plain" else 0
        changes = self._search.changes
        known = self._cached.get(task.spec.id)
        if known is None or known[0] != changes:
            cached = self._search.find_source(task.origin, array("i", task.tokens)).keep
            known = self._cached[task.spec.id] = changes, cached
        return max(copied, known[1])

    def forget_task(self, task: Task) -> None:
        """Forget a task that has ended."""
        self._cached.pop(task.spec.id, None)
        self._shared.pop(task.spec.id, None)
