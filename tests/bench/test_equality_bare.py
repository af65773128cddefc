"""The evidence for a difference matches a bare llama.cpp, on a tiny model without noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.equality.bare import SHAPES, Bare, sizes_of
from bench.equality.evidence import FORBIDDEN, evidence, measure_noise
from bench.equality.sides import Answer
from tests.tiny_gguf import write_tiny

PROMPT = "abcabc"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    with Bare(write_tiny("llama", tmp_path_factory.mktemp("bare"))) as opened:
        yield opened


def greedy(bare: Bare, count: int, request: dict[str, Any]) -> list[int]:
    prompt, answer = bare.tokenize(PROMPT), list[int]()
    for _ in range(count):
        answer.append(int(adjusted_logits(bare, prompt, answer, request).argmax()))
    return answer


def adjusted_logits(
    bare: Bare, prompt: list[int], answer: list[int], request: dict[str, Any]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    tokens = [*prompt, *answer]
    logits = bare.logits(tokens, sizes_of("steps", len(prompt), len(answer)))
    return bare.adjusted_logits(logits, tokens, request)


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
def test_the_gap_is_that_of_the_tokens_that_the_sides_sampled(
    bare: Bare, request_: dict[str, Any]
) -> None:
    answer = greedy(bare, 3, request_)
    logits = adjusted_logits(bare, bare.tokenize(PROMPT), answer[:2], request_)
    second = int(logits.argsort()[-2])
    inferd, llama_server = (
        Answer("x", answer, "length"),
        Answer("y", [*answer[:2], second], "length"),
    )

    found = evidence(bare, PROMPT, request_, inferd, llama_server)

    assert found is not None and found.at == 2 and tuple(found.gaps) == SHAPES
    expected = float(logits[answer[2]] - logits[second])
    assert all(gap == pytest.approx(expected, abs=1e-3) for gap in found.gaps.values())
    assert not found.flips


def test_a_bug_is_not_a_near_tie(bare: Bare) -> None:
    """The gap of the least probable token is far beyond the noise of batch shapes."""
    noise = measure_noise(bare, [PROMPT, "xyz", "hello there"])
    answer = greedy(bare, 3, {})
    logits = adjusted_logits(bare, bare.tokenize(PROMPT), answer[:2], {})
    worst = Answer("y", [*answer[:2], int(logits.argmin())], "length")

    found = evidence(bare, PROMPT, {}, Answer("x", answer, "length"), worst)

    assert noise.most < 1e-2
    assert found is not None and not found.is_near_tie(noise)


def test_a_forbidden_token_has_the_largest_gap(bare: Bare) -> None:
    inferd = Answer("x", bare.tokenize("a", prompt=False)[-1:], "length")
    llama_server = Answer("y", bare.tokenize("b", prompt=False)[-1:], "length")
    found = evidence(bare, PROMPT, {"logit_bias": [["b", False]]}, inferd, llama_server)
    assert found is not None and found.gap == FORBIDDEN


def test_an_answer_that_ended_sampled_the_end(bare: Bare) -> None:
    answer = greedy(bare, 2, {"ignore_eos": True})
    ended = Answer("x", [*answer[:1], 2], "eos")
    found = evidence(bare, PROMPT, {}, ended, Answer("y", answer, "length"))
    assert found is not None
    assert (found.at, found.inferd) == (1, "</s>")


def test_equal_tokens_have_no_evidence(bare: Bare) -> None:
    assert evidence(bare, PROMPT, {}, Answer("x", [9], "eos"), Answer("y", [9], "length")) is None


def test_a_chain_samples_among_the_candidates_that_are_left(bare: Bare) -> None:
    """The two most probable tokens get penalties. If top-k removes the others before them, the
    first remains; if it does so after them, the third is sampled.
    """
    prompt = bare.tokenize(PROMPT)
    logits = bare.logits(prompt, [len(prompt)])
    first, second, third = (int(t) for t in logits.argsort()[::-1][:3])
    request = {"top_k": 2, "presence_penalty": 100.0, "min_p": 0.0, "top_p": 1.0}
    tokens = [*prompt, first, second]
    cut = bare.sampled_token(logits, tokens, request | {"samplers": ["top_k", "penalties"]})
    assert (cut, bare.sampled_token(logits, tokens, request)) == (first, third)
    assert bare.sampled_token(logits, prompt, {"temperature": 0}) == first
