"""What stands behind a difference: how far apart the two candidates were, and what noise there is.

The shape of a batch alone moves a row of logits. Where two candidates are closer than what it
moves, which one is likelier is no question that either side could answer better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec
import numpy as np

from .bare import Bare
from .sides import Answer

__all__ = ("Evidence", "Noise", "evidence", "first_difference", "measure_noise")

NOISE_ANSWER = 8
"""Tokens of an answer after which the noise is measured."""
DIGITS = 5
FORBIDDEN = 1e9
OURS, THEIRS = "all-but-1", "all-but-4"
"""Shapes in which inferd and llama-server compute the prompts of a model with a window: each saves
its state there.
"""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How far batch shapes alone move the gap between the two likeliest tokens: over all prompts
    the most, the median, and how many prompts were looked at.
    """

    most: float
    median: float
    prompts: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token in which two answers differ: what each side drew there, and its logit less
    the other's (`inferd` less `llama-server`) by batch shape.
    """

    at: int
    inferd: str
    llama_server: str
    gaps: dict[str, float]
    draws: dict[str, str] = {}
    """What the whole chain draws by shape, where all shapes prefer the same candidate: what a
    sampler cuts away may still depend on the shape.
    """

    @property
    def gap(self) -> float:
        """The least distance of the two, whatever the shape."""
        return min(abs(gap) for gap in self.gaps.values())

    @property
    def flips(self) -> bool:
        """Whether one shape prefers one, and another the other."""
        return min(self.gaps.values()) < 0 < max(self.gaps.values())

    @property
    def both_drawn(self) -> bool:
        """Whether one shape draws what inferd did, and another what llama-server did."""
        return {self.inferd, self.llama_server} <= set(self.draws.values())

    @property
    def as_parted(self) -> bool:
        """Whether the shapes in which the sides part a prompt draw what each of them did."""
        if self.draws:
            return (self.draws[OURS], self.draws[THEIRS]) == (self.inferd, self.llama_server)
        return self.gaps[OURS] > 0 > self.gaps[THEIRS]

    def is_near_tie(self, noise: Noise) -> bool:
        """Tell whether the shape of a batch can decide between the two."""
        return self.flips or self.both_drawn or self.gap <= noise.most


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the place of the first token in which two answers differ."""
    pairs = zip(a, b, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def measure_noise(bare: Bare, prompts: Sequence[str]) -> Noise:
    """Measure the noise after the first tokens of a greedy answer to each prompt."""
    moved = []
    for prompt in prompts:
        tokens = bare.tokenize(prompt)
        rows = bare.rows(tokens, bare.greedy(tokens, NOISE_ANSWER))
        first, second = rows["steps"].argsort()[::-1][:2]
        gaps = [float(row[first] - row[second]) for row in rows.values()]
        moved.append(max(gaps) - min(gaps))
    return Noise(
        most=round(max(moved), DIGITS),
        median=round(float(np.median(moved)), DIGITS),
        prompts=len(moved),
    )


def evidence(
    bare: Bare, prompt: str, request: Mapping[str, Any], ours: Answer, theirs: Answer
) -> Evidence | None:
    """Return what stands behind a difference; None where it is not one of tokens."""
    tokens = bare.tokenize(prompt)
    own, other = _without_end(bare, ours), _without_end(bare, theirs)
    at = first_difference(own, other)
    if at == len(own) == len(other):
        return None
    said, ends = own[:at], bare.ends
    gaps, drawn = {}, (0, 0)
    for shape, row in bare.rows(tokens, said).items():
        decided = bare.decided(row, [*tokens, *said], request)
        end = max(ends, key=lambda token: decided[token])
        a = own[at] if at < len(own) else end
        b = other[at] if at < len(other) else end
        gaps[shape], drawn = _gap(float(decided[a]), float(decided[b])), (a, b)
    seen = Evidence(
        at=at, inferd=bare.piece(drawn[0]), llama_server=bare.piece(drawn[1]), gaps=gaps
    )
    if seen.flips:
        return seen
    draws = {
        shape: bare.piece(bare.drawn(row, [*tokens, *said], request))
        for shape, row in bare.rows(tokens, said).items()
    }
    return msgspec.structs.replace(seen, draws=draws)


def _gap(a: float, b: float) -> float:
    """Return the distance of two logits; of one that was forbidden it is large, and not endless."""
    gap = a - b
    return round(gap, DIGITS) if math.isfinite(gap) else math.copysign(FORBIDDEN, gap)


def _without_end(bare: Bare, answer: Answer) -> list[int]:
    tokens = list(answer.tokens)
    while tokens and bare.is_end(tokens[-1]) and answer.end == "eos":
        tokens.pop()
    return tokens
