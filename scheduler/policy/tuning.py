"""The measurement of a model's settings, and the choice between them from measured times.

Pure: samples and times are passed in. Two settings are compared in rounds. In a round each probe
runs once with each of them, and the setting that goes first alternates, so that a change of the
machine's speed hits both. A round gives the ratio of both times, weighed by the steps that the
model has computed here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Literal

import msgspec

from ...backends.tuning_choice import DEEP_TOKENS, PROBES, Probe, Sample, Setting
from .cost import StepLoad

SECONDS_MAX = 60.0
"""The time for all slices of a comparison, after which the present setting stays."""
ROUNDS_MIN = 5
"""A confidence interval from fewer rounds is too often wrong."""
GAIN_MIN = 0.05
"""A smaller gain is not worth the saved KV states, which fit only their own setting."""
PROBE_SHARE_MIN = 0.01
"""Probes with a smaller share of the time do not change the choice, and are not run."""
SMALL_STEP_TOKENS_MAX = 63
"""Steps of more tokens of a sequence have tiles in llama.cpp's flash attention, and count as parts
of a prompt.
"""

FIRST_MIX: Mapping[str, float] = {
    "decode-1": 100.0,
    "decode-4": 20.0,
    "decode-16": 10.0,
    "deep-1": 20.0,
    "deep-4": 5.0,
    "deep-16": 2.0,
    "deep-step": 4.0,
    "prompt": 2.0,
}
"""Steps by probe while a model has computed few: short conversations, most of them alone, and a
sixth of the tokens behind long texts. With SmolLM2 135M on two cores each kind then takes between
a twentieth and a quarter of the time. They count until as many steps have been computed.
"""

_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Student's t for a two-sided interval with an error of 5 %, by degrees of freedom from 1 on."""
_BY_NAME = {probe.name: probe for probe in PROBES}
_DECODING = tuple(
    (probe.sequences, probe.name) for probe in PROBES if probe.tokens == 1 and not probe.depth
)

Verdict = Literal["change", "stay", "continue"]


class StepMix:
    """The steps that a model has computed, as counts by probe. Owned by the engine's thread."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def add_step(self, load: StepLoad) -> None:
        """Count a step."""
        for name, count in steps_as_probes(load):
            self.counts[name] = self.counts.get(name, 0.0) + count


def steps_as_probes(load: StepLoad) -> list[tuple[str, float]]:
    """Return the probes that a step resembles, with how often each fits into it."""
    if load.tokens < 1:
        return []
    deep = min(1.0, load.depth / load.tokens / DEEP_TOKENS)
    if load.decodes or load.passes:
        name, deep_name = _nearest_decoding(load.tokens)
        return [(name, 1.0 - deep), (deep_name, deep)]
    if load.tokens > SMALL_STEP_TOKENS_MAX:
        return [("prompt", load.tokens / _BY_NAME["prompt"].tokens)]
    return [
        ("prompt", (1.0 - deep) * load.tokens / _BY_NAME["prompt"].tokens),
        ("deep-step", deep * load.tokens / _BY_NAME["deep-step"].tokens),
    ]


@cache
def _nearest_decoding(tokens: int) -> tuple[str, str]:
    """Return the probes of decoding, near 0 and deep, that a step of *tokens* resembles."""
    sequences, name = min(_DECODING, key=lambda known: abs(math.log(tokens / known[0])))
    return name, f"deep-{sequences}"


def mix_weights(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each probe by the steps so far; `FIRST_MIX` stands in for those that
    are missing to as many steps as it has.
    """
    first = sum(FIRST_MIX.values())
    missing = max(0.0, first - sum(counts.values())) / first
    return {n: FIRST_MIX[n] * missing + counts.get(n, 0.0) for n in FIRST_MIX}


def weighted_s(seconds: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the seconds of the steps in *weights* by the seconds of each probe.

    A deep step of several sequences that was not measured takes as much longer than one near 0 as
    that many deep steps of one sequence. Other probes without a time are left out.
    """
    total = 0.0
    for name, weight in weights.items():
        took = seconds.get(name)
        if took is None:
            took = _deep_s(_BY_NAME[name], seconds)
        total += weight * took
    return total


def _deep_s(probe: Probe, seconds: Mapping[str, float]) -> float:
    near, one_near, one_deep = (
        seconds.get(name) for name in (f"decode-{probe.sequences}", "decode-1", "deep-1")
    )
    if not probe.depth or probe.tokens > 1 or near is None or one_near is None or one_deep is None:
        return 0.0
    return near + probe.sequences * max(0.0, one_deep - one_near)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing *candidate* with *present*.

    *ratio* is the candidate's time as a share of the present one's, and *low* and *high* are the
    bounds of its confidence interval.
    """

    present: Setting
    candidate: Setting
    verdict: Verdict
    rounds: int
    ratio: float = 1.0
    low: float = 0.0
    high: float = math.inf
    probes: dict[str, float] = {}
    """The same ratio by probe, from the medians of its times."""


def compare(
    present: Setting,
    candidate: Setting,
    samples: Iterable[Sample],
    counts: Mapping[str, float],
    spent_s: float,
    seconds_max: float = SECONDS_MAX,
) -> Comparison:
    """Compare two settings by their *samples*, of which the k-th ones of a probe belong to round k.

    *counts* are the model's steps by probe, *spent_s* the seconds of all slices so far. The
    comparison ends when the interval excludes equality, when it excludes a gain of `GAIN_MIN`, or
    when the time is up. The candidate needs a gain of `GAIN_MIN`; otherwise the present one stays.
    """
    times: dict[Setting, dict[str, list[float]]] = {present: {}, candidate: {}}
    for sample in samples:
        if sample.setting in times:
            times[sample.setting].setdefault(sample.probe, []).append(sample.seconds)
    weights = mix_weights(counts)
    before, after = times[present], times[candidate]
    names = before.keys() & after.keys()
    rounds = min((min(len(before[n]), len(after[n])) for n in names), default=0)
    ratios = []
    for k in range(rounds):
        old = weighted_s({n: before[n][k] for n in names}, weights)
        new = weighted_s({n: after[n][k] for n in names}, weights)
        if old > 0 and new > 0:
            ratios.append(math.log(new / old))
    ratio, low, high = _interval(ratios)
    return Comparison(
        present=present,
        candidate=candidate,
        verdict=_verdict(ratio, low, high, len(ratios), spent_s >= seconds_max),
        rounds=len(ratios),
        ratio=ratio,
        low=low,
        high=high,
        probes={n: round(_median(after[n]) / _median(before[n]), 3) for n in sorted(names)},
    )


def _interval(logarithms: Sequence[float]) -> tuple[float, float, float]:
    count = len(logarithms)
    if not count:
        return 1.0, 0.0, math.inf
    mean = sum(logarithms) / count
    if count == 1:
        return math.exp(mean), 0.0, math.inf
    variance = sum((x - mean) ** 2 for x in logarithms) / (count - 1)
    t = _T_QUANTILES[count - 2] if count - 2 < len(_T_QUANTILES) else 2.0
    half = t * math.sqrt(variance / count)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _verdict(ratio: float, low: float, high: float, rounds: int, out_of_time: bool) -> Verdict:
    if rounds >= ROUNDS_MIN:
        if high < 1.0:
            return "change" if ratio <= 1.0 - GAIN_MIN else "stay"
        if low > 1.0 - GAIN_MIN:
            return "stay"
    return "stay" if out_of_time else "continue"


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def next_run(
    present: Setting, candidate: Setting, samples: Sequence[Sample], probes: Sequence[Probe]
) -> tuple[Probe, Setting]:
    """Return the probe and the setting to run after *samples*, all of which were such runs.

    Both settings run a probe one after the other, and the order alternates by probe and by round.
    """
    rounds, run = divmod(len(samples), 2 * len(probes))
    place, is_second = divmod(run, 2)
    with_present = (rounds + place + is_second) % 2 == 0
    return probes[place], present if with_present else candidate


def useful_probes(
    probes: Sequence[Probe], counts: Mapping[str, float], seconds: Mapping[str, float]
) -> list[Probe]:
    """Return the *probes* that take a share of the time of the model's steps, by the *seconds* of
    each; those without a time yet are useful.
    """
    weights = mix_weights(counts)
    total = weighted_s(seconds, weights)
    return [
        p
        for p in probes
        if p.name not in seconds
        or weights[p.name] * seconds[p.name] >= PROBE_SHARE_MIN * total
        or p.name in ("decode-1", "deep-1")
    ]


def thread_candidates(chosen: Setting, cores: int) -> list[Setting]:
    """Return the settings with other numbers of threads that are worth measuring on *cores*: for
    steps of one token, one core less and half of them.

    Memory bounds these steps, and a core that is left to other programs stalls no thread; half is
    the number of cores where each runs two threads. Steps of several tokens keep all cores.
    """
    fewer = sorted({n for n in (cores - 1, cores // 2) if 1 < n < cores}, reverse=True)
    return [msgspec.structs.replace(chosen, threads=n, threads_batch=cores) for n in fewer]


def candidates_of(default: Setting, decided: Collection[Comparison], cores: int) -> list[Setting]:
    """Return the candidates that remain after the comparisons so far, the next one first: the other
    kind of attention, then numbers of threads with the chosen one.
    """
    tried = {comparison.candidate for comparison in decided}
    chosen = chosen_setting(default, decided)
    other = msgspec.structs.replace(default, flash_attn=not default.flash_attn)
    if other not in tried:
        return [other]
    if default.threads or default.threads_batch:
        return []
    if any(c.candidate.threads and c.verdict == "change" for c in decided):
        return []
    return [s for s in thread_candidates(chosen, cores) if s not in tried]


def chosen_setting(default: Setting, decided: Iterable[Comparison]) -> Setting:
    """Return the setting that is in force after the comparisons in their order."""
    chosen = default
    for comparison in decided:
        if comparison.verdict == "change":
            chosen = comparison.candidate
    return chosen


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
