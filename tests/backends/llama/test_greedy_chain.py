"""Samplers that keep the top token have an effect if another sampler follows them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from inferd.backends import ModelSpec, SamplingParams
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
