"""Samplers that keep the top token have an effect if another sampler follows them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.grammars.compiler import GrammarState
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.tiny_gguf import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    model = load_llama(ModelSpec(name="tiny", path=str(path), ctx_size=256), lambda _: True)
    yield model
    model.close()


@pytest.mark.process
@pytest.mark.parametrize(
    "cut", [SamplingParams(top_k=2, min_p=0), SamplingParams(top_k=0, min_p=1)], ids=("k", "p")
)
def test_a_sampler_before_the_penalties_limits_their_candidates(
    tiny: LlamaModel, cut: SamplingParams
) -> None:
    """The two top tokens are penalised, and still no token is sampled that was cut away."""
    tiny.trim(0, 0)
    prefill(tiny, 0, [1, 10, 11])
    logits = tiny.take_logits(0)
    assert isinstance(logits, np.ndarray)
    first, second, third = (int(t) for t in logits.argsort()[::-1][:3])
    tokens = []
    for samplers in (("top-k", "min-p", "penalties"), ("penalties", "top-k", "min-p")):
        params = msgspec.structs.replace(cut, temp=0, samplers=samplers, presence_penalty=100.0)
        sampler = tiny.sampler(params, [first, second])
        tiny.put_logits(0, logits)
        tokens.append(tiny.sample(0, sampler, 0))
        sampler.close()
    assert tokens == [first, third]


LETTERS = SamplingParams(temp=0, grammar="root ::= [a-y]+")


@pytest.mark.process
@pytest.mark.parametrize("seed", range(5))
def test_a_greedy_turn_gets_the_top_token_that_its_grammar_allows(
    tiny: LlamaModel, seed: int
) -> None:
    """Among the top tokens, or far behind them; and never one that a bias suppresses."""
    prefill_anew(tiny)
    source = np.random.default_rng(seed)
    logits = source.normal(size=tiny.info.vocab_size).astype(np.float32)
    state = tiny.compile_grammar(LETTERS, 1)
    assert isinstance(state, GrammarState)
    allowed = state.allowed()
    allowed = allowed[np.argsort(-logits[allowed])]
    for behind in (0, 3, 100):  # refused tokens in front of the allowed ones
        others = np.setdiff1d(np.arange(len(logits)), allowed)
        logits[others[:behind]] = 10 + np.arange(behind, dtype=np.float32)
        logits[others[behind:]] = -10
        assert sampled(tiny, LETTERS, logits) == allowed[0]
        without = msgspec.structs.replace(LETTERS, logit_bias=((int(allowed[0]), False),))
        assert sampled(tiny, without, logits) == allowed[1]
    never = tuple((int(token), False) for token in allowed)
    none = msgspec.structs.replace(LETTERS, logit_bias=never)
    assert tiny.is_eog(sampled(tiny, none, logits)), "the answer ends"


def prefill_anew(model: LlamaModel) -> None:
    model.trim(0, 0)
    prefill(model, 0, [1, 10, 11])


def sampled(model: LlamaModel, params: SamplingParams, logits: object) -> int:
    sampler = model.sampler(params, [])
    assert isinstance(logits, np.ndarray)
    model.put_logits(0, logits.copy())
    token = model.sample(0, sampler, 0)
    sampler.close()
    return token
