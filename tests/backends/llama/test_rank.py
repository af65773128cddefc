"""The prompts of reranking models, and prefixes in the embedding context of a causal one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from inferd.backends import Chunk, LanguageModel, load_model
from inferd.backends.embedder import DOCUMENT, QUERY, RankPart
from inferd.backends.errors import BackendError
from inferd.backends.llama.text.rank_parts import separated_parts, template_parts
from inferd.scheduler.rank_text import RankTokens, rank_tokens
from tests.backends.tiny import tiny_spec
from tests.tiny_gguf import RANK_MARKS, RANK_TEMPLATE, write_tiny

CTX_SIZE = 512
EQUAL = 1e-5


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    path = write_tiny("qwen3-rank", tmp_path_factory.mktemp("models"))
    with closing(load_model(tiny_spec(path, ctx_size=CTX_SIZE), lambda _: True)) as model:
        assert isinstance(model, LanguageModel)
        yield model


def ranked(model: LanguageModel, query: str, document: str) -> RankTokens:
    assert model.info.embedding is not None
    tokenize = partial(model.tokenize, special=False, bos=False)
    parts = model.info.embedding.rank_parts
    return rank_tokens(parts, query.encode(), document.encode(), tokenize, 0)


def score(
    model: LanguageModel, tokens: Sequence[int], *, place: int = -1, copied: int = 0, slot: int = 0
) -> float:
    """Return the score of *tokens*, of which the first *copied* come from the prefix at *place*."""
    embedder = model.embedder()
    embedder.start_text(slot, "rank")
    if copied:
        embedder.copy_prefix(place, slot, copied)
    for at in range(copied, len(tokens), 64):
        embedder.step([Chunk(slot, tokens[at : at + 64], at, logits=False)])
    return float(struct.unpack_from("<f", embedder.take_embedding(slot, -1))[0])


def test_a_prompt_without_template_has_the_tokens_of_the_flags() -> None:
    query, document = RankPart(texts=(QUERY,)), RankPart(texts=(DOCUMENT,))
    assert separated_parts(bos=[1], eos=[2], sep=[3]) == (
        RankPart(tokens=(1,)),
        query,
        RankPart(tokens=(2, 3)),
        document,
        RankPart(tokens=(2,)),
    )
    assert separated_parts(bos=[], eos=[], sep=[]) == (query, document)
    assert separated_parts(bos=[-1], eos=[-1], sep=[-1]) == (query, document)


def test_a_template_is_cut_at_its_control_tokens_the_longest_first() -> None:
    template = b"<|a|>q {query}<|a|><|a|>>{document} end"
    assert template_parts(template, {b"<|a|>": 7, b"<|a|>>": 8}) == (
        RankPart(tokens=(7,)),
        RankPart(texts=(b"q ", QUERY)),
        RankPart(tokens=(7,)),
        RankPart(tokens=(8,)),
        RankPart(texts=(DOCUMENT, b" end")),
    )
    assert template_parts(b"{document}{query}", {}) == (RankPart(texts=(DOCUMENT, QUERY)),)


def test_the_tokens_are_those_of_the_whole_text(reranker: LanguageModel) -> None:
    query, document = "what is a tree", "a plant with a trunk"
    text = RANK_TEMPLATE.replace("{query}", query).replace("{document}", document)

    found = ranked(reranker, query, document)

    assert found.tokens == reranker.tokenize(text.encode(), special=True, bos=False)
    alone = reranker.tokenize(document.encode(), special=False, bos=False)
    assert found.tokens[found.shared] != alone[0], "the space before it is a part of the token"


def test_query_and_document_cannot_add_special_tokens(reranker: LanguageModel) -> None:
    marks = "".join(RANK_MARKS)
    found = ranked(reranker, f"a {marks}", f"b {marks} {{query}} {{document}}")

    control = [token for token in found.tokens if reranker.is_control(token)]
    assert control == [t for t in ranked(reranker, "a", "b").tokens if reranker.is_control(t)]
    text = b"".join(map(reranker.piece, found.tokens)).decode()
    assert text.count(f"b {marks} {{query}} {{document}}") == 1


def test_a_text_that_begins_with_a_prefix_has_the_score_of_the_whole(
    reranker: LanguageModel,
) -> None:
    texts = [ranked(reranker, "what is a tree", f"document {n} " + "of words " * n) for n in (1, 9)]
    expected = [score(reranker, text.tokens) for text in texts]
    assert abs(expected[0] - expected[1]) > 100 * EQUAL
    embedder, shared = reranker.embedder(), texts[0].shared
    embedder.start_text(3, "rank")
    for at in range(0, shared, 64):
        embedder.step([Chunk(3, texts[0].tokens[at : min(at + 64, shared)], at, logits=False)])
    embedder.keep_prefix(2, 3, shared)
    embedder.clear_slot(3)

    for text, number in zip(texts, expected, strict=True):
        found = [
            score(reranker, text.tokens, place=2, copied=copied, slot=slot)
            for copied, slot in ((shared, 0), (shared, 5), (shared - 3, 1))
        ]
        assert found == pytest.approx([number] * 3, abs=EQUAL)
    embedder.clear_prefix(2)


def test_a_lost_prefix_would_change_the_score(reranker: LanguageModel) -> None:
    text = ranked(reranker, "what is a tree", "a plant")
    other = ranked(reranker, "WHO ARE YOU", "a plant")
    assert abs(score(reranker, text.tokens) - score(reranker, other.tokens)) > 100 * EQUAL


def test_a_prefix_that_is_not_there_is_refused(reranker: LanguageModel) -> None:
    embedder = reranker.embedder()
    embedder.start_text(0, "rank")
    embedder.step([Chunk(0, [5] * 8, 0, logits=False)])
    for place, tokens in ((embedder.info.prefixes, 4), (-1, 4), (0, 9), (0, 0)):
        with pytest.raises(BackendError):
            embedder.keep_prefix(place, 0, tokens)
    embedder.keep_prefix(0, 0, 8)
    embedder.start_text(1, "rank")
    for place, tokens in ((0, 9), (1, 1), (0, 0)):
        with pytest.raises(BackendError):
            embedder.copy_prefix(place, 1, tokens)
    with pytest.raises(BackendError):
        embedder.copy_prefix(0, 0, 8)  # something was computed in this slot
    embedder.clear_slot(0)
    most = CTX_SIZE - 8
    for at in range(0, most, 64):
        embedder.step([Chunk(1, [5] * min(64, most - at), at, logits=False)])
    with pytest.raises(BackendError, match="513 tokens in all slots"):
        embedder.step([Chunk(1, [5], most, logits=False)])
    embedder.clear_prefix(0)
    embedder.step([Chunk(1, [5], most, logits=False)])
    embedder.clear_slot(1)


@pytest.mark.parametrize("kind", ["llama", "bert-rank", "mamba", "gemma3"])
def test_other_models_keep_no_prefixes(kind: str, tmp_path: Path) -> None:
    path = write_tiny(kind, tmp_path)
    with closing(load_model(tiny_spec(path, ctx_size=CTX_SIZE), lambda _: True)) as model:
        assert isinstance(model, LanguageModel) and model.info.embedding is not None
        assert model.info.embedding.prefixes == 0
        assert bool(model.info.embedding.rank_parts) == (kind == "bert-rank")
        assert not model.info.embedding.rank_is_probability
