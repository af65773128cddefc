"""The measurement of a model, stage by stage, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from ...backends.llama.measuring.requests import KvLoss, Opened, Variant
from ...backends.model_spec import ModelSpec
from ...backends.tuning_choice import Probe, Sample, Setting
from ...scheduler.policy.tuning import FIRST_MIX
from .stages import (
    SHARES,
    Stage,
    StageResult,
    is_decided,
    kv_name,
    result_of,
    runs_of,
    stage_of,
)

LOSS_SHARE = 0.5
"""The part of the last stage's time that may be used for the losses of KV states."""
QUICK_S = 5.0
QUICK_ROUNDS = 5
QUICK_PROMPT = Probe("prompt", 1, 64, 0)
"""A quarter of a prompt: the shortest that flash attention computes in tiles."""
QUICK_COUNTS = {**FIRST_MIX, "prompt": 4 * FIRST_MIX["prompt"]}
"""The usual mix of steps, with four quarters for each prompt."""
Progress = Callable[[str, float], None]


class Runner(Protocol):
    """A loaded model that runs probes: a `MeasuringProcess`, or a model of given times in tests."""

    def run_probe(self, probe: Probe, variant: Variant, until: float) -> float | None:
        """Return the seconds of one step, or None if *until* passes first."""

    def measure_losses(self, variants: list[Variant], until: float) -> list[KvLoss]:
        """Return the losses of the variants' KV states; empty if *until* passes first."""

    def close_contexts(self) -> None:
        """Free the contexts of the probes so far."""


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all stages, and the setting that they choose."""

    present: Variant
    chosen: Setting
    stages: list[StageResult]
    seconds: float


def measure_model(
    runner: Runner,
    opened: Opened,
    spec: ModelSpec,
    present: Variant,
    cores: int,
    seconds: float,
    on_progress: Progress,
    names: Collection[str] = tuple(SHARES),
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """Measure the stages *names* of the model that *runner* has opened, for *seconds* in all; begin
    with the setting that is *present*.
    """
    begin = clock()
    end = begin + seconds
    chosen, results = present, list[StageResult]()
    left = {name: share for name, share in SHARES.items() if name in names}
    while left:
        share = next(iter(left.values())) / sum(left.values())
        name = next(iter(left))
        del left[name]
        stage = stage_of(
            name,
            chosen,
            opened.probes,
            cores=cores,
            batch_size=spec.batch_size,
            ctx_size=opened.ctx_size,
            cache_types=opened.cache_types,
            seconds=max(0.0, (end - clock()) * share),
        )
        if len(stage.variants) < 2 or not stage.probes:
            continue

        def report(name: str = name) -> None:
            on_progress(name, min(1.0, (clock() - begin) / seconds))

        result = _measure_stage(runner, stage, report, clock)
        results.append(result)
        if name != "kv":
            chosen = result.chosen
    return TuneResult(
        present=present, chosen=chosen.setting, stages=results, seconds=clock() - begin
    )


def _measure_stage(
    runner: Runner, stage: Stage, report: Callable[[], None], clock: Callable[[], float]
) -> StageResult:
    begin = clock()
    until = begin + stage.seconds
    runner.close_contexts()
    losses: dict[str, KvLoss] = {}
    if stage.name == "kv":
        report()
        variants = stage.variants[1:]
        found = runner.measure_losses(variants, begin + LOSS_SHARE * stage.seconds)
        losses = dict(zip(map(kv_name, variants), found, strict=False))
    samples: list[Sample] = []
    complete = 0
    for number, probe, variant in runs_of(stage):
        if number > complete + 1:
            complete += 1
            if is_decided(result_of(stage, samples, clock() - begin)):
                break
        report()
        seconds = runner.run_probe(probe, variant, until)
        if seconds is None:
            break
        samples.append(Sample(variant, probe.name, seconds))
    return result_of(stage, samples, clock() - begin, losses=losses)


def measure_attention(
    runner: Runner,
    opened: Opened,
    present: Variant,
    until: float,
    clock: Callable[[], float] = time.monotonic,
) -> StageResult | None:
    """Compare both kinds of attention by few short steps; return None if that takes until *until*,
    because the steps that are missing could change the choice.
    """
    begin = clock()
    stage = stage_of(
        "flash-attn",
        present,
        [QUICK_PROMPT if probe.name == QUICK_PROMPT.name else probe for probe in opened.probes],
        cores=1,
        batch_size=1,
        ctx_size=0,
        cache_types=(),
        seconds=max(0.0, until - begin),
    )
    samples: list[Sample] = []
    for _, probe, variant in runs_of(stage, QUICK_ROUNDS, by_probe=True):
        seconds = runner.run_probe(probe, variant, until)
        if seconds is None:
            return None
        samples.append(Sample(variant, probe.name, seconds))
    return result_of(stage, samples, clock() - begin, QUICK_COUNTS)
