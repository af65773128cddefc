"""One measurement of a model's settings, from the first probe to the choice.

Pure: samples and times are passed in. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...backends.probes import Probe, Sample, Setting
from .tuning import (
    GAIN_MIN,
    SECONDS_MAX,
    Comparison,
    candidates_of,
    chosen_setting,
    compare,
    next_run,
    useful_probes,
)

SAMPLES_MAX = 1000
"""At this bound the time counts as up. Probes of less than 60 ms reach it within the time."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a measurement. *ratios* are the times of the probes with flash attention, as
    shares of those without it.
    """

    chosen: Setting
    reason: str
    ratios: dict[str, float]


class Measurement:
    """Compares the *default* setting with others by *probes*, for *seconds_max* in all. Numbers of
    threads are compared on more than one of *cores*.
    """

    def __init__(
        self,
        default: Setting,
        probes: Sequence[Probe],
        cores: int = 1,
        seconds_max: float = SECONDS_MAX,
    ):
        self.outcome: Outcome | None = None
        self.spent_s = 0.0
        self._default, self._probes, self._cores = default, tuple(probes), cores
        self._seconds_max = seconds_max
        self._decided: list[Comparison] = []
        self._samples: list[Sample] = []
        """Those of the present comparison."""
        self._is_trimmed = False
        """Whether probes without a share of the time are left out."""

    def next_run(self) -> tuple[Probe, Setting]:
        """Return the probe and the setting to run next. There is no outcome yet."""
        return next_run(self._present, self._candidates()[0], self._samples, self._probes)

    def add_time(self, seconds: float) -> None:
        """Count the time of a piece of work. Time without samples ends the measurement, too."""
        self.spent_s += seconds
        if self.spent_s >= 2 * self._seconds_max and self.outcome is None:
            self._decide({}, is_last=True)

    def add_sample(self, sample: Sample, counts: Mapping[str, float]) -> None:
        """Add a sample of a model whose steps are *counts*, and decide if a round is complete."""
        self._samples.append(sample)
        if len(self._samples) % (2 * len(self._probes)):
            return
        if not self._is_trimmed:
            self._is_trimmed = True
            last = {sample.probe: sample.seconds for sample in self._samples}
            self._probes = tuple(useful_probes(self._probes, counts, last))
            names = {probe.name for probe in self._probes}
            self._samples = [sample for sample in self._samples if sample.probe in names]
        self._decide(counts, is_last=len(self._samples) >= SAMPLES_MAX)

    def _decide(self, counts: Mapping[str, float], *, is_last: bool) -> None:
        result = compare(
            self._present,
            self._candidates()[0],
            self._samples,
            counts,
            self._seconds_max if is_last else self.spent_s,
            self._seconds_max,
        )
        if result.verdict == "continue":
            return
        self._decided.append(result)
        self._samples = []
        if not self._candidates() or self.spent_s >= self._seconds_max:
            self.outcome = self._outcome()

    @property
    def _present(self) -> Setting:
        return chosen_setting(self._default, self._decided)

    def _candidates(self) -> list[Setting]:
        return candidates_of(self._default, self._decided, self._cores)

    def _outcome(self) -> Outcome:
        attention = self._decided[0]
        ratios = attention.probes
        if not attention.candidate.flash_attn:
            ratios = {name: round(1 / ratio, 3) for name, ratio in ratios.items()}
        return Outcome(
            chosen=self._present,
            reason="; ".join(reason_text(comparison) for comparison in self._decided),
            ratios=ratios,
        )


def reason_text(comparison: Comparison) -> str:
    """Return what a comparison has found, for people."""
    present, candidate = comparison.present, comparison.candidate
    if candidate.flash_attn != present.flash_attn:
        subject = "with flash attention" if candidate.flash_attn else "without flash attention"
    else:
        subject = f"with {candidate.threads} threads for single tokens"
    took = f"{subject}, its steps take {comparison.ratio:.2f} of the time"
    took += f" ({comparison.low:.2f} to {comparison.high:.2f} in {comparison.rounds} rounds)"
    if comparison.verdict == "change" or comparison.low >= 1.0:
        return took
    if comparison.high < 1.0 or comparison.low > 1.0 - GAIN_MIN:
        return f"{took}, a gain below {GAIN_MIN:.0%}"
    return f"{took}, which is not certain"
