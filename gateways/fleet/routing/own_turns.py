"""The turns that the entry itself has sent to a node, beside those in the node's last report.

A report is up to a fifth of a second old. A slot that a turn of the entry has left since is free,
and one that it has taken is not, whatever the report says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import NamedTuple

from .loads import ByClass, NodeLoad

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
