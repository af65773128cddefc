"""KV states in memory, outside the slots, the origin of a KV state, and the places of checkpoints.

An entry is a state with its tokens. It is found by these and by its origin: the user, session and
adapters that bound its use. A task that starts from a state does not consume it. Recurrent and
hybrid models have checkpoints within a conversation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...backends.base import KvKind
from ...backends.media import cut_point
from ..prefix import common_prefix
from .eviction_order import EvictionOrder

SCOPE_ALL = -1
"""The scope of KV states that serve every user."""


NAMED_STATE = "state:"
"""The beginning of the engine's names of named states; no session's name begins with it."""


def name_of_state(label: str, name: str) -> str:
    """Return the engine's name of a named state. A label has no slash."""
    return f"{NAMED_STATE}{label}/{name}"


def is_named_state(scope: int, session: str) -> bool:
    """Return whether a KV state belongs to a named state, by its scope and its name there."""
    own = session.partition("/")[2] if scope == SCOPE_ALL else session
    return own.startswith(NAMED_STATE)


def scoped(user: int, session: str, *, shared: bool) -> tuple[int, str]:
    """Return the scope and the session's name in it; *shared* states serve every user."""
    return (SCOPE_ALL, f"{user}/{session}") if shared else (user, session)


@dataclass(frozen=True, slots=True)
class Origin:
    """The tasks that a KV state may serve.

    *scope* is the user, or `SCOPE_ALL` if states are shared. *session* computed the state. An
    *approximate* state, whose context was shifted, serves only that session.
    """

    scope: int
    session: str = ""
    adapters: tuple[str, ...] = ()
    approximate: bool = False
    persist: bool = False

    def serves(self, other: Origin) -> bool:
        """Return whether a state of this origin may serve a task of *other*."""
        if self.scope != other.scope or self.adapters != other.adapters:
            return False
        return not self.approximate or (bool(self.session) and self.session == other.session)


@dataclass(eq=False, slots=True)
class SavedState:
    """One saved state. Immutable except for `pins`, `hits` and `fetched`."""

    origin: Origin
    tokens: array[int]
    state: bytes
    seconds: float
    """Estimated time to compute it again."""
    pins: int = 0
    hits: int = 0
    fetched: bool = False
    """It was read from disk, and no task has used it since."""
    checkpoint: bool = False
    """It was saved within a conversation. That of a hybrid has only the recurrent part, and cuts
    another state of a text that begins with its tokens.
    """


def covered_tokens(
    have: array[int], tokens: array[int], kv_kind: KvKind, more_than: int = 0
) -> int:
    """Return how many of *tokens* need not be computed, given a state of *have*. Return 0 if these
    are not more than *more_than*.

    A task always decodes its last token, for the logits. Any prefix of a plain state can be used. A
    state of another kind cannot be cut at an earlier token, and serves only as a whole.
    """
    size, most = len(have), len(tokens) - 1
    if more_than >= min(size, most):
        return 0
    if kv_kind != "plain":  # a state that ends inside an item serves only its own parked task
        whole = size <= most and have == tokens[:size] and cut_point(tokens, size) == size
        return size if whole else 0
    if have[more_than] != tokens[more_than]:
        return 0
    shared = cut_point(tokens, min(common_prefix(have, tokens), most))
    return shared if shared > more_than else 0


class KvStore:
    """The entries in memory: at most *bytes_max* of states, and `ENTRIES_MAX` of them.

    `EvictionOrder` decides which are evicted first; pinned ones stay. Evicted states wait in
    `evicted` for the disk tier.
    """

    ENTRIES_MAX = 4096
    CHECKPOINTS_SHARE = 4
    """The divisor of `bytes_max` that bounds the checkpoints of one conversation."""

    def __init__(self, bytes_max: int, kv_kind: KvKind, checkpoints_max: int = 32):
        self.bytes_max = bytes_max
        self.bytes = 0
        self.evicted: list[SavedState] = []
        self.checkpoint_bytes = 0
        """The size of the last checkpoint."""
        self.changes = 0
        """Number of additions and removals."""
        self.low_memory = False
        """Memory is low: only pinned states stay."""
        self._kv_kind = kv_kind
        self._checkpoints_max = checkpoints_max
        self._entries: list[SavedState] = []
        self._values = EvictionOrder[SavedState]()

    def __iter__(self) -> Iterator[SavedState]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find_state(
        self, origin: Origin, tokens: array[int], more_than: int = 0
    ) -> tuple[SavedState | None, int]:
        """Return the entry that covers most of *tokens*, and how many it covers. Return None and 0
        if none covers more than *more_than*.
        """
        best, most = None, more_than
        for entry in self._entries:
            if entry.origin.serves(origin) and self.is_whole(entry):
                covered = covered_tokens(entry.tokens, tokens, self._kv_kind, most)
                if covered:
                    best, most = entry, covered
        return best, most if best is not None else 0

    def is_whole(self, entry: SavedState) -> bool:
        """Return whether an entry has all of the state of its tokens."""
        return not (entry.checkpoint and self._kv_kind == "hybrid")

    def covers(self, origin: Origin, tokens: Sequence[int]) -> bool:
        """Return whether an entry covers all that a state of *tokens* would cover."""
        wanted, size = array("i", tokens), len(tokens)
        for entry in self._entries:
            same = entry.origin.approximate == origin.approximate and entry.origin.serves(origin)
            fits = len(entry.tokens) == size or (
                self._kv_kind == "plain" and len(entry.tokens) > size
            )
            if same and fits and entry.tokens[:size] == wanted and self.is_whole(entry):
                return True
        return False

    def add_state(
        self,
        origin: Origin,
        tokens: Sequence[int],
        state: bytes,
        seconds: float,
        *,
        pin: bool = False,
        checkpoint: bool = False,
    ) -> SavedState | None:
        """Add a state. Return None if it does not fit beside the pinned ones. Unless *pin* is set,
        it is then in `evicted`.

        The state of a plain model or a hybrid replaces the states of the same origin that cover
        only a prefix of its tokens, unless they are pinned or were used twice. Checkpoints stay.
        """
        entry = SavedState(
            origin, array("i", tokens), state, seconds, pins=int(pin), checkpoint=checkpoint
        )
        if not self._free_space(len(state)):
            if not pin:
                self.evicted.append(entry)
            return None
        if self._kv_kind in ("plain", "hybrid") and self.is_whole(entry):
            self._supersede(entry)
        self._entries.append(entry)
        self.changes += 1
        self.bytes += len(state)
        self._values.record_use(entry, len(entry.state), entry.seconds)
        return entry

    @property
    def checkpoints(self) -> list[SavedState]:
        """The checkpoints, in no order."""
        return [entry for entry in self._entries if entry.checkpoint]

    @property
    def checkpoints_max(self) -> int:
        """The most checkpoints of one conversation, by number and by their size."""
        fitting = self.bytes_max // self.CHECKPOINTS_SHARE // max(1, self.checkpoint_bytes)
        return max(1, min(self._checkpoints_max, fitting))

    def has_checkpoint(self, origin: Origin, tokens: array[int]) -> bool:
        """Return whether there is a checkpoint after *tokens*, which may be a recurrent model's
        whole state.
        """
        return any(
            entry.tokens == tokens and entry.origin.serves(origin)
            for entry in self._entries
            if entry.checkpoint or self._kv_kind == "recurrent"
        )

    def checkpoints_in(self, origin: Origin, tokens: array[int]) -> list[SavedState]:
        """Return the checkpoints that may serve a task of *origin* and whose tokens begin *tokens*,
        in their order.
        """
        size = len(tokens)
        found = [
            entry
            for entry in self._entries
            if entry.checkpoint
            and len(entry.tokens) <= size
            and entry.origin.serves(origin)
            and tokens[len(entry.tokens) - 1] == entry.tokens[-1]  # saves most comparisons
            and tokens[: len(entry.tokens)] == entry.tokens
        ]
        return sorted(found, key=lambda entry: len(entry.tokens))

    def add_checkpoint(
        self,
        origin: Origin,
        tokens: array[int],
        state: bytes,
        recompute_s: Callable[[int], float],
    ) -> None:
        """Add a checkpoint, and thin those of the same origin in the text before it. Its value is
        the time to compute the tokens since the checkpoint before it.
        """
        self.checkpoint_bytes = len(state)
        earlier = self.checkpoints_in(origin, tokens)
        before = len(earlier[-1].tokens) if earlier else 0
        seconds = max(0.0, recompute_s(len(tokens)) - recompute_s(before))
        if self.add_state(origin, tokens, state, seconds, checkpoint=True) is None:
            return
        own = [
            e
            for e in self.checkpoints_in(origin, tokens)
            # Each request of a chat without a session has an origin of its own.
            if not e.pins and (e.origin == origin or not (e.origin.persist or origin.persist))
        ]
        kept = set(thinned([len(entry.tokens) for entry in own], self.checkpoints_max))
        for entry in own:
            if len(entry.tokens) not in kept:
                self.remove(entry)

    def count_hit(self, entry: SavedState) -> None:
        """Count a use of an entry."""
        entry.hits += 1
        entry.fetched = False
        self._values.record_use(entry, len(entry.state), entry.seconds)

    def unpin(self, entry: SavedState, *, spent: bool = False) -> None:
        """Unpin an entry; drop it if it is *spent* and served no other task."""
        entry.pins -= 1
        if spent and not entry.hits and not entry.pins:
            self.remove(entry)
        self.evict_states()

    def remove(self, entry: SavedState) -> None:
        """Drop an entry."""
        self._entries.remove(entry)
        self._values.remove(entry)
        self.changes += 1
        self.bytes -= len(entry.state)

    def delete_session_states(self, scope: int, session: str) -> None:
        """Drop the states of a session, except those pinned by a running turn."""

        def belongs(entry: SavedState) -> bool:
            return (entry.origin.scope, entry.origin.session) == (scope, session)

        self.evicted = [e for e in self.evicted if not belongs(e)]
        for entry in [e for e in self._entries if belongs(e) and not e.pins]:
            self.remove(entry)

    def by_value(self) -> list[SavedState]:
        """Return all entries, the most valuable first."""
        return self._values.by_value()

    @property
    def unpinned(self) -> list[SavedState]:
        """The entries that no task holds, the most valuable first."""
        return [entry for entry in self._values.by_value() if not entry.pins]

    def _supersede(self, entry: SavedState) -> None:
        others = [e for e in self._entries if e.origin == entry.origin and not e.pins]
        for other in filter(self.is_whole, others):
            size = len(other.tokens)
            if other.hits < 2 and size <= len(entry.tokens) and entry.tokens[:size] == other.tokens:
                self.remove(other)

    def _free_space(self, size: int) -> bool:
        pinned = sum(len(e.state) for e in self._entries if e.pins)
        if pinned + size > self.bytes_max:
            return False
        self.evict_states(size)
        return len(self) < self.ENTRIES_MAX

    def evict_states(self, size: int = 0) -> None:
        """Evict the least valuable unpinned entries until *size* bytes and one more entry fit."""
        if self._fits(size):
            return
        for entry in reversed(self.unpinned):
            self._values.evict(entry)
            self.remove(entry)
            self.evicted.append(entry)
            if self._fits(size):
                return

    def _fits(self, size: int) -> bool:
        return self.bytes + size <= self.bytes_max and len(self) < self.ENTRIES_MAX

    def check_integrity(self) -> None:
        """Assert that the bytes are counted correctly and bounded."""
        assert self.bytes == sum(len(e.state) for e in self._entries)
        assert self.bytes <= self.bytes_max or all(e.pins for e in self._entries)
        assert len(self._entries) <= self.ENTRIES_MAX


_SHARE_STEP = 0.9


def message_borders(tokens: Sequence[int], is_control: Callable[[int], bool]) -> list[int]:
    """Return the places in *tokens* where a control token follows one that is none.

    Chat templates begin or end messages with control tokens. So if a message is edited, dropped or
    rendered in another way later, such a place is shortly before the first token that changes.
    """
    control = {token for token in set(tokens) if token >= 0 and is_control(token)}
    return [
        at
        for at in range(1, len(tokens))
        if tokens[at] in control and tokens[at - 1] not in control
    ]


def spaced(points: Iterable[int], gap: int) -> list[int]:
    """Return the ascending *points* without those that are less than *gap* behind another one."""
    kept, last = [], 0
    for point in points:
        if point - last >= gap:
            kept.append(point)
            last = point
    return kept


def thinned(points: Sequence[int], count_max: int) -> list[int]:
    """Return at most *count_max* of the ascending *points*, with the first and the last one.

    The first one is the end of the instructions, which conversations share. The distance between
    the others grows in proportion to their distance from the last one.
    """
    if len(points) <= count_max:
        return list(points)
    if count_max < 2:
        return list(points[-count_max:]) if count_max > 0 else []
    share, kept = 2.0 * count_max, list(points[1:])
    while len(kept) >= count_max and share > 1:
        kept, share = _sparse(points[1:], share), share * _SHARE_STEP
    return [points[0], *kept[-(count_max - 1) :]]


def _sparse(points: Sequence[int], share: float) -> list[int]:
    """Return the last of *points*, and those before it whose distance from the next one is at least
    one *share* of that from the last one.
    """
    end = points[-1]
    kept = [end]
    for point in reversed(points[:-1]):
        if kept[-1] - point >= (end - point) / share:
            kept.append(point)
    return kept[::-1]
