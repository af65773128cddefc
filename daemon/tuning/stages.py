"""The stages of a measurement, each of which compares variants of one setting; pure functions.

A stage begins with the setting that the earlier ones have chosen. The types of KV states are last.
They are never chosen, because they change a model's answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...backends.engine_options import is_quantized
from ...backends.llama.measuring.requests import KvLoss, Variant
from ...backends.tuning_choice import Probe, Sample
from ...scheduler.policy.tuning import Comparison, compare

SHARES = {"flash-attn": 0.4, "threads": 0.1, "threads-batch": 0.2, "micro-batch": 0.1, "kv": 0.2}
"""The stages, with their parts of the time. Later ones get the time that earlier ones leave."""
MICRO_BATCHES = (64, 128, 256, 512)
LONG_PROMPT = Probe("prompt", 1, 512, 0)
"""A prompt that a context computes in one micro-batch or in several."""
KV_TYPES = (("q8_0", "q8_0"), ("q8_0", "q5_1"), ("q5_1", "q5_1"), ("q4_0", "q4_0"))
"""Types of keys and of values, from the largest to the smallest."""
ROUNDS_MIN, ROUNDS_MAX = 9, 100
"""A stage has so many rounds at least, unless its time is up."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Variants to compare with the first one by *probes*, within *seconds*."""

    name: str
    variants: list[Variant]
    probes: list[Probe]
    seconds: float


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a stage's variants, and the comparisons of all but the first with the first."""

    stage: Stage
    times: list[dict[str, float]]
    """The median times by probe, in the order of the variants."""
    comparisons: list[Comparison]
    losses: dict[str, KvLoss] = {}
    """By `kv_name`, the losses of the types of KV states."""

    @property
    def chosen(self) -> Variant:
        """The fastest of the variants that are faster than the first one beyond doubt, or else the
        first one.
        """
        faster = [(c.ratio, n) for n, c in enumerate(self.comparisons, 1) if c.verdict == "change"]
        return self.stage.variants[min(faster)[1] if faster else 0]


def kv_name(variant: Variant) -> str:
    """Return the types of keys and of values as text."""
    types = dict.fromkeys((variant.cache_type_k, variant.cache_type_v))
    return "/".join(types)


def stage_of(
    name: str,
    chosen: Variant,
    probes: Sequence[Probe],
    *,
    cores: int,
    batch_size: int,
    ctx_size: int,
    cache_types: Collection[str],
    seconds: float,
) -> Stage:
    """Return the stage *name* after the settings *chosen* so far, for a model that can run *probes*
    on *cores*. A stage without probes or with one variant has nothing to compare.
    """
    base = chosen
    others: list[dict[str, Any]] = []
    single = [p for p in probes if p.sequences * p.tokens == 1]
    match name:
        case "flash-attn":
            used = list(probes)
            if not is_quantized(chosen.cache_type_v):  # otherwise it is needed
                others = [{"flash_attn": not chosen.flash_attn}]
        case "threads":
            batch = chosen.threads_batch or chosen.threads or cores
            numbers = _fewer(chosen.threads or cores, cores)
            used, others = single, [{"threads": n, "threads_batch": batch} for n in numbers]
        case "threads-batch":
            present = chosen.threads_batch or chosen.threads or cores
            used = [p for p in probes if p not in single]
            others = [{"threads_batch": n} for n in _fewer(present, cores)]
        case "micro-batch":
            used = [LONG_PROMPT] if ctx_size >= LONG_PROMPT.tokens else []
            sizes = [n for n in MICRO_BATCHES if n <= batch_size and n != chosen.ubatch]
            others = [{"ubatch": n} for n in sizes]
        case "kv":
            used = [p for p in probes if p.depth] or single
            # Quantized values need flash attention, so all variants have it.
            plain = {"cache_type_k": "f16", "cache_type_v": "f16"}
            base = msgspec.structs.replace(base, flash_attn=True, **plain)
            others = [
                {"cache_type_k": k, "cache_type_v": v}
                for k, v in KV_TYPES
                if k in cache_types and v in cache_types
            ]
        case _:
            raise ValueError(f"no stage {name!r}")
    variants = [base, *(msgspec.structs.replace(base, **other) for other in others)]
    return Stage(name=name, variants=variants, probes=used, seconds=seconds)


def _fewer(present: int, cores: int) -> list[int]:
    """Return the other numbers of threads that are worth a measurement: all cores, one less, which
    leaves one to other programs, and half of them, where each core runs two threads.
    """
    return sorted({cores, cores - 1, -(-cores // 2)} - {0, present}, reverse=True)


def runs_of(
    stage: Stage, rounds_max: int = ROUNDS_MAX, *, by_probe: bool = False
) -> Iterator[tuple[int, Probe, Variant]]:
    """Yield the number of the round with each probe and variant of it, in their order.

    All variants run a probe one after the other, and take turns in going first, so that a change of
    the machine's speed hits all of them. *by_probe* runs all rounds of a probe before those of the
    next one, which saves the preparation of contexts.
    """
    rounds = range(1, rounds_max + 1)
    if by_probe:
        order = [(k, place) for place in range(len(stage.probes)) for k in rounds]
    else:
        order = [(k, place) for k in rounds for place in range(len(stage.probes))]
    count = len(stage.variants)
    for number, place in order:
        for n in range(count):
            yield number, stage.probes[place], stage.variants[(n + number + place) % count]


def result_of(
    stage: Stage,
    samples: Sequence[Sample],
    spent_s: float,
    counts: Mapping[str, float] | None = None,
    losses: Mapping[str, KvLoss] | None = None,
) -> StageResult:
    """Return the result by the *samples* of *spent_s* seconds; *counts* are the model's steps by
    probe, if they are known.
    """
    first, *others = stage.variants
    return StageResult(
        stage=stage,
        times=[_medians(samples, variant) for variant in stage.variants],
        comparisons=[
            compare(first, v, samples, counts or {}, spent_s, stage.seconds) for v in others
        ],
        losses=dict(losses or {}),
    )


def _medians(samples: Sequence[Sample], variant: Variant) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    for sample in samples:
        if sample.setting == variant:
            times.setdefault(sample.probe, []).append(sample.seconds)
    return {probe: sorted(found)[len(found) // 2] for probe, found in times.items()}


def is_decided(result: StageResult) -> bool:
    """Return whether there were enough rounds, and further ones would not change the choice."""
    return all(c.rounds >= ROUNDS_MIN and c.verdict != "continue" for c in result.comparisons)
