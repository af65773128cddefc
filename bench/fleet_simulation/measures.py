"""The figures of a run: balance, prefix hits, moves of sessions, waits."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from typing import Any

from inferd.gateways.fleet.routing.loads import CLASSES

from .turns import Turn

WINDOW_S = 600.0
"""The windows of time whose balance is compared."""
WAIT_SHARES = (0.5, 0.9, 0.99, 0.999)


class Measures:
    """The figures of a run on *nodes* between *begin_s* and *end_s*: the work of the nodes, and
    the turns that arrived then, whenever they ended.
    """

    def __init__(self, nodes: Sequence[str], slots: int, begin_s: float, end_s: float):
        self._begin_s, self._end_s, self._slots = begin_s, end_s, slots
        count = max(1, round((end_s - begin_s) / WINDOW_S))
        self._busy = {node: [0.0] * count for node in nodes}
        """By node, the busy time of its slots in each window."""
        self._since: dict[str, tuple[float, int]] = {}
        self._waits = [array("d") for _ in range(4)]
        self.turns = self.sessions = self.moves = self.retries = 0
        self.late_turns = 0
        """Turns that ended after the end of the run."""
        self.prompt_tokens = self.cached_tokens = 0
        self._turn_s = 0.0

    def note_busy(self, node: str, slots: int, now: float) -> None:
        """Record that *slots* of a node are busy from now on."""
        since, before = self._since.get(node, (now, 0))
        if before == slots and node in self._since:
            return
        self._since[node] = now, slots
        if before:
            self._add_busy(node, since, now, before)

    def _add_busy(self, node: str, since: float, until: float, slots: int) -> None:
        windows = self._busy[node]
        since, until = max(since, self._begin_s), min(until, self._end_s)
        while since < until:
            at = min(len(windows) - 1, int((since - self._begin_s) / WINDOW_S))
            end = self._begin_s + (at + 1) * WINDOW_S if at < len(windows) - 1 else self._end_s
            end = min(until, end)
            windows[at] += slots * (end - since)
            since = end

    def note_placed(self, turn: Turn, before: str) -> None:
        """Record a turn that was sent to a node; *before* is that of its session's last turn."""
        if turn.arrived_at < self._begin_s:
            return
        self.sessions += not before
        self.moves += bool(before) and before != turn.node

    def note_ended(self, turn: Turn) -> None:
        """Record a turn that has ended."""
        if turn.arrived_at < self._begin_s:
            return
        self.turns += 1
        self.late_turns += turn.ended_at > self._end_s
        self.retries += turn.attempts - 1
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += turn.cached_tokens
        self._waits[turn.session.priority].append(turn.started_at - turn.arrived_at)
        self._turn_s += turn.ended_at - turn.arrived_at

    def result(self, now: float) -> dict[str, Any]:
        """Return the figures."""
        for node in self._busy:
            self.note_busy(node, -1, now)
        totals = [sum(windows) for windows in self._busy.values()]
        mean = statistics.fmean(totals)
        by_window = list(zip(*self._busy.values(), strict=True))
        spans = (self._end_s - self._begin_s) / len(by_window)
        return {
            "turns": self.turns,
            "late_turns": self.late_turns,
            "sessions": self.sessions,
            "load": mean / (self._slots * (self._end_s - self._begin_s)),
            "imbalance_max": max(totals) / mean,
            "imbalance_cv": statistics.pstdev(totals) / mean,
            "imbalance_cv_10min": statistics.fmean(map(_variation, by_window)),
            "prefix_hits": self.cached_tokens / max(1, self.prompt_tokens),
            "moves": self.moves,
            "retries": self.retries,
            "turn_s": self._turn_s / max(1, self.turns),
            "waits": {
                name: {f"p{100 * share:g}": _percentile(waits, share) for share in WAIT_SHARES}
                for name, waits in zip(CLASSES, self._waits, strict=True)
            },
            "windows": [
                {
                    "load": round(statistics.fmean(values) / (spans * self._slots), 4),
                    "cv": round(_variation(values), 4),
                }
                for values in by_window
            ],
        }


def _variation(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return statistics.pstdev(values) / mean if mean else 0.0


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
