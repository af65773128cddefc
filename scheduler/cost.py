"""What a step takes: a model of three coefficients, learned while the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("Load", "StepCost")

DRIFT = 0.01
"""The coefficients' random walk a step, as a share of each: how fast old steps are forgotten."""
NOISE = 0.1
"""A step's time is off by this share, with nothing wrong."""
SURPRISE_MAX = 3.0
"""A step further off than this many deviations counts as that far off: a hiccup is no trend."""
SECONDS_MIN = 1e-6
"""No step takes less, whatever a coarse clock says."""
TREND_STEPS = 3
"""As many surprises in a row are a trend: the machine has changed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step is made of.

    *groups* counts the chunks of different lengths: the backend runs the model once for each, as
    its batches are of sequences that all go equally far. *depth* sums, over the rows, how many
    tokens each looks back on.
    """

    groups: int
    rows: int
    depth: int

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int]]) -> Load:
        """Return the load of chunks, each (position, count)."""
        return cls(
            groups=len({count for _, count in chunks}),
            rows=sum(count for _, count in chunks),
            depth=sum(count * position + count * (count - 1) // 2 for position, count in chunks),
        )


class StepCost:
    """Predicts seconds = a·groups + b·rows + c·depth.

    The coefficients are the state of a Kalman filter whose process noise is a random walk. Plain
    recursive least squares with forgetting would not do: hours of one kind of step would make it
    forget what the other kinds cost (covariance wind-up); here a coefficient's uncertainty is
    bounded by its own size.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._theta = [0.0, 0.0, 0.0]
        self._variance = [[0.0] * 3 for _ in range(3)]
        self._surprises = 0

    def __repr__(self) -> str:
        a, b, c = (1000 * value for value in self._theta)
        return f"<StepCost [{a:.2f} ms + {b:.3f} ms/row + {1000 * c:.3f} µs/row·token]>"

    @property
    def known(self) -> bool:
        """Tell whether anything was learned yet."""
        return self.steps > 0

    def predict(self, load: Load) -> float:
        """Return the seconds that a step of *load* will take; 0.0 while nothing is known."""
        a, b, c = self._theta
        return a * load.groups + b * load.rows + c * load.depth

    def again(self, tokens: int) -> float:
        """Return the seconds that computing the first *tokens* of a prompt again would take."""
        return self.predict(Load(0, tokens, tokens * (tokens - 1) // 2))

    def learn(self, load: Load, seconds: float) -> None:
        """Take a step of *load* that took *seconds*."""
        self.steps += 1
        seconds = max(seconds, SECONDS_MIN)
        if self.steps == 1:
            self._begin(load, seconds)
            return
        features = (float(load.groups), float(load.rows), float(load.depth))
        self._drift()
        gains = [sum(v * x for v, x in zip(row, features, strict=True)) for row in self._variance]
        expected = self.predict(load)
        noise = (NOISE * max(expected, seconds / 2)) ** 2 + 1e-12
        spread = noise + max(0.0, sum(x * g for x, g in zip(features, gains, strict=True)))
        error = self._believed(seconds - expected, SURPRISE_MAX * float(spread**0.5))
        self._theta = [
            max(0.0, t + g * error / spread) for t, g in zip(self._theta, gains, strict=True)
        ]
        self._variance = [
            [v - gains[i] * gains[j] / spread for j, v in enumerate(row)]
            for i, row in enumerate(self._variance)
        ]

    def _believed(self, error: float, limit: float) -> float:
        """Return how much of an error counts; a row of surprises makes all uncertain again."""
        if abs(error) <= limit:
            self._surprises = 0
            return error
        self._surprises += 1
        if self._surprises >= TREND_STEPS:
            self._surprises = 0
            for i, scale in enumerate(self._scales()):
                self._variance[i] = [0.0] * 3
                self._variance[i][i] = scale**2
        return limit if error > 0 else -limit

    def _begin(self, load: Load, seconds: float) -> None:
        """Guess from the first step: nine tenths are its rows', the depth costs nothing yet."""
        row = 0.9 * seconds / max(load.rows, 1)
        self._theta = [0.1 * seconds / max(load.groups, 1), row, 0.0]
        for i, deviation in enumerate((self._theta[0] * 3, row, row / 1000)):
            self._variance[i][i] = deviation**2

    def _drift(self) -> None:
        for i, scale in enumerate(self._scales()):
            self._variance[i][i] += (DRIFT * scale) ** 2
            excess = scale / float(self._variance[i][i] ** 0.5)
            if excess < 1:  # row and column alike, or the matrix would be no covariance any more
                for j in range(3):
                    self._variance[i][j] *= excess
                    self._variance[j][i] *= excess

    def _scales(self) -> tuple[float, float, float]:
        """Return the size of each coefficient, which is the most that it can be uncertain."""
        a, b, c = self._theta
        return max(a, b), max(b, 1e-9), max(c, b / 1000, 1e-12)
