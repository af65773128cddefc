"""A chain samples the same token from the short list of logits as from all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferd.backends import SamplingParams
from inferd.backends.llama.sampling.chain import (
    CANDIDATES_MAX,
    COLUMNS,
    Candidates,
    LlamaSampler,
    Prototypes,
    probs_before_sampling,
    top_candidates,
)
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.walking import vocabulary
from tests.models import smollm2

Logits = NDArray[np.float32]
SIZES = (4 * COLUMNS, 49_152, 262_144, 262_144 + 77)
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


def random_logits(size: int, seed: int, scale: float = 3.0) -> Logits:
    numbers = np.random.default_rng(seed).standard_normal(size) * scale
    return numbers.astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 40, 150, CANDIDATES_MAX])
def test_the_short_list_contains_the_top_tokens(size: int, count: int) -> None:
    for seed in range(5):
        logits = random_logits(size, seed)
        found = top_candidates(logits, count)
        assert found is not None and list(found) == sorted(set(found))
        assert set(np.argsort(-logits)[:count]) <= set(found)
        assert len(found) <= 2 * count + 20


def test_the_short_list_contains_all_tokens_at_the_bound() -> None:
    logits = np.zeros(SIZES[-1], np.float32)
    logits[::1000] = 1.0
    found = top_candidates(logits, 40)
    assert found is not None and list(found) == list(range(0, SIZES[-1], 1000))


@pytest.mark.parametrize(
    "logits", [np.zeros(49_152), np.full(49_152, -np.inf), np.full(49_152, np.nan)]
)
def test_logits_without_a_few_top_tokens_have_no_short_list(logits: Logits) -> None:
    assert top_candidates(logits.astype(np.float32), 40) is None


def test_a_short_list_has_a_bound_and_small_vocabularies_have_none() -> None:
    assert top_candidates(random_logits(49_152, 1), CANDIDATES_MAX + 1) is None
    assert top_candidates(random_logits(4 * COLUMNS - 1, 1), 1) is None
    assert top_candidates(random_logits(49_152, 1), 0) is None


class Whole(LlamaSampler):
    """A sampler without a short list."""

    def short_list(self, logits: Logits) -> None:
        """Return None."""


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with vocabulary(smollm2()) as vocab:
        yield vocab


def sampled(
    kind: type[LlamaSampler], vocab: Vocab, params: SamplingParams, count: int = 30
) -> list[int]:
    sampler, candidates = kind(vocab, Prototypes(), params, PROMPT, (), 256), Candidates(vocab.size)
    tokens = []
    for index in range(count):
        token = candidates.sample(sampler, _peaked_logits(vocab, index), index)
        assert token is not None
        tokens.append(token)
    sampler.close()
    return tokens


def _peaked_logits(vocab: Vocab, index: int) -> Logits:
    """Return logits with a few peaks, among them those of the prompt's tokens."""
    logits = random_logits(vocab.size, index, 2.0)
    logits[PROMPT] += 9.0
    return logits


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


@pytest.mark.process
@pytest.mark.parametrize("fields", SHORT, ids=str)
def test_a_chain_samples_the_same_from_the_short_list_as_from_all_tokens(
    vocab: Vocab, fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{"seed": 4, **fields})
    sampler = LlamaSampler(vocab, Prototypes(), params, PROMPT, (), 256)
    ids = sampler.short_list(_peaked_logits(vocab, 0))
    sampler.close()
    assert ids is not None and len(ids) < 2000, "the list is short"
    assert sampled(LlamaSampler, vocab, params) == sampled(Whole, vocab, params)


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
def test_a_chain_that_compares_all_tokens_has_no_short_list(
    vocab: Vocab, fields: dict[str, Any]
) -> None:
    sampler = LlamaSampler(vocab, Prototypes(), SamplingParams(**fields), PROMPT, (), 4096)
    assert sampler.short_list(_peaked_logits(vocab, 0)) is None
    sampler.close()


@pytest.mark.process
@pytest.mark.parametrize("size", [259, 49_152])
def test_probabilities_before_sampling_are_the_models_own(size: int) -> None:
    logits = random_logits(size, 3)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()
    order = list(np.argsort(-logits)[:5])
    reported = probs_before_sampling(logits, 17, 5)
    assert reported.token == 17 and reported.value == pytest.approx(math.log(exact[17]), abs=1e-4)
    assert [token for token, _ in reported.top] == order
    assert [math.exp(v) for _, v in reported.top] == pytest.approx(exact[order], rel=1e-4)
    assert not reported.rank
    rank = 1 + np.count_nonzero(exact > exact[17])
    assert probs_before_sampling(logits, 17, 5, ranked=True).rank == rank


def test_an_impossible_token_has_the_lowest_logprob() -> None:
    logits = random_logits(259, 3)
    logits[17] = -np.inf
    assert probs_before_sampling(logits, 17, 1).value == np.finfo(np.float32).min


@pytest.mark.parametrize("fields", SHORT, ids=str)
def test_reported_probabilities_do_not_change_the_sampled_tokens(
    vocab: Vocab, fields: dict[str, Any]
) -> None:
    for reported in ({"n_probs": 3}, {"n_probs": 3, "post_sampling_probs": True}):
        params = SamplingParams(**{"seed": 4, **fields})
        plain = sampled(LlamaSampler, vocab, params, 10)
        assert (
            sampled(LlamaSampler, vocab, SamplingParams(**{"seed": 4, **fields, **reported}), 10)
            == plain
        )


def test_probabilities_after_sampling_are_those_of_the_remaining_candidates(vocab: Vocab) -> None:
    params = SamplingParams(top_k=6, top_p=1.0, min_p=0.0, n_probs=10, post_sampling_probs=True)
    sampler, candidates = (
        LlamaSampler(vocab, Prototypes(), params, (), (), 256),
        Candidates(vocab.size),
    )
    logits = _peaked_logits(vocab, 0)
    token = candidates.sample(sampler, logits.copy(), 0)
    kept = np.argsort(-logits)[:6]
    exact = np.exp((logits[kept] - logits.max()) / 0.8)
    exact /= exact.sum()
    assert sampler.probs is not None and sampler.probs.token == token
    assert [i for i, _ in sampler.probs.top] == list(kept), (
        "tokens without a probability are left out"
    )
    assert [p for _, p in sampler.probs.top] == pytest.approx(exact, rel=1e-4)
    assert sampler.probs.value == dict(sampler.probs.top)[token]
    sampler.close()


@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_a_greedy_token_is_certain_after_sampling(vocab: Vocab, penalty: float) -> None:
    params = SamplingParams(temp=0.0, n_probs=4, post_sampling_probs=True, repeat_penalty=penalty)
    sampler = LlamaSampler(vocab, Prototypes(), params, PROMPT, (), 256)
    token = Candidates(vocab.size).sample(sampler, _peaked_logits(vocab, 0), 0)
    assert sampler.probs is not None
    assert (sampler.probs.value, sampler.probs.top) == (1.0, [(token, 1.0)])
    sampler.close()
