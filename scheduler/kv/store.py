"""KV states outside the slots: in memory, and through the file thread on disk.

An entry is a state and the tokens that it is of. It is found by these, by who may use it, and by
the adapters that computed it. Taking a state does not consume it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...backends.base import Memory
from ..prefix import common_prefix
from .greedy_dual import GreedyDual
from .origin import Origin


@dataclass(eq=False, slots=True)
class SavedState:
    """One saved state; see the module's docstring. Immutable but for its bookkeeping."""

    origin: Origin
    tokens: array[int]
    state: bytes
    seconds: float
    """What computing it again would take."""
    pins: int = 0
    hits: int = 0
    fetched: bool = False
    """It was read from disk, and nobody has used it since."""


def usable(have: array[int], tokens: array[int], memory: Memory, at_least: int = 0) -> int:
    """Return how many of *tokens* a state of *have* spares computing; 0 if not over *at_least*.

    The last token is always decoded, for its logits. Of a plain model's state any first part can
    be used, of another's only the whole: a window's or recurrence's past is not in it.
    """
    size, most = len(have), len(tokens) - 1
    if at_least >= min(size, most):
        return 0
    if memory != "plain":
        return size if size <= most and have == tokens[:size] else 0
    if have[at_least] != tokens[at_least]:
        return 0
    shared = min(common_prefix(have, tokens), most)
    return shared if shared > at_least else 0


class KvStore:
    """The entries in memory, at most *bytes_max* of states and `ENTRIES_MAX` of them.

    The least valuable are evicted first, by `GreedyDual`. Pinned ones stay. Evicted states are left
    in `evicted`, for the disk tier.
    """

    ENTRIES_MAX = 4096

    def __init__(self, bytes_max: int, memory: Memory):
        self.bytes_max = bytes_max
        self.bytes = 0
        self.evicted: list[SavedState] = []
        self.changes = 0
        """Counts what came and went."""
        self.low_memory = False
        """Memory is short: what is not pinned is not to stay."""
        self._memory = memory
        self._entries: list[SavedState] = []
        self._values = GreedyDual[SavedState]()

    def __iter__(self) -> Iterator[SavedState]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self, origin: Origin, tokens: array[int], at_least: int = 0
    ) -> tuple[SavedState | None, int]:
        """Return the entry that spares most of *tokens*, and how many; more than *at_least*."""
        best, most = None, at_least
        for entry in self._entries:
            if entry.origin.serves(origin):
                spared = usable(entry.tokens, tokens, self._memory, most)
                if spared:
                    best, most = entry, spared
        return best, most if best is not None else 0

    def covers(self, origin: Origin, tokens: Sequence[int]) -> bool:
        """Tell whether an entry holds all that a state of *tokens* could spare."""
        wanted, size = array("i", tokens), len(tokens)
        for entry in self._entries:
            same = entry.origin.approximate == origin.approximate and entry.origin.serves(origin)
            fits = len(entry.tokens) == size or (
                self._memory == "plain" and len(entry.tokens) > size
            )
            if same and fits and entry.tokens[:size] == wanted:
                return True
        return False

    def put(
        self,
        origin: Origin,
        tokens: Sequence[int],
        state: bytes,
        seconds: float,
        *,
        pin: bool = False,
    ) -> SavedState | None:
        """Keep a state; None where even without what is not pinned there is no room for it, and
        one that is not to be pinned is then in `evicted`.

        On a plain model it takes the place of what the same session had of its beginning.
        """
        entry = SavedState(origin, array("i", tokens), state, seconds, pins=int(pin))
        if not self._make_room(len(state)):
            if not pin:
                self.evicted.append(entry)
            return None
        if self._memory == "plain":
            self._supersede(entry)
        self._entries.append(entry)
        self.changes += 1
        self.bytes += len(state)
        self._touch(entry)
        return entry

    def use(self, entry: SavedState) -> None:
        """Note that an entry was of use."""
        entry.hits += 1
        entry.fetched = False
        self._touch(entry)

    def unpin(self, entry: SavedState, *, spent: bool = False) -> None:
        """Let an entry go; one that is *spent* and served nobody else is dropped."""
        entry.pins -= 1
        if spent and not entry.hits and not entry.pins:
            self.remove(entry)
        self._evict(0)

    def remove(self, entry: SavedState) -> None:
        """Drop an entry."""
        self._entries.remove(entry)
        self._values.remove(entry)
        self.changes += 1
        self.bytes -= len(entry.state)

    def forget(self, scope: int, session: str) -> None:
        """Drop what a session made, but for what is pinned: that is a running turn's."""
        whose = (scope, session)
        self.evicted = [e for e in self.evicted if (e.origin.scope, e.origin.session) != whose]
        for entry in [e for e in self._entries if not e.pins]:
            if entry.origin.scope == scope and entry.origin.session == session:
                self.remove(entry)

    def by_value(self) -> list[SavedState]:
        """Return all entries, the most valuable first."""
        return self._values.by_value()

    @property
    def unpinned(self) -> list[SavedState]:
        """The entries that no task holds, the most valuable first."""
        return [entry for entry in self._values.by_value() if not entry.pins]

    def shrink(self, bytes_max: int) -> None:
        """Hold no more than *bytes_max* from now on."""
        self.bytes_max = bytes_max
        self._evict(0)

    def _touch(self, entry: SavedState) -> None:
        self._values.use(entry, len(entry.state), entry.seconds)

    def _supersede(self, entry: SavedState) -> None:
        for other in [e for e in self._entries if e.origin == entry.origin and not e.pins]:
            size = len(other.tokens)
            if other.hits < 2 and size <= len(entry.tokens) and entry.tokens[:size] == other.tokens:
                self.remove(other)

    def _make_room(self, size: int) -> bool:
        pinned = sum(len(e.state) for e in self._entries if e.pins)
        if pinned + size > self.bytes_max:
            return False
        self._evict(size)
        return len(self) < self.ENTRIES_MAX

    def _evict(self, size: int) -> None:
        """Drop the least valuable until *size* bytes and one entry more would fit."""
        if self._has_place(size):
            return
        for entry in reversed(self.unpinned):
            self._values.evict(entry)
            self.remove(entry)
            self.evicted.append(entry)
            if self._has_place(size):
                return

    def _has_place(self, size: int) -> bool:
        return self.bytes + size <= self.bytes_max and len(self) < self.ENTRIES_MAX

    def check_integrity(self) -> None:
        """Assert that bytes are counted right and bounded."""
        assert self.bytes == sum(len(e.state) for e in self._entries)
        assert self.bytes <= self.bytes_max or all(e.pins for e in self._entries)
        assert len(self._entries) <= self.ENTRIES_MAX
