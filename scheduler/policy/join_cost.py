"""The decision how many waiting computations of a graph are joined, by the learned time of a row.

Joining pays where a graph reads weights once for all rows (a multilayer perceptron: 2 to 3 times as
many rows a second), and little where each row is much work by itself (a convolution over a long
input). So each number of rows is measured, in powers of two, and rows are joined where one of them
then takes less time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ...backends.recent_dict import RecentDict

GAIN_MIN = 1.05
"""More rows are joined if this many times as many are then computed in the same time. A convolution
over a long input gains about as much with a few: it has fewer steps between computations. With many
it loses, since their data leave the caches of a core.
"""
WEIGHT = 1 / 4
"""Weight of the last computation in the time of a row."""
STALE_RUNS = 256
"""After this many computations without one of a size, its time is forgotten, and measured again. It
is twice as many each time that the size does not pay.
"""
LOSSES_MAX = 5
"""The largest number of measurements without a gain that counts: then 4096 computations pass."""
JOINED_S_MAX = 0.1
"""The longest joined computation, as predicted: it delays those that arrive meanwhile."""
KEYS_MAX = 64
"""The shapes whose times are remembered."""


@dataclass(slots=True)
class _Sizes:
    """The times of a row by the number of rows, as the exponent of a power of two."""

    row_s: dict[int, float] = field(default_factory=dict)
    measured_at: dict[int, int] = field(default_factory=dict)
    """The run in which each was measured last."""
    losses: dict[int, int] = field(default_factory=dict)
    """How often in a row each was measured again without a gain over the smallest."""

    def note_gain(self, size: int, *, is_new: bool) -> None:
        """Note whether a size that was measured pays; *is_new*: its time was not known."""
        smallest = min(self.row_s)
        if size == smallest or self.row_s[size] * GAIN_MIN <= self.row_s[smallest]:
            self.losses[size] = 0
        elif is_new:
            self.losses[size] = min(self.losses.get(size, 0) + 1, LOSSES_MAX)

    def stale_runs(self, size: int) -> int:
        """Return the computations after which the time of a size is forgotten."""
        return STALE_RUNS << max(0, self.losses.get(size, 0) - 1)


class JoinCost:
    """Learns the times of a graph's computations, by their shapes (any hashable key) and rows."""

    def __init__(self) -> None:
        self._runs = 0
        self._by_key: RecentDict[Hashable, _Sizes] = RecentDict(KEYS_MAX)

    def note_run(self, key: Hashable, rows: int, seconds: float) -> None:
        """Learn from a computation of *rows* that took *seconds*, infinity if it failed."""
        sizes = self._by_key.get(key) or _Sizes()
        self._by_key[key] = sizes
        size, row_s = _exponent(rows), seconds / rows
        before = self._known(sizes, size)
        self._runs += 1
        known = before is not None and max(before, row_s) < float("inf")
        sizes.row_s[size] = before + WEIGHT * (row_s - before) if known and before else row_s
        sizes.measured_at[size] = self._runs
        sizes.note_gain(size, is_new=before is None)

    def rows_to_join(self, key: Hashable, own: int, available: int) -> int:
        """Return how many rows to compute at once: *own* for a computation of as many rows by
        itself, or up to the *available* rows, which are more.
        """
        sizes = self._by_key.get(key)
        if sizes is None or (alone := self._known(sizes, _exponent(own))) is None:
            return own
        available = min(available, max(own, int(JOINED_S_MAX / alone) if alone else available))
        wanted, single = _exponent(available), _exponent(own)
        if wanted == single:
            return own
        if self._known(sizes, wanted) is None:
            return available
        found = {
            n: s for n in range(single, wanted + 1) if (s := self._known(sizes, n)) is not None
        }
        enough_s = GAIN_MIN * min(found.values())
        best = next(n for n, row_s in found.items() if row_s <= enough_s)
        if best == single:
            return own
        return available if best == wanted else (1 << best + 1) - 1

    def expected_s(self, key: Hashable, rows: int) -> float | None:
        """Return the time that a computation of *rows* is expected to take, if that is known."""
        sizes = self._by_key.get(key)
        row_s = None if sizes is None else self._known(sizes, _exponent(rows))
        return None if row_s is None else rows * row_s

    def _known(self, sizes: _Sizes, size: int) -> float | None:
        at = sizes.measured_at.get(size)
        is_known = at is not None and self._runs - at < sizes.stale_runs(size)
        return sizes.row_s[size] if is_known else None


def _exponent(rows: int) -> int:
    return rows.bit_length() - 1
