"""Messages of calls on texts without a session: embeddings, tokens, chat templates."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .base import Map, ScheduledParams
from .graphs import GraphParams

EMBED_TEXTS_MAX = 256
"""The largest number of texts in one `embed`."""
DETOKENIZE_TOKENS_MAX = 1 << 16
"""The largest number of tokens in one `detokenize`: their text fits into a reply."""


class EmbedParams(ScheduledParams):
    """`embed`. `pooling` is none, mean, cls, last or rank, or empty for the model's own.

    `normalize` is -1 for none, 0 to scale the largest number to 32760, 1 taxicab, 2 euclidean, p
    for the p-norm.
    """

    graph: int
    texts: list[str]
    pooling: str = ""
    normalize: int = 2


class EmbedResult(Map):
    """The vectors and number of tokens of each text. A vector is `size` float32, little-endian.

    With the `pooling` none, a text has one vector per token.
    """

    embeddings: list[bytes]
    size: int
    pooling: str
    tokens: list[int] = []
    model: str = ""
    fingerprint: str = ""


class TokenizeParams(GraphParams):
    """`tokenize`; with `special`, names of special tokens in the text become those tokens."""

    text: str
    special: bool = False
    bos: bool = False


class TokensResult(Map):
    """Token ids."""

    tokens: list[int]


class DetokenizeParams(GraphParams):
    """`detokenize`: return the bytes of token ids."""

    tokens: Annotated[list[int], msgspec.Meta(max_length=DETOKENIZE_TOKENS_MAX)]


class TextResult(Map):
    """Bytes of a text."""

    text: bytes


class TemplateParams(GraphParams):
    """`apply_template` to messages and `tools`; the template's variables also get `arguments`.

    With `add_generation_prompt` the prompt ends where an answer begins.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    add_generation_prompt: bool = True


class TemplateResult(Map):
    """The prompt, and its number of tokens."""

    text: bytes
    tokens: int = 0
