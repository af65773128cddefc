"""What a step takes: a model of three coefficients, learned while the engine runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DRIFT = 0.01
"""The coefficients' random walk a step, as a share of each: how fast old steps are forgotten."""
NOISE = 0.1
"""A step's time is off by this share, with nothing wrong."""
DEVIATIONS_MAX = 3.0
"""A step further off than this many deviations counts as that far off: a hiccup is no trend."""
SECONDS_MIN = 1e-6
"""No step takes less, whatever a coarse clock says."""
TREND_STEPS = 3
"""As many outliers in a row are a trend: the machine has changed."""

_Three = tuple[float, float, float]
_Six = tuple[float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Load:
    """What a step is made of.

    *groups* counts the chunks of different lengths: the backend runs the model once for each, as
    its batches are of sequences that all go equally far. *depth* sums, over the tokens, how many
    tokens each looks back on.
    """

    groups: int
    tokens: int
    depth: int

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int]]) -> Load:
        """Return the load of chunks, each (position, count)."""
        return cls(
            groups=len({count for _, count in chunks}),
            tokens=sum(count for _, count in chunks),
            depth=sum(count * position + count * (count - 1) // 2 for position, count in chunks),
        )


class StepCost:
    """Predicts seconds = a·groups + b·tokens + c·depth.

    The coefficients are the state of a Kalman filter whose process noise is a random walk. Plain
    recursive least squares with forgetting would not do: hours of one kind of step would make it
    forget what the other kinds cost (covariance wind-up); here a coefficient's uncertainty is
    bounded by its own size.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._theta: _Three = (0.0, 0.0, 0.0)
        self._variance: _Six = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Of a and a, a and b, a and c, b and b, b and c, c and c. Written out rather than looped
        over: every step pays for it (40 against 12 us).
        """
        self._outliers = 0
        self._token_s_least = math.inf
        """The quickest token so far."""
        self._threads = 0
        self._with_others: dict[int, tuple[_Three, _Six]] = {}
        """What was learned of steps with other numbers of threads."""

    def __repr__(self) -> str:
        a, b, c = (1000 * value for value in self._theta)
        return f"<StepCost [{a:.2f} ms + {b:.3f} ms/token + {1000 * c:.3f} µs/token²]>"

    @property
    def known(self) -> bool:
        """Tell whether anything was learned yet."""
        return self.steps > 0

    def predict(self, load: Load) -> float:
        """Return the seconds that a step of *load* will take; 0.0 while nothing is known.

        No token is expected to be quicker than the quickest so far: a machine that others disturb
        can leave coefficients by which prompts are free, and a step would take a whole one.
        """
        if not self.steps:
            return 0.0
        return max(self._fitted(load), self._token_s_least * load.tokens)

    def _fitted(self, load: Load) -> float:
        a, b, c = self._theta
        return a * load.groups + b * load.tokens + c * load.depth

    def again(self, tokens: int) -> float:
        """Return the seconds that computing the first *tokens* of a prompt again would take."""
        return self.predict(Load(0, tokens, tokens * (tokens - 1) // 2))

    def use(self, threads: int) -> None:
        """Predict steps with so many *threads* from now on: by what was learned of such, or, before
        there were any, as if all were the threads' work; more of them may be no faster.
        """
        before, self._threads = self._threads, threads
        if threads == before or not before or not self.known:
            return
        self._with_others[before] = self._theta, self._variance
        self._outliers = 0
        if threads in self._with_others:
            self._theta, self._variance = self._with_others.pop(threads)
            return
        slower = max(1.0, before / threads)
        a, b, c = self._theta
        self._theta = (slower * a, slower * b, slower * c)
        aa, ab, ac, bb, bc, cc = (slower**2 * value for value in self._variance)
        self._variance = (aa, ab, ac, bb, bc, cc)

    def learn(self, load: Load, seconds: float) -> None:
        """Take a step of *load* that took *seconds*."""
        self.steps += 1
        seconds = max(seconds, SECONDS_MIN)
        self._token_s_least = min(self._token_s_least, seconds / max(load.tokens, 1))
        if self.steps == 1:
            self._begin(load, seconds)
            return
        x, y, z = float(load.groups), float(load.tokens), float(load.depth)
        self._drift()
        aa, ab, ac, bb, bc, cc = self._variance
        gain_a = aa * x + ab * y + ac * z
        gain_b = ab * x + bb * y + bc * z
        gain_c = ac * x + bc * y + cc * z
        expected = self._fitted(load)
        noise = (NOISE * max(expected, seconds / 2)) ** 2 + 1e-12
        spread = noise + max(0.0, x * gain_a + y * gain_b + z * gain_c)
        error = seconds - expected
        limit = DEVIATIONS_MAX * math.sqrt(spread)
        if abs(error) <= limit:
            self._outliers = 0
        else:
            error = limit if error > 0 else -limit
            if self._is_trend():
                aa, ab, ac, bb, bc, cc = self._variance
        a, b, c = self._theta
        share = error / spread
        self._theta = (
            max(0.0, a + gain_a * share),
            max(0.0, b + gain_b * share),
            max(0.0, c + gain_c * share),
        )
        self._variance = (
            aa - gain_a * gain_a / spread,
            ab - gain_a * gain_b / spread,
            ac - gain_a * gain_c / spread,
            bb - gain_b * gain_b / spread,
            bc - gain_b * gain_c / spread,
            cc - gain_c * gain_c / spread,
        )

    def _is_trend(self) -> bool:
        """Count an outlier; a row of them makes all uncertain again."""
        self._outliers += 1
        if self._outliers < TREND_STEPS:
            return False
        self._outliers = 0
        a, b, c = self._scales()
        self._variance = (a**2, 0.0, 0.0, b**2, 0.0, c**2)
        return True

    def _begin(self, load: Load, seconds: float) -> None:
        """Guess from the first step: nine tenths are its tokens', the depth costs nothing yet."""
        group, row = 0.1 * seconds / max(load.groups, 1), 0.9 * seconds / max(load.tokens, 1)
        self._theta = (group, row, 0.0)
        self._variance = ((3 * group) ** 2, 0.0, 0.0, row**2, 0.0, (row / 1000) ** 2)

    def _drift(self) -> None:
        """Make each coefficient less certain, up to its own size: a row and its column shrink
        alike, or the matrix would be no covariance any more.
        """
        aa, ab, ac, bb, bc, cc = self._variance
        a, b, c = self._scales()
        aa = max(0.0, aa) + (DRIFT * a) ** 2  # rounding can leave less than nothing
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
        """Return the size of each coefficient, which is the most that it can be uncertain; never
        zero, also where the steps so far have driven a coefficient there.
        """
        a, b, c = self._theta
        return max(a, b, 1e-9), max(b, 1e-9), max(c, b / 1000, 1e-12)
