"""The turns that the entry itself has sent to a node, beside those in the node's last report.

A report is up to a fifth of a second old. A slot that a turn of the entry has left since is free,
and one that it has taken is not, whatever the report says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from ...routing.loads import ByClass

OPENED_S = 0.5
"""Time for which a new context counts as a turn that is about to begin."""
SAMPLE_S = 0.05
"""Age of a report's data when it arrives: turns that began later are not in it."""


class TurnKind(NamedTuple):
    """The model of a turn, and its class."""

    model: str
    priority: int


class OwnTurns:
    """Contexts that were opened lately, and turns under way. Owned by the entry's event loop.

    Keys are the caller's: of a context, or of a request with a turn.
    """

    def __init__(self) -> None:
        self._opening: dict[Hashable, TurnKind] = {}
        self._opened: dict[Hashable, tuple[float, TurnKind]] = {}
        self._running: dict[Hashable, tuple[float, TurnKind]] = {}
        self._reported = Counter[TurnKind]()
        """The own turns that the last report has."""

    def note_opening(self, key: Hashable, kind: TurnKind) -> None:
        """Note a context that the node is asked to open. It counts until it is dropped: the node
        may load the model first, and reports no turn meanwhile.
        """
        self._opening[key] = kind

    def note_opened(self, key: Hashable, kind: TurnKind, now: float) -> None:
        """Note a context that the node has opened now, and whose turn is expected."""
        self._opened[key] = now, kind

    def drop_opened(self, key: Hashable) -> None:
        """Note that a context was not opened, is now, or that its turn begins."""
        self._opening.pop(key, None)
        self._opened.pop(key, None)

    def begin_turn(self, key: Hashable, kind: TurnKind, now: float) -> None:
        """Note a turn that was sent to the node."""
        self._running[key] = now, kind

    def end_turn(self, key: Hashable) -> None:
        """Note that a turn has ended."""
        self._running.pop(key, None)

    def note_report(self, now: float) -> None:
        """Note that a report has arrived."""
        older = [kind for began, kind in self._running.values() if began <= now - SAMPLE_S]
        self._reported = Counter(older)

    def since_report(self, now: float) -> dict[str, ByClass]:
        """Return by model how many turns the node has more than its report says, by class; fewer
        are negative.
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
