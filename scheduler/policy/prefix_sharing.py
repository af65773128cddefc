"""Shared prefixes: which running task computes what a waiting one then need not compute."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from ...backends.base import Memory
from ..kv.origin import Origin
from ..prefix import common_prefix
from ..task import Task

PAIRS_MAX = 100_000


def prefix_hash_of(task: Task, shared_prefix_tokens_min: int) -> int:
    """Return a hash of what *task* begins with; 0 if it is too short to share anything, or is to
    be computed anew.
    """
    if task.spec.no_cache or len(task.tokens) <= shared_prefix_tokens_min:
        return 0
    prefix = tuple(task.tokens[:shared_prefix_tokens_min])
    return hash((task.scope, task.spec.adapters, prefix)) or 1


class Leaders:
    """Finds the leader of each waiting task; owned by the engine.

    *spared* tells how many tokens of a task need not be computed as things are now; *changes*
    counts how often that may have changed.
    """

    def __init__(
        self,
        memory: Memory,
        shared_prefix_tokens_min: int,
        spared: Callable[[Origin, array[int]], int],
        changes: Callable[[], int],
    ):
        self._memory, self._least = memory, shared_prefix_tokens_min
        self._spared, self._changes = spared, changes
        self._known: dict[int, tuple[int, int]] = {}
        """What each waiting task would be spared, and as of which change."""
        self._shared: dict[tuple[int, int], int] = {}

    def find(self, task: Task, running: Sequence[Task]) -> Task | None:
        """Return which of the *running* tasks *task* had better wait for, and mark where it gets
        off: there the leader's state is saved.

        It waits while the leader reads a prompt whose prefix it shares for at least
        `shared_prefix_tokens_min` tokens more than are cached. No task reads a prompt faster than
        two that share the steps, and the leader gets the priority of its followers.
        """
        if not task.prefix_hash or task.computed or task.shifted:
            return None
        best, stop = None, 0
        for other in running:
            if other.prefix_hash == task.prefix_hash and other.prefilling and not other.shifted:
                shared = self._common(task, other)
                if shared > max(other.computed, stop):
                    best, stop = other, shared
        if best is None:
            return None
        gain = stop - self._there_already(task, best)
        if gain <= 0 or (gain < self._least and not task.follows):
            return None  # one that has waited so far waits for the rest
        best.stops.add(stop)
        return best

    def _common(self, task: Task, other: Task) -> int:
        pair = (task.spec.id, other.spec.id)
        if pair not in self._shared:
            if len(self._shared) >= PAIRS_MAX:
                self._shared.clear()
            most = min(len(task.tokens) - 1, other.prompt_size)
            self._shared[pair] = min(common_prefix(task.tokens, other.tokens), most)
        return self._shared[pair]

    def _there_already(self, task: Task, other: Task) -> int:
        """Return what *task* would be spared if it did not wait."""
        copied = other.computed if self._memory == "plain" else 0
        changes = self._changes()
        known = self._known.get(task.spec.id)
        if known is None or known[0] != changes:
            spared = self._spared(task.origin, array("i", task.tokens))
            known = self._known[task.spec.id] = changes, spared
        return max(copied, known[1])

    def forget(self, task: Task) -> None:
        """Forget a task that has ended."""
        self._known.pop(task.spec.id, None)
        self._shared = {p: n for p, n in self._shared.items() if task.spec.id not in p}
