"""The tokens of a query with a document."""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

import pytest

from inferd.backends.embedder import DOCUMENT, QUERY, RankPart
from inferd.backends.errors import PromptTooLong
from inferd.scheduler.rank_text import RankTokens, rank_tokens

BEGIN, END = 1, 2
SEPARATED = (
    RankPart(tokens=(BEGIN,)),
    RankPart(texts=(QUERY,)),
    RankPart(tokens=(END, END)),
    RankPart(texts=(DOCUMENT,)),
    RankPart(tokens=(END,)),
)
TEMPLATE = (
    RankPart(tokens=(BEGIN,)),
    RankPart(texts=(b"Q: ", QUERY, b" D: ", DOCUMENT, b" A:")),
    RankPart(tokens=(END,)),
)
WORD = re.compile(rb" ?[^ ]+| ")


def tokenize(text: bytes) -> list[int]:
    """Return a token for each word, with the space before it, as byte-pair vocabularies do."""
    return [10 + crc32(word) for word in WORD.findall(text)]


def tokens(parts: Sequence[RankPart], query: str, document: str, tokens_max: int = 0) -> RankTokens:
    return rank_tokens(parts, query.encode(), document.encode(), tokenize, tokens_max)


def test_query_and_document_are_separated_by_tokens() -> None:
    found = tokens(SEPARATED, "a query", "some text here")

    query, document = tokenize(b"a query"), tokenize(b"some text here")
    assert found.tokens == [BEGIN, *query, END, END, *document, END]
    assert (found.shared, found.truncated) == (5, False)


def test_the_text_of_a_template_is_tokenized_as_one() -> None:
    found = tokens(TEMPLATE, "a query", "some text")

    assert found.tokens == [BEGIN, *tokenize(b"Q: a query D: some text A:"), END]
    assert found.shared == 1 + len(tokenize(b"Q: a query D:")), "the space is a part of 'some'"


def test_fields_in_query_and_document_are_text() -> None:
    found = tokens(TEMPLATE, "{document}", "{query}")

    assert found.tokens == [BEGIN, *tokenize(b"Q: {document} D: {query} A:"), END]


def test_an_empty_query_or_document_has_no_tokens() -> None:
    assert tokens(SEPARATED, "", "").tokens == [BEGIN, END, END, END]


def test_a_document_is_truncated_to_the_bound_and_not_below_it() -> None:
    document = " ".join(f"w{n}" for n in range(50))
    whole = tokens(TEMPLATE, "a query", document)
    assert tokens(TEMPLATE, "a query", document, len(whole.tokens)) == whole

    cut = tokens(TEMPLATE, "a query", document, len(whole.tokens) - 7)

    assert cut.truncated and len(cut.tokens) == len(whole.tokens) - 7
    assert cut.tokens[-2:] == whole.tokens[-2:], "the text behind the document stays"
    assert cut.tokens[:-2] == whole.tokens[: len(cut.tokens) - 2]
    assert cut.shared == whole.shared


def test_a_query_that_leaves_no_token_for_the_document_is_refused() -> None:
    most = len(tokens(SEPARATED, "a query", "").tokens)
    assert len(tokens(SEPARATED, "a query", "some text", most + 1).tokens) == most + 1

    with pytest.raises(PromptTooLong, match="the query takes 5 of the 6 tokens") as caught:
        tokens(SEPARATED, "a query", "some text", most)
    assert caught.value.data == {"prompt_tokens": most + 2, "ctx_size": most}


def test_a_template_with_two_documents_is_not_truncated() -> None:
    twice = (*SEPARATED, RankPart(texts=(DOCUMENT,)))
    assert not tokens(twice, "a query", "some text").truncated
    with pytest.raises(PromptTooLong):
        tokens(twice, "a query", "some text", 8)
