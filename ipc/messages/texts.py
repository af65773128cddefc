"""Messages of calls on texts without a session: embeddings, ranks, tokens, chat templates."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .base import Map, ScheduledParams
from .graphs import GraphParams

EMBED_TEXTS_MAX = 256
"""The largest number of texts in one `embed`."""
RERANK_DOCUMENTS_MAX = 256
"""The largest number of documents in one `rerank`."""
DETOKENIZE_TOKENS_MAX = 1 << 16
"""The largest number of tokens in one `detokenize`: their text fits into a reply."""


class EmbedParams(ScheduledParams):
    """`embed`. `pooling` is none, mean, cls, last or rank, or empty for the model's own.

    `normalize` is -1 for none, 0 to scale the largest number to 32760, 1 taxicab, 2 euclidean, p
    for the p-norm.
    """

    graph: int
    """The handle."""
    texts: list[str]
    """1 to 256."""
    pooling: str = ""
    """`none`, `mean`, `cls`, `last`, `rank`; empty: the model's own, else `mean`."""
    normalize: int = 2
    """-1 none, 0 the largest number is 32760, 1 taxicab, 2 euclidean, 3 to 32 that norm; vectors
    of `none` and `rank` are not normalized.
    """
    truncate: bool = False
    """Leave out the end of a text that is too long, instead of refusing it."""


class EmbedResult(Map):
    """The vectors and number of tokens of each text. A vector is `size` float32, little-endian.

    With the `pooling` none, a text has one vector per token.
    """

    embeddings: list[bytes]
    """One for each text, in their order: a vector of `size` float32, little-endian; with `none`
    one vector for each token.
    """
    size: int
    """Length of a vector."""
    pooling: str
    """The pooling that was used."""
    tokens: list[int] = []
    """Number of tokens of each text."""
    truncated: list[int] = []
    """The indexes of the texts whose end was left out."""
    model: str = ""
    """The model's name."""
    fingerprint: str = ""
    """The model's fingerprint."""


class RerankParams(ScheduledParams):
    """`rerank`: score *documents* for a query by a reranking model."""

    graph: int
    """The handle."""
    query: str
    """The query."""
    documents: list[str]
    """1 to 256."""
    top_n: int = 0
    """Return only this many documents, those with the highest scores; 0: all."""
    truncate: bool = False
    """Leave out the end of a document that is too long, instead of refusing it."""


class RerankResult(Map):
    """The documents by descending score; those with equal scores in the order of the request."""

    indexes: list[int]
    """The places of the documents in the request, from 0, by descending score."""
    scores: list[float]
    """One for each of `indexes`, from 0 to 1: the raw score if the model returns probabilities,
    else its sigmoid.
    """
    raw_scores: list[float]
    """One for each of `indexes`: the model's output."""
    truncated: list[int] = []
    """The indexes of the documents whose end was left out."""
    tokens: int = 0
    """The number of tokens of all documents, each with the query."""
    cached_tokens: int = 0
    """Of these, the tokens of the query that were not computed again for each document."""
    model: str = ""
    """The model's name."""
    fingerprint: str = ""
    """The model's fingerprint."""


class TokenizeParams(GraphParams):
    """`tokenize`; with `special`, names of special tokens in the text become those tokens."""

    text: str
    """The text."""
    special: bool = False
    """Convert names of special tokens to these tokens."""
    bos: bool = False
    """Add the tokens that the model expects at the start of a prompt."""


class TokensResult(Map):
    """Token ids."""

    tokens: list[int]
    """The ids."""


class DetokenizeParams(GraphParams):
    """`detokenize`: return the bytes of token ids."""

    tokens: Annotated[list[int], msgspec.Meta(max_length=DETOKENIZE_TOKENS_MAX)]
    """The ids, at most `DETOKENIZE_TOKENS_MAX`: the text of a list is that of its parts, joined."""
    sizes: bool = False
    """Also return the number of each token's bytes."""


class TextResult(Map):
    """Bytes of a text."""

    text: bytes
    """The bytes; those of a single token may be incomplete characters."""
    sizes: list[int] = []
    """With `sizes`: the number of bytes of each token, in their order."""


class TemplateParams(GraphParams):
    """`apply_template` to messages and `tools`; the template's variables also get `arguments`.

    With `add_generation_prompt` the prompt ends where an answer begins.
    """

    messages: list[dict[str, Any]]
    """As in `stream`."""
    tools: list[dict[str, Any]] = []
    """As the parameter; empty: the graph's."""
    arguments: dict[str, Any] = {}
    """The template's own arguments, as `chat-template-kwargs`; empty: the graph's."""
    add_generation_prompt: bool = True
    """End the prompt where an answer begins."""
    continue_final_message: bool = False
    """End the prompt with the last message, which begins the answer."""


class TemplateResult(Map):
    """The prompt, and its number of tokens."""

    text: bytes
    """The prompt rendered by the model's chat template."""
    tokens: int = 0
    """The prompt's number of tokens."""
