"""The short list of a row of logits: what a chain draws from it is what it draws from all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferd.backends import SamplingParams
from inferd.backends.llama.sampling.chain import Candidates, LlamaSampler
from inferd.backends.llama.sampling.logits import (
    CANDIDATES_MAX,
    COLUMNS,
    probs_before_sampling,
    top_candidates,
)
from inferd.backends.llama.sampling.samplers import Prototypes
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.walking import vocabulary
from tests.models import smollm2

Row = NDArray[np.float32]
SIZES = (4 * COLUMNS, 49_152, 262_144, 262_144 + 77)
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


def row_of(size: int, seed: int, scale: float = 3.0) -> Row:
    drawn = np.random.default_rng(seed).standard_normal(size) * scale
    return drawn.astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 40, 150, CANDIDATES_MAX])
def test_the_likeliest_tokens_are_all_among_a_few(size: int, count: int) -> None:
    for seed in range(5):
        row = row_of(size, seed)
        found = top_candidates(row, count)
        assert found is not None and list(found) == sorted(set(found))
        assert set(np.argsort(-row)[:count]) <= set(found)
        assert len(found) <= 2 * count + 20


def test_equals_at_the_bound_are_all_there() -> None:
    row = np.zeros(SIZES[-1], np.float32)
    row[::1000] = 1.0
    found = top_candidates(row, 40)
    assert found is not None and list(found) == list(range(0, SIZES[-1], 1000))


@pytest.mark.parametrize(
    "row", [np.zeros(49_152), np.full(49_152, -np.inf), np.full(49_152, np.nan)]
)
def test_a_row_without_a_few_likely_tokens_has_no_short_list(row: Row) -> None:
    assert top_candidates(row.astype(np.float32), 40) is None


def test_a_short_list_has_a_bound_and_small_vocabularies_have_none() -> None:
    assert top_candidates(row_of(49_152, 1), CANDIDATES_MAX + 1) is None
    assert top_candidates(row_of(4 * COLUMNS - 1, 1), 1) is None
    assert top_candidates(row_of(49_152, 1), 0) is None


class Whole(LlamaSampler):
    """Draws from all tokens."""

    def short_list(self, row: Row) -> None:
        """Tell of none."""


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with vocabulary(smollm2()) as vocab:
        yield vocab


def drawn(
    kind: type[LlamaSampler], vocab: Vocab, params: SamplingParams, count: int = 30
) -> list[int]:
    sampler, candidates = kind(vocab, Prototypes(), params, PROMPT, (), 256), Candidates(vocab.size)
    tokens = []
    for index in range(count):
        token = candidates.sample(sampler, _spoken(vocab, index), index)
        assert token is not None
        tokens.append(token)
    sampler.close()
    return tokens


def _spoken(vocab: Vocab, index: int) -> Row:
    """Return logits of which a few stand out, those of the prompt's tokens among them."""
    row = row_of(vocab.size, index, 2.0)
    row[PROMPT] += 9.0
    return row


SHORT: list[dict[str, Any]] = [
    {},
    {"temp": 1.5, "top_k": 7},
    {"top_k": 400, "min_p": 0.0, "top_p": 1.0},
    {"repeat_penalty": 1.3, "presence_penalty": 2.0},
    {"presence_penalty": -30.0, "last_n_penalty": 4},
    {"dry_multiplier": 5.0, "dry_allowed_length": 1},
    {"logit_bias": ((11, 30.0), (12, False), (5, -4.0))},
    {"temp": 0.0, "repeat_penalty": 3.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.5, "typ_p": 0.9},
]


@pytest.mark.parametrize("fields", SHORT, ids=str)
def test_a_chain_draws_from_the_short_list_what_it_draws_from_all(
    vocab: Vocab, fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{"seed": 4, **fields})
    sampler = LlamaSampler(vocab, Prototypes(), params, PROMPT, (), 256)
    ids = sampler.short_list(_spoken(vocab, 0))
    sampler.close()
    assert ids is not None and len(ids) < 2000, "it is short"
    assert drawn(LlamaSampler, vocab, params) == drawn(Whole, vocab, params)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 0},
        {"top_n_sigma": 2.0},
        {"samplers": ("min-p", "top-k")},
        {"samplers": ("temperature", "top-k")},
        {"mirostat": 2, "samplers": ("temperature",)},
        {"repeat_penalty": 1.3, "last_n_penalty": -1, "logit_bias": ((1, 1.0),) * 1},
    ],
    ids=str,
)
def test_where_a_chain_looks_at_all_tokens_together_there_is_no_short_list(
    vocab: Vocab, fields: dict[str, Any]
) -> None:
    sampler = LlamaSampler(vocab, Prototypes(), SamplingParams(**fields), PROMPT, (), 4096)
    assert sampler.short_list(_spoken(vocab, 0)) is None
    sampler.close()


@pytest.mark.parametrize("size", [259, 49_152])
def test_probabilities_before_sampling_are_the_models_own(size: int) -> None:
    row = row_of(size, 3)
    exact = np.exp(row.astype(np.float64) - row.max())
    exact /= exact.sum()
    order = list(np.argsort(-row)[:5])
    told = probs_before_sampling(row, 17, 5)
    assert told.token == 17 and told.value == pytest.approx(math.log(exact[17]), abs=1e-4)
    assert [token for token, _ in told.top] == order
    assert [math.exp(v) for _, v in told.top] == pytest.approx(exact[order], rel=1e-4)


def test_a_token_that_cannot_be_has_the_lowest_logarithm() -> None:
    row = row_of(259, 3)
    row[17] = -np.inf
    assert probs_before_sampling(row, 17, 1).value == np.finfo(np.float32).min


@pytest.mark.parametrize("fields", SHORT, ids=str)
def test_what_is_told_changes_nothing_that_is_drawn(vocab: Vocab, fields: dict[str, Any]) -> None:
    for told in ({"n_probs": 3}, {"n_probs": 3, "post_sampling_probs": True}):
        params = SamplingParams(**{"seed": 4, **fields})
        plain = drawn(LlamaSampler, vocab, params, 10)
        assert (
            drawn(LlamaSampler, vocab, SamplingParams(**{"seed": 4, **fields, **told}), 10) == plain
        )


def test_probabilities_after_sampling_are_those_of_what_is_left(vocab: Vocab) -> None:
    params = SamplingParams(top_k=6, top_p=1.0, min_p=0.0, n_probs=10, post_sampling_probs=True)
    sampler, candidates = (
        LlamaSampler(vocab, Prototypes(), params, (), (), 256),
        Candidates(vocab.size),
    )
    row = _spoken(vocab, 0)
    token = candidates.sample(sampler, row.copy(), 0)
    kept = np.argsort(-row)[:6]
    exact = np.exp((row[kept] - row.max()) / 0.8)
    exact /= exact.sum()
    assert sampler.probs is not None and sampler.probs.token == token
    assert [i for i, _ in sampler.probs.top] == list(kept), "what has no chance is not told"
    assert [p for _, p in sampler.probs.top] == pytest.approx(exact, rel=1e-4)
    assert sampler.probs.value == dict(sampler.probs.top)[token]
    sampler.close()


@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_a_greedy_token_is_certain_after_sampling(vocab: Vocab, penalty: float) -> None:
    params = SamplingParams(temp=0.0, n_probs=4, post_sampling_probs=True, repeat_penalty=penalty)
    sampler = LlamaSampler(vocab, Prototypes(), params, PROMPT, (), 256)
    token = Candidates(vocab.size).sample(sampler, _spoken(vocab, 0), 0)
    assert sampler.probs is not None
    assert (sampler.probs.value, sampler.probs.top) == (1.0, [(token, 1.0)])
    sampler.close()
