"""The evidence for a difference matches a bare llama.cpp, on a tiny model without noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.alike.bare import SHAPES, Bare, sizes_of
from bench.alike.evidence import FORBIDDEN, evidence, measure_noise
from bench.alike.sides import Answer
from tests.tiny_gguf import write_tiny

PROMPT = "abcabc"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    with Bare(write_tiny("llama", tmp_path_factory.mktemp("bare"))) as opened:
        yield opened


def greedy(bare: Bare, count: int, request: dict[str, Any]) -> list[int]:
    prompt, answer = bare.tokenize(PROMPT), list[int]()
    for _ in range(count):
        answer.append(int(decided(bare, prompt, answer, request).argmax()))
    return answer


def decided(
    bare: Bare, prompt: list[int], answer: list[int], request: dict[str, Any]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    tokens = [*prompt, *answer]
    row = bare.logits(tokens, sizes_of("steps", len(prompt), len(answer)))
    return bare.decided(row, tokens, request)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"repeat_penalty": 1.5, "presence_penalty": 0.5},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1},
        {"logit_bias": [["a", -50.0], ["b", False]], "ignore_eos": True},
    ],
    ids=str,
)
def test_the_gap_is_that_of_what_each_side_drew(bare: Bare, request_: dict[str, Any]) -> None:
    said = greedy(bare, 3, request_)
    row = decided(bare, bare.tokenize(PROMPT), said[:2], request_)
    second = int(row.argsort()[-2])
    ours, theirs = Answer("x", said, "length"), Answer("y", [*said[:2], second], "length")

    seen = evidence(bare, PROMPT, request_, ours, theirs)

    assert seen is not None and seen.at == 2 and tuple(seen.gaps) == SHAPES
    expected = float(row[said[2]] - row[second])
    assert all(gap == pytest.approx(expected, abs=1e-3) for gap in seen.gaps.values())
    assert not seen.flips


def test_a_bug_is_no_near_tie(bare: Bare) -> None:
    """A token that nobody would draw there is far beyond the noise of batch shapes."""
    noise = measure_noise(bare, [PROMPT, "xyz", "hello there"])
    said = greedy(bare, 3, {})
    row = decided(bare, bare.tokenize(PROMPT), said[:2], {})
    worst = Answer("y", [*said[:2], int(row.argmin())], "length")

    seen = evidence(bare, PROMPT, {}, Answer("x", said, "length"), worst)

    assert noise.most < 1e-2
    assert seen is not None and not seen.is_near_tie(noise)


def test_a_forbidden_token_is_as_far_as_can_be(bare: Bare) -> None:
    ours = Answer("x", bare.tokenize("a", prompt=False)[-1:], "length")
    theirs = Answer("y", bare.tokenize("b", prompt=False)[-1:], "length")
    seen = evidence(bare, PROMPT, {"logit_bias": [["b", False]]}, ours, theirs)
    assert seen is not None and seen.gap == FORBIDDEN


def test_an_answer_that_ended_drew_the_end(bare: Bare) -> None:
    said = greedy(bare, 2, {"ignore_eos": True})
    ended = Answer("x", [*said[:1], 2], "eos")
    seen = evidence(bare, PROMPT, {}, ended, Answer("y", said, "length"))
    assert seen is not None
    assert (seen.at, seen.inferd) == (1, "</s>")


def test_equal_tokens_have_no_evidence(bare: Bare) -> None:
    assert evidence(bare, PROMPT, {}, Answer("x", [9], "eos"), Answer("y", [9], "length")) is None


def test_a_chain_draws_what_its_cuts_leave(bare: Bare) -> None:
    """The two likeliest are penalised; cut away before or after, the third is out or drawn."""
    prompt = bare.tokenize(PROMPT)
    row = bare.logits(prompt, [len(prompt)])
    first, second, third = (int(t) for t in row.argsort()[::-1][:3])
    request = {"top_k": 2, "presence_penalty": 100.0, "min_p": 0.0, "top_p": 1.0}
    seen = [*prompt, first, second]
    cut = bare.sampled_token(row, seen, request | {"samplers": ["top_k", "penalties"]})
    assert (cut, bare.sampled_token(row, seen, request)) == (first, third)
    assert bare.sampled_token(row, prompt, {"temperature": 0}) == first
