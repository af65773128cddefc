"""The duration of a step: a linear model of each kind of ubatch, learned while the engine runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

WIDE = 64
"""A ubatch of at least this many tokens of each sequence is *wide*; others are narrow. From this
size on, llama.cpp computes attention in tiles (`GGML_FA_TILE_Q`).
"""
WIDE_SHARE_MIN = 0.1
"""Least share of a step's time that is attributed to its wide ubatches."""
DRIFT = 0.01
"""Random walk of the coefficients in a step, as a share of each: it forgets old steps."""
NOISE = 0.1
"""Normal deviation of a step's time, as a share of it."""
DEVIATIONS_MAX = 3.0
"""A larger deviation is clipped to this many: a single outlier is not a trend."""
SECONDS_MIN = 1e-6
"""The least duration of a step, for machines with a coarse clock."""
TREND_STEPS = 3
"""This many outliers in a row are a trend: the machine has changed."""

LOST_FACTOR = 100.0
"""If such a trend is slower by this factor, the coefficients begin anew: their own size, which
bounds their uncertainty, would let them grow too slowly.
"""

_Three = tuple[float, float, float]
_Six = tuple[float, float, float, float, float, float]


class StepLoad(msgspec.Struct, frozen=True):
    """The work in a step.

    *ubatches* counts the different lengths of chunks: the backend runs the model once for each, as
    all sequences of its batches advance equally far. *depth* sums the positions of the tokens, that
    is, how many earlier tokens each attends to. *wide* is the part of it in wide ubatches.
    """

    ubatches: int
    tokens: int
    depth: int
    wide: StepLoad | None = None

    @classmethod
    def of_chunks(cls, chunks: Sequence[tuple[int, int]]) -> StepLoad:
        """Return the load of chunks, each (position, count)."""
        tokens = depth = longest = 0
        lengths = set()
        for position, count in chunks:  # one loop: plans of prompts try many loads
            lengths.add(count)
            tokens += count
            depth += count * position + count * (count - 1) // 2
            if count > longest:
                longest = count
        wide = cls._wide_part(chunks, lengths) if longest >= WIDE else None
        return cls(len(lengths), tokens, depth, wide)

    @classmethod
    def _wide_part(cls, chunks: Sequence[tuple[int, int]], lengths: set[int]) -> StepLoad | None:
        """Return the load of the wide ubatches of *chunks*, if there are any."""
        ubatches = tokens = depth = begin = 0
        for end in sorted(lengths):
            size = end - begin
            if size >= WIDE:
                positions = [position + begin for position, count in chunks if count >= end]
                ubatches += 1
                tokens += size * len(positions)
                depth += size * sum(positions) + len(positions) * (size * (size - 1) // 2)
            begin = end
        return cls(ubatches, tokens, depth) if ubatches else None


def greatest_fitting(most: int, wide: int, seconds: float, predict: Callable[[int], float]) -> int:
    """Return the greatest count, up to *most*, for which *predict* returns at most *seconds*; 0 if
    there is none. The time rises with the count, except at *wide*, where it may fall.
    """
    if most < 1 or predict(most) <= seconds:
        return max(most, 0)
    least = wide if wide < most and predict(wide) <= seconds else 1
    end = most if least == wide else min(most, wide)
    return least - 1 + bisect_right(range(least, end), seconds, key=predict)


class CostCoefficients(NamedTuple):
    """The learned seconds of a ubatch, a token and a position, for narrow and for wide ubatches
    (None: none was computed), and the shortest time of a token.
    """

    narrow: _Three
    wide: _Three | None
    token_s_least: float


class StepCost:
    """Predicts the seconds of a step, by one `UbatchCost` for its narrow ubatches and one for the
    wide ones. Where large batches are more efficient, the two differ: on a CPU with AMX, a token at
    depth 1400 takes 17 ms in a narrow ubatch and 4 ms in a wide one.

    Until a wide ubatch was computed, its tokens are expected to cost what those of narrow ones
    cost at depth 0. So one is tried where the depth makes narrow ones costly.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._narrow = UbatchCost()
        self._wide: UbatchCost | None = None
        self._token_s_least = math.inf
        """The shortest time of a token so far."""
        self._threads = 0
        self._by_threads: dict[int, tuple[UbatchCost, UbatchCost | None]] = {}
        """The costs of ubatches with other numbers of threads."""

    @classmethod
    def from_coefficients(cls, known: CostCoefficients) -> StepCost:
        """Return costs as they were learned elsewhere."""
        cost = cls()
        cost.steps, cost._token_s_least = 1, known.token_s_least
        cost._narrow = UbatchCost(*known.narrow)
        cost._wide = UbatchCost(*known.wide) if known.wide is not None else None
        return cost

    def coefficients(self) -> CostCoefficients | None:
        """Return what was learned so far; None if nothing was."""
        if not self.steps:
            return None
        wide = self._wide.coefficients if self._wide is not None else None
        return CostCoefficients(self._narrow.coefficients, wide, self._token_s_least)

    @property
    def known(self) -> bool:
        """Whether a step was learned yet."""
        return self.steps > 0

    def predict(self, load: StepLoad) -> float:
        """Return the seconds that a step of *load* will take; 0.0 while nothing is known.

        The shortest time of a token so far is a lower bound: on a busy machine the coefficients can
        make prompts look free, and a step would compute a whole one.
        """
        if not self.steps:
            return 0.0
        return max(sum(self._parts_s(load)), self._token_s_least * load.tokens)

    def _parts_s(self, load: StepLoad) -> tuple[float, float]:
        """Return the seconds of the narrow and of the wide ubatches of *load*."""
        seconds = self._narrow.seconds(load)
        if load.wide is None:
            return seconds, 0.0
        wide = self._wide or self._narrow.without_depth()
        return seconds - self._narrow.seconds(load.wide), wide.seconds(load.wide)

    def recompute_s(self, tokens: int) -> float:
        """Return the seconds that it would take to compute the first *tokens* of a prompt again."""
        return self.predict(StepLoad.of_chunks([(0, tokens)]))

    def use_threads(self, threads: int) -> None:
        """Predict steps with this many *threads* from now on, by costs learned for them. New ones
        are scaled up for fewer threads; more threads may not be faster.
        """
        before, self._threads = self._threads, threads
        if threads == before or not before or not self.known:
            return
        self._by_threads[before] = self._narrow, self._wide
        if threads in self._by_threads:
            self._narrow, self._wide = self._by_threads.pop(threads)
            return
        slower = max(1.0, before / threads)
        self._narrow = self._narrow.scaled(slower)
        self._wide = self._wide and self._wide.scaled(slower)

    def learn_step(self, load: StepLoad, seconds: float) -> None:
        """Update the costs by a step of *load* that took *seconds*. A step with wide ubatches
        teaches only their cost; the steps without them show what the rest costs.
        """
        self.steps += 1
        seconds = max(seconds, SECONDS_MIN)
        self._token_s_least = min(self._token_s_least, seconds / max(load.tokens, 1))
        if self.steps == 1:
            self._narrow.init_from_step(load, seconds)
        elif load.wide is None:
            changed = self._narrow.learn(load, seconds)
            if self._wide is not None:
                self._wide.drift()
                if changed:
                    self._wide.make_uncertain()
        else:
            narrow, _ = self._parts_s(load)
            self._wide = self._wide or self._narrow.without_depth()
            self._wide.learn(load.wide, max(seconds - narrow, WIDE_SHARE_MIN * seconds))


class UbatchCost:
    """The cost of ubatches of one kind: a·ubatches + b·tokens + c·depth.

    The coefficients are the state of a Kalman filter whose process noise is a random walk. Plain
    recursive least squares with forgetting fails here: after hours of one kind of step it would
    forget the cost of the other kinds (covariance wind-up). The filter bounds a coefficient's
    uncertainty by its size.
    """

    def __init__(self, a: float = 0.0, b: float = 0.0, c: float = 0.0) -> None:
        self._theta: _Three = (a, b, c)
        self._variance: _Six
        """Covariances aa, ab, ac, bb, bc, cc; loops would take 40 instead of 12 µs a step."""
        self.make_uncertain()
        self._outliers = 0

    @property
    def coefficients(self) -> _Three:
        """The seconds of a ubatch, of a token and of a position."""
        return self._theta

    def seconds(self, load: StepLoad) -> float:
        """Return the cost of *load*, all of it."""
        a, b, c = self._theta
        return a * load.ubatches + b * load.tokens + c * load.depth

    def without_depth(self) -> UbatchCost:
        """Return an uncertain copy that depends on no depth."""
        a, b, _ = self._theta
        return UbatchCost(a, b)

    def scaled(self, factor: float) -> UbatchCost:
        """Return a copy that is *factor* times as high."""
        copy = UbatchCost(*(factor * value for value in self._theta))
        aa, ab, ac, bb, bc, cc = (factor**2 * value for value in self._variance)
        copy._variance = (aa, ab, ac, bb, bc, cc)
        return copy

    def learn(self, load: StepLoad, seconds: float) -> bool:
        """Update the coefficients by a *load* that took *seconds*; return whether outliers show
        that the machine has changed.
        """
        x, y, z = float(load.ubatches), float(load.tokens), float(load.depth)
        self.drift()
        aa, ab, ac, bb, bc, cc = self._variance
        gain_a = aa * x + ab * y + ac * z
        gain_b = ab * x + bb * y + bc * z
        gain_c = ac * x + bc * y + cc * z
        expected = self.seconds(load)
        noise = (NOISE * max(expected, seconds / 2)) ** 2 + 1e-12
        spread = noise + max(0.0, x * gain_a + y * gain_b + z * gain_c)
        error = seconds - expected
        limit = DEVIATIONS_MAX * math.sqrt(spread)
        self._outliers = self._outliers + 1 if abs(error) > limit else 0
        changed = self._outliers == TREND_STEPS
        if changed:
            self._outliers = 0
            self.make_uncertain()
            aa, ab, ac, bb, bc, cc = self._variance
            if seconds > LOST_FACTOR * expected:
                self.init_from_step(load, seconds)
                return True
        self._variance = (
            aa - gain_a * gain_a / spread,
            ab - gain_a * gain_b / spread,
            ac - gain_a * gain_c / spread,
            bb - gain_b * gain_b / spread,
            bc - gain_b * gain_c / spread,
            cc - gain_c * gain_c / spread,
        )
        share = min(max(error, -limit), limit) / spread
        self._add(gain_a * share, gain_b * share, gain_c * share)
        return changed

    def _add(self, more_a: float, more_b: float, more_c: float) -> None:
        """Change the coefficients. One that would become negative becomes zero, and the others
        change along with it by their covariance: they would have to make up for it.
        """
        aa, ab, ac, bb, bc, cc = self._variance
        a, b, c = self._theta
        a, b, c = a + more_a, b + more_b, c + more_c
        if c < 0 < cc:
            a, b, c = a - c * ac / cc, b - c * bc / cc, 0.0
        if a < 0 < aa:
            a, b, c = 0.0, b - a * ab / aa, c - a * ac / aa
        if b < 0 < bb:
            a, b, c = a - b * ab / bb, 0.0, c - b * bc / bb
        self._theta = (max(0.0, a), max(0.0, b), max(0.0, c))

    def make_uncertain(self) -> None:
        """Make all coefficients as uncertain as can be, after a change of the machine."""
        a, b, c = self._scales()
        self._variance = (a**2, 0.0, 0.0, b**2, 0.0, c**2)

    def init_from_step(self, load: StepLoad, seconds: float) -> None:
        """Attribute nine tenths of a first step to tokens, one to ubatches, none to depth."""
        ubatch, token = 0.1 * seconds / max(load.ubatches, 1), 0.9 * seconds / max(load.tokens, 1)
        self._theta = (ubatch, token, 0.0)
        self._variance = ((3 * ubatch) ** 2, 0.0, 0.0, token**2, 0.0, (token / 1000) ** 2)

    def drift(self) -> None:
        """Make each coefficient less certain, up to its own size. A row and its column shrink
        alike, so that the matrix stays a covariance.
        """
        aa, ab, ac, bb, bc, cc = self._variance
        a, b, c = self._scales()
        aa = max(0.0, aa) + (DRIFT * a) ** 2  # rounding can make it negative
        bb = max(0.0, bb) + (DRIFT * b) ** 2
        cc = max(0.0, cc) + (DRIFT * c) ** 2
        less_a = min(1.0, a / math.sqrt(aa))
        less_b = min(1.0, b / math.sqrt(bb))
        less_c = min(1.0, c / math.sqrt(cc))
        self._variance = (
            aa * less_a * less_a,
            ab * less_a * less_b,
            ac * less_a * less_c,
            bb * less_b * less_b,
            bc * less_b * less_c,
            cc * less_c * less_c,
        )

    def _scales(self) -> tuple[float, float, float]:
        """Return the size of each coefficient, which bounds its uncertainty; never zero."""
        a, b, c = self._theta
        return max(a, b, 1e-9), max(b, a / 100, 1e-9), max(c, b / 1000, a / 100_000, 1e-12)
