"""A model with a learned embedding of each position is never given a token past the last one, for
which llama.cpp would abort the process.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from inferd.backends import Chunk, ModelSpec, estimate_memory
from inferd.backends.errors import InferdError
from inferd.backends.llama.loading.loader import load_llama
from tests.backends.driving import prefill
from tests.backends.test_embedding_contract import embed
from tests.backends.tiny import Bare, difference, from_scratch, tiny_spec, tokens_of
from tests.tiny_gguf import POSITIONS, write_tiny


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return tiny_spec(write_tiny("gpt2", tmp_path), ctx_size=1024)


def test_a_context_has_at_most_the_positions_of_the_model(spec: ModelSpec) -> None:
    tokens = tokens_of(1, POSITIONS)
    with closing(load_llama(spec, lambda _: True)) as model:
        assert model.info.ctx_size == POSITIONS
        assert prefill(model, 0, tokens) == POSITIONS
        with pytest.raises((AssertionError, InferdError)):
            model.step([Chunk(0, [9], POSITIONS, logits=True)])
        found = from_scratch(model, tokens)
    bare = Bare(Path(spec.path), ctx_size=512)
    assert difference(bare.decode(0, tokens), found) < 1e-3
    bare.close()


def test_a_text_to_embed_has_at_most_the_positions_of_the_model(spec: ModelSpec) -> None:
    with closing(load_llama(spec, lambda _: True)) as model:
        embedder = model.embedder()
        assert embedder.info.tokens_max == POSITIONS
        assert len(embed(embedder, tokens_of(2, POSITIONS))) == embedder.info.size


def test_the_estimate_has_that_context(spec: ModelSpec) -> None:
    with closing(estimate_memory(spec)) as estimator:
        assert estimator.shape.ctx_size == POSITIONS
        assert estimator.need(estimator.shape).context > 0


def test_a_smaller_context_stays_as_it_is(tmp_path: Path) -> None:
    spec = tiny_spec(write_tiny("gpt2", tmp_path), ctx_size=200)
    with closing(load_llama(spec, lambda _: True)) as model:
        assert model.info.ctx_size == 256, "as llama.cpp rounds it"
