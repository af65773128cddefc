"""What every side of the bench runs, and the figures that are made of it. Pure functions."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.get_models import MODELS_DIR, SOURCES

MODEL = MODELS_DIR / SOURCES["smollm2"].file
THREADS = 2
SLOTS = 16
CTX_SIZE = 512
"""Tokens of context a slot: the longest prompt and its answer take under 200."""

STREAMS = (1, 4, 16)
N_PREDICT = 128
CACHED_TOKENS_MAX = 6
"""Of a prompt: the start mark and some digits of its serial may have been seen before."""

_NAMES = "Ada Ben Cleo Dara Egon Fay Gus Hana Ivo Jana Kofi Lena Milo Nora Otto Pia Quin Rosa"
_JOBS = "baker carpenter doctor farmer gardener librarian painter sailor tailor teacher"
_PLACES = "bakery bridge castle forest harbour island library market mill museum station"
_THINGS = "bell book clock coin compass key lamp letter map mirror ring violin"
_BEASTS = "badger cat crow dog fox goat hedgehog magpie otter owl rabbit squirrel"


@dataclass(frozen=True)
class Job:
    """What a side is to run: as many streams of *n_predict* tokens each, all at once.

    *serial* is new in every job and stands at the front of its prompts; for the rest they are
    alike for all sides of a round. So no server has any of a prompt in a cache: two sides share
    one daemon, and a disturbed run is made again.
    """

    streams: int
    round: int
    serial: int
    n_predict: int = N_PREDICT

    def prompts(self) -> list[str]:
        """Return distinct prompts of 40 to 60 tokens, one a stream."""
        rng = random.Random(self.round * 1000 + self.streams)
        names = rng.sample(_NAMES.split(), self.streams)
        mark = f"{self.serial:04}"[::-1]  # a token a digit, the one that changes first
        return [f"{mark} {_prompt(name, rng)}" for name in names]


@dataclass(frozen=True)
class Stream:
    """One answer: when it was asked for and when each piece came, in seconds of one clock."""

    asked_s: float
    arrivals_s: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class Run:
    """The figures of one side at one number of streams in one round."""

    side: str
    streams: int
    round: int
    tokens: int
    wall_s: float
    tokens_per_s: float
    ttft_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    foreign_cores: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


FIGURES = ("tokens_per_s", "ttft_ms", "itl_p50_ms", "itl_p99_ms")


def check_cached(tokens: int) -> None:
    """Refuse a run that was spared its prompt: its figures would compare with nothing."""
    assert tokens <= CACHED_TOKENS_MAX, f"{tokens} tokens of the prompt came from a cache"


def _prompt(name: str, rng: random.Random) -> str:
    job, place, thing, beast = (
        rng.choice(words.split()) for words in (_JOBS, _PLACES, _THINGS, _BEASTS)
    )
    return (
        f"{name} the {job} walked to the old {place} to look for a {thing} that had been lost for "
        f"{rng.randint(3, 90)} years. Nobody knew that a {beast} had hidden it there. This is the "
        "story of that day, from early morning until late at night:"
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which *share* of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def figures(side: str, job: Job, streams: Sequence[Stream]) -> Run:
    """Return the figures of one run: rate over all streams, medians and p99 over all gaps."""
    begin = min(s.asked_s for s in streams)
    wall_s = max(s.arrivals_s[-1] for s in streams) - begin
    tokens = sum(s.tokens for s in streams)
    gaps = [b - a for s in streams for a, b in zip(s.arrivals_s, s.arrivals_s[1:], strict=False)]
    return Run(
        side=side,
        streams=len(streams),
        round=job.round,
        tokens=tokens,
        wall_s=wall_s,
        tokens_per_s=tokens / wall_s,
        ttft_ms=1000 * statistics.median(s.arrivals_s[0] - s.asked_s for s in streams),
        itl_p50_ms=1000 * percentile(gaps, 0.50),
        itl_p99_ms=1000 * percentile(gaps, 0.99),
    )


def medians(runs: Sequence[Run]) -> dict[tuple[str, int], dict[str, float]]:
    """Return the median of each figure by (side, streams), sides in the order they came."""
    keys = dict.fromkeys((run.side, run.streams) for run in runs)
    return {
        key: {
            name: statistics.median(getattr(r, name) for r in runs if (r.side, r.streams) == key)
            for name in FIGURES
        }
        for key in keys
    }
