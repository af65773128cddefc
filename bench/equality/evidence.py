"""The evidence for a difference: the gap between the two candidates, and the noise of the logits.

The shape of a batch alone changes the logits. If two candidates are closer than that change,
neither side's choice is more correct.
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
INFERD_SHAPE, LLAMA_SERVER_SHAPE = "all-but-1", "all-but-4"
"""Shapes in which inferd and llama-server compute the prompts of a model with a sliding window.
Each side saves its state at the position of the split.
"""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """The change of the gap between the two most probable tokens by batch shapes alone.

    Over all prompts: the maximum, the median, and the number of prompts.
    """

    most: float
    median: float
    prompts: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token in which two answers differ, with each side's token.

    The gaps are inferd's logit minus llama-server's, by batch shape.
    """

    at: int
    inferd: str
    llama_server: str
    gaps: dict[str, float]
    sampled: dict[str, str] = {}
    """The token that the whole chain samples, by shape, if all shapes prefer the same candidate.
    The candidates that a sampler removes may still depend on the shape.
    """

    @property
    def gap(self) -> float:
        """The smallest gap of all shapes."""
        return min(abs(gap) for gap in self.gaps.values())

    @property
    def flips(self) -> bool:
        """Whether the shapes disagree about the more probable token."""
        return min(self.gaps.values()) < 0 < max(self.gaps.values())

    @property
    def both_sampled(self) -> bool:
        """Whether one shape samples inferd's token and another llama-server's."""
        return {self.inferd, self.llama_server} <= set(self.sampled.values())

    @property
    def is_reproduced(self) -> bool:
        """Whether the shapes in which the sides split a prompt reproduce their tokens."""
        if self.sampled:
            return (self.sampled[INFERD_SHAPE], self.sampled[LLAMA_SERVER_SHAPE]) == (
                self.inferd,
                self.llama_server,
            )
        return self.gaps[INFERD_SHAPE] > 0 > self.gaps[LLAMA_SERVER_SHAPE]

    def is_near_tie(self, noise: Noise) -> bool:
        """Return whether the batch shape can decide between the two."""
        return self.flips or self.both_sampled or self.gap <= noise.most


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the index of the first token in which two answers differ."""
    pairs = zip(a, b, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def measure_noise(bare: Bare, prompts: Sequence[str]) -> Noise:
    """Measure the noise after the first tokens of a greedy answer to each prompt."""
    changes = []
    for prompt in prompts:
        tokens = bare.tokenize(prompt)
        by_shape = bare.logits_by_shape(tokens, bare.greedy(tokens, NOISE_ANSWER))
        first, second = by_shape["steps"].argsort()[::-1][:2]
        gaps = [float(logits[first] - logits[second]) for logits in by_shape.values()]
        changes.append(max(gaps) - min(gaps))
    return Noise(
        most=round(max(changes), DIGITS),
        median=round(float(np.median(changes)), DIGITS),
        prompts=len(changes),
    )


def evidence(
    bare: Bare, prompt: str, request: Mapping[str, Any], inferd: Answer, llama_server: Answer
) -> Evidence | None:
    """Return the evidence for a difference, or None if the tokens are the same."""
    tokens = bare.tokenize(prompt)
    own, other = _without_end(bare, inferd), _without_end(bare, llama_server)
    at = first_difference(own, other)
    if at == len(own) == len(other):
        return None
    common, ends = own[:at], bare.ends
    gaps, pair = {}, (0, 0)
    for shape, logits in bare.logits_by_shape(tokens, common).items():
        adjusted = bare.adjusted_logits(logits, [*tokens, *common], request)
        end = max(ends, key=lambda token: adjusted[token])
        a = own[at] if at < len(own) else end
        b = other[at] if at < len(other) else end
        gaps[shape], pair = _gap(float(adjusted[a]), float(adjusted[b])), (a, b)
    found = Evidence(at=at, inferd=bare.piece(pair[0]), llama_server=bare.piece(pair[1]), gaps=gaps)
    if found.flips:
        return found
    sampled = {
        shape: bare.piece(bare.sampled_token(logits, [*tokens, *common], request))
        for shape, logits in bare.logits_by_shape(tokens, common).items()
    }
    return msgspec.structs.replace(found, sampled=sampled)


def _gap(a: float, b: float) -> float:
    """Return the gap of two logits. It is large but finite if one token was forbidden."""
    gap = a - b
    return round(gap, DIGITS) if math.isfinite(gap) else math.copysign(FORBIDDEN, gap)


def _without_end(bare: Bare, answer: Answer) -> list[int]:
    tokens = list(answer.tokens)
    while tokens and bare.is_end(tokens[-1]) and answer.end == "eos":
        tokens.pop()
    return tokens
