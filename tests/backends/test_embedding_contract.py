"""The contract of embeddings: the suite that each backend passes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from inferd.backends import Chunk, InferdError, LanguageModel
from inferd.backends.embedder import Embedder
from inferd.backends.errors import UnsupportedOperation
from tests.backends.driving import GREEDY, generate, prefill, sample_tokens

TEXT = "The capital of France is Paris. The capital of Italy is Rome."
OTHER = "One, two, three, four, five, six, seven, eight."
NOISE_MAX = 5e-3
"""Difference in a number of a unit vector between shapes of batches (SmolLM2)."""
REFUSED = (AssertionError, InferdError)


@pytest.fixture
def embedder(model: LanguageModel) -> Embedder:
    found = model.embedder()
    for slot in range(found.info.slots):
        found.clear_slot(slot)
    return found


def tokens_of(model: LanguageModel, text: str) -> list[int]:
    return model.tokenize(text.encode(), special=True, bos=True)


def numbers(data: bytes) -> list[float]:
    found = array("f")
    found.frombytes(data)
    return found.tolist()


def embed(
    embedder: Embedder,
    tokens: Sequence[int],
    pooling: str = "mean",
    normalize: int = 2,
    *,
    slot: int = 0,
    sizes: Sequence[int] = (),
) -> list[float]:
    """Embed *tokens* in chunks of *sizes*, then in chunks of the largest size."""
    embedder.start_text(slot, pooling)
    position = 0
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    most = embedder.info.batch_tokens_max
    for end in (*ends, *range(position + most + sum(sizes), len(tokens), most), len(tokens)):
        part = tokens[position:end]
        if part:
            embedder.step([Chunk(slot, part, position, logits=False)])
            position = end
    return numbers(embedder.take_embedding(slot, normalize))


def far(a: Sequence[float], b: Sequence[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_the_facts_are_true(model: LanguageModel, embedder: Embedder) -> None:
    info = model.info.embedding
    assert info is not None and embedder.info == info
    assert info.tokens_max == model.info.ctx_size
    assert info.slots > 1 and 1 < info.batch_tokens_max <= info.tokens_max
    assert not info.whole
    assert len(embed(embedder, tokens_of(model, TEXT))) == info.size
    assert model.embedder() is embedder, "it is created once"


def test_a_text_has_the_same_vector_each_time_and_in_each_slot(
    model: LanguageModel, embedder: Embedder
) -> None:
    tokens = tokens_of(model, TEXT)
    first = embed(embedder, tokens)
    assert embed(embedder, tokens) == first
    assert embed(embedder, tokens, slot=embedder.info.slots - 1) == first
    assert embed(embedder, tokens_of(model, OTHER)) != first


def test_chunks_make_no_difference(model: LanguageModel, embedder: Embedder) -> None:
    tokens = tokens_of(model, TEXT)
    for pooling in ("mean", "cls", "last"):
        whole = embed(embedder, tokens, pooling)
        parts = embed(embedder, tokens, pooling, sizes=(1, 3, 5))
        assert far(whole, parts) < NOISE_MAX, pooling


def test_pooled_vectors_come_from_the_vectors_of_the_tokens(
    model: LanguageModel, embedder: Embedder
) -> None:
    tokens, size = tokens_of(model, TEXT), embedder.info.size
    flat = embed(embedder, tokens, "none", sizes=(4,))
    vectors = [flat[i : i + size] for i in range(0, len(flat), size)]
    assert len(vectors) == len(tokens)
    mean = [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]
    for pooling, expected in (("mean", mean), ("cls", vectors[0]), ("last", vectors[-1])):
        found = embed(embedder, tokens, pooling, -1, sizes=(4,))
        assert far(found, expected) < 1e-5 * max(map(abs, expected)), pooling


def test_a_vector_has_the_requested_norm(model: LanguageModel, embedder: Embedder) -> None:
    tokens = tokens_of(model, TEXT)
    euclidean = embed(embedder, tokens, normalize=2)
    assert sum(x * x for x in euclidean) == pytest.approx(1.0, rel=1e-5)
    taxicab = embed(embedder, tokens, normalize=1)
    assert sum(map(abs, taxicab)) == pytest.approx(1.0, rel=1e-5)
    assert max(map(abs, embed(embedder, tokens, normalize=0))) == pytest.approx(32760.0, rel=1e-5)


def test_texts_share_a_batch_and_do_not_see_each_other(
    model: LanguageModel, embedder: Embedder
) -> None:
    texts = [tokens_of(model, text)[:12] for text in (TEXT, OTHER)]
    alone = [embed(embedder, tokens) for tokens in texts]
    for slot in (0, 1):
        embedder.start_text(slot, "mean")
    embedder.step([Chunk(0, texts[0][:7], 0, logits=False)])
    embedder.step(
        [Chunk(0, texts[0][7:], 7, logits=False), Chunk(1, texts[1][:2], 0, logits=False)]
    )
    embedder.step([Chunk(1, texts[1][2:], 2, logits=False)])
    together = [numbers(embedder.take_embedding(slot, 2)) for slot in (0, 1)]
    for one, other in zip(alone, together, strict=True):
        assert far(one, other) < NOISE_MAX
    assert far(alone[0], alone[1]) > 10 * NOISE_MAX, "a mix-up would show"


def test_embeddings_do_not_change_a_generation(model: LanguageModel, embedder: Embedder) -> None:
    for slot in range(model.info.slots):
        model.trim(slot, 0)
    prompt, text = tokens_of(model, TEXT), tokens_of(model, OTHER)
    expected = generate(model, 0, prompt, count=6)
    sampler = model.sampler(GREEDY, prompt)
    position = prefill(model, 1, prompt)
    model.hold_logits(1)
    embed(embedder, text)
    tokens = sample_tokens(model, 1, sampler, position, count=1)
    for index in range(1, 6):
        embed(embedder, text, "last")
        model.step([Chunk(1, tokens[-1:], position + index - 1, logits=True)])
        tokens.append(model.sample(1, sampler, index))
    assert tokens == expected


def test_a_text_may_fill_the_whole_embedding_context(
    model: LanguageModel, embedder: Embedder
) -> None:
    tokens = model.tokenize(b" a" * 400, special=False, bos=False)
    most = embedder.info.tokens_max
    assert len(embed(embedder, tokens[:most])) == embedder.info.size
    with pytest.raises(REFUSED):
        embed(embedder, tokens[: most + 1])


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([], id="no vectors"),
        pytest.param([(1, 0, 2), (0, 0, 2)], id="slots not ascending"),
        pytest.param([(0, 0, 2), (0, 2, 2)], id="a slot twice"),
        pytest.param([(0, 1, 2)], id="a gap in the positions"),
        pytest.param([(2, 0, 2)], id="a slot without a text"),
        pytest.param([(0, 0, 65)], id="a token too many"),
    ],
)
def test_a_wrong_batch_is_refused(
    model: LanguageModel, embedder: Embedder, chunks: list[tuple[int, int, int]]
) -> None:
    tokens = model.tokenize(b" a" * 100, special=False, bos=False)
    for slot in (0, 1):
        embedder.start_text(slot, "mean")
    with pytest.raises(REFUSED):
        embedder.step([Chunk(s, tokens[:n], at, logits=False) for s, at, n in chunks])
    assert embed(embedder, tokens[:4])


def test_a_model_that_does_not_rank_refuses_to(embedder: Embedder) -> None:
    with pytest.raises(UnsupportedOperation, match="rank"):
        embedder.start_text(0, "rank")
