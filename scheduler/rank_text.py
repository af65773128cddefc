"""The tokens of the text by which a reranking model scores a document for a query: pure functions.

Query and document are plain text: names of special tokens in them do not become these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..backends.embedder import DOCUMENT, QUERY, RankPart
from ..backends.errors import PromptTooLong
from .prefix import common_prefix

Tokenize = Callable[[bytes], list[int]]


class RankTokens(NamedTuple):
    """The tokens of a query with a document. The first *shared* ones depend on the query alone.
    The end of a *truncated* document is left out.
    """

    tokens: list[int]
    shared: int
    truncated: bool = False


def rank_tokens(
    parts: Sequence[RankPart], query: bytes, document: bytes, tokenize: Tokenize, tokens_max: int
) -> RankTokens:
    """Return the tokens of a query with a document. With *tokens_max*, which is not 0, the document
    is truncated to fit.

    :raises PromptTooLong: not even one token of the document would fit.
    """
    values = {QUERY: query, DOCUMENT: document}

    def tokens_of(texts: Sequence[bytes]) -> list[int]:
        text = b"".join(values.get(part, part) for part in texts)
        return tokenize(text) if text else []

    found = [list(part.tokens) or tokens_of(part.texts) for part in parts]
    size = sum(map(len, found))
    at = next(i for i, part in enumerate(parts) if DOCUMENT in part.texts)
    before = sum(map(len, found[:at]))
    head, tail = _around_document(parts[at].texts)
    head_tokens = tokens_of(head)
    truncated = 0 < tokens_max < size
    if truncated:
        tail_tokens = tokens_of(tail)
        most = tokens_max - (size - len(found[at])) - len(tail_tokens)
        if most <= len(head_tokens) or any(DOCUMENT in part.texts for part in parts[at + 1 :]):
            raise PromptTooLong(
                f"the query takes {before + len(head_tokens)} of the {tokens_max} tokens that the"
                " model reads at once, and leaves too few for a document",
                hint="shorten the query",
                data={"prompt_tokens": size, "ctx_size": tokens_max},
            )
        found[at] = tokens_of((*head, DOCUMENT))[:most] + tail_tokens
    shared = before + common_prefix(head_tokens, found[at])
    return RankTokens([token for part in found for token in part], shared, truncated)


def _around_document(texts: tuple[bytes, ...]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the texts before and after the first document."""
    at = texts.index(DOCUMENT)
    return texts[:at], texts[at + 1 :]
