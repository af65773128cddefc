"""The load of nodes and of their models, as nodes report it and routing reads it, and the turns
that the entry itself has sent since the last report.

A report is up to a fifth of a second old. A slot that a turn of the entry has left since is free,
and one that it has taken is not, whatever the report says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import NamedTuple, TypeAlias, get_args

import msgspec

from ....ipc.names import Priority

ByClass: TypeAlias = tuple[int, int, int, int]
"""A number for each priority class, the lowest first. Messages between nodes have this form."""
NONE: ByClass = (0, 0, 0, 0)
CLASSES: tuple[Priority, ...] = get_args(Priority)
LOAD_S_DEFAULT = 5.0
"""Time of a model's load, unless its size is known."""
TOKEN_S_DEFAULT = 0.01
"""Time of a token before a node has computed any; it fits a small model on two cores."""


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model of a node.

    `running` and `waiting` are numbers of turns. `running_tokens` and `waiting_tokens` are the
    tokens that these turns still compute: the rest of their prompts, and the answers to expect.
    """

    loaded: bool = False
    loading: bool = False
    failed: bool = False
    """Whether its last load failed."""
    slots: int = 0
    """Its slots, or those that its load would give it; 0 if unknown."""
    running: ByClass = NONE
    waiting: ByClass = NONE
    running_tokens: ByClass = NONE
    waiting_tokens: ByClass = NONE
    token_s: float = TOKEN_S_DEFAULT
    """The engine's time for a token while it has work, as the node has learned it."""
    prompt_token_s: float | None = None
    """The time of a token of a long prompt; None until a step was computed."""
    load_s: float = LOAD_S_DEFAULT
    """Estimated time of its load."""
    need_bytes: int | None = None
    """The host's memory that its load needs; None if unknown, or if it has a worker already."""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that can be reached."""

    instance: int
    """The start count of its daemon."""
    draining: bool = False
    sessions: int = 0
    sessions_max: int = 1
    """Contexts that have a place, and the most that may have one."""
    free_bytes: int | None = None
    """The host's memory that a load may take now; None if unknown."""
    evictable_bytes: int = 0
    """The memory of idle models, which may be unloaded for a load."""
    models: dict[str, ModelLoad] = {}


OPENED_S = 0.5
"""Time for which a new context counts as a turn that is about to begin."""
AGE_S_MAX = 0.2
"""Maximum age of a report's data on arrival. It is unknown whether the report has the turns that
began later, or lacks those that ended later.
"""


class TurnKind(NamedTuple):
    """The model of a turn, and its class."""

    model: str
    priority: int


class OwnTurns:
    """Contexts that were opened lately, and turns under way. Owned by the entry's event loop.

    Keys are the caller's: of a context, or of a request with a turn. *age_s_max* is the maximum
    age of a report's data on arrival.
    """

    def __init__(self, age_s_max: float = AGE_S_MAX) -> None:
        self._age_s_max = age_s_max
        self._opening: dict[Hashable, TurnKind] = {}
        self._opened: dict[Hashable, tuple[float, TurnKind]] = {}
        self._running: dict[Hashable, tuple[float, TurnKind]] = {}
        self._ended = deque[tuple[float, TurnKind]]()
        """The turns that have ended lately, the oldest one first."""
        self._reported = Counter[TurnKind]()
        """The own turns that the last report has."""

    def note_opening(self, key: Hashable, kind: TurnKind) -> None:
        """Note a context that the node is requested to open. It counts until `drop_opened`, because
        the node may load the model first, and reports no turn meanwhile.
        """
        self._opening[key] = kind

    def note_opened(self, key: Hashable, kind: TurnKind, now: float) -> None:
        """Note a context that the node has opened now, and whose turn is expected."""
        self._opened[key] = now, kind

    def drop_opened(self, key: Hashable) -> None:
        """Stop counting a context as an expected turn: it was refused, is open now, or its turn
        begins.
        """
        self._opening.pop(key, None)
        self._opened.pop(key, None)

    def begin_turn(self, key: Hashable, kind: TurnKind, now: float) -> None:
        self._running[key] = now, kind

    def end_turn(self, key: Hashable, now: float) -> None:
        """Note that a turn has ended, if it is under way."""
        found = self._running.pop(key, None)
        if found is not None:
            self._ended.append((now, found[1]))
            self._forget_ended(now - self._age_s_max)

    def _forget_ended(self, before: float) -> None:
        while self._ended and self._ended[0][0] < before:
            self._ended.popleft()

    def note_report(self, load: NodeLoad | None, now: float) -> None:
        """Note that a report has arrived.

        Turns that began or ended within *age_s_max* before that may or may not be in it. They count
        as included while the report has more turns of their model than the certain ones.
        """
        sampled_after = now - self._age_s_max
        self._forget_ended(sampled_after)
        certain = Counter(kind for at, kind in self._running.values() if at <= sampled_after)
        surplus = _turns_by_model(load) - Counter(kind.model for kind in certain.elements())
        begun = [
            kind
            for at, kind in self._running.values()
            if at > sampled_after and _take(surplus, kind.model)
        ]
        # The others are dropped, as later reports lack them, too.
        self._ended = deque(turn for turn in self._ended if _take(surplus, turn[1].model))
        self._reported = certain + Counter(begun) + Counter(kind for _, kind in self._ended)

    def since_report(self, now: float) -> dict[str, ByClass]:
        """Return, by model and class, the number of turns that the node has beyond its report. It
        is negative if the node has fewer.
        """
        for key, (opened, _) in tuple(self._opened.items()):
            if opened < now - OPENED_S:
                del self._opened[key]
        counts = Counter(kind for _, kind in (*self._opened.values(), *self._running.values()))
        counts.update(self._opening.values())
        counts.subtract(self._reported)
        return {
            model: (
                counts[TurnKind(model, 0)], counts[TurnKind(model, 1)],
                counts[TurnKind(model, 2)], counts[TurnKind(model, 3)],
            )
            for model, _ in counts
        }  # fmt: skip


def _turns_by_model(load: NodeLoad | None) -> Counter[str]:
    models = {} if load is None else load.models
    return Counter({name: sum(m.running) + sum(m.waiting) for name, m in models.items()})


def _take(counts: Counter[str], model: str) -> bool:
    """Take one from a model's count, if there is one."""
    found = counts[model] > 0
    counts[model] -= found
    return found
