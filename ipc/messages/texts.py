"""Texts beside any conversation: as tokens, as embeddings, as a template renders them."""

from __future__ import annotations

from typing import Any

from .base import Map, Traceparent

__all__ = (
    "EMBED_TEXTS_MAX",
    "DetokenizeParams",
    "EmbedParams",
    "EmbedResult",
    "TemplateParams",
    "TemplateResult",
    "TextResult",
    "TokenizeParams",
    "TokensResult",
)

EMBED_TEXTS_MAX = 256
"""Texts of one `embed`."""


class EmbedParams(Map):
    """`embed`: the embeddings of texts. `pooling` is none, mean, cls, last or rank, empty for the
    model's own; `normalize` is -1 none, 0 a greatest number of 32760, 1 taxicab, 2 euclidean, p the
    p-norm.
    """

    graph: int
    texts: list[str]
    pooling: str = ""
    normalize: int = 2
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class EmbedResult(Map):
    """One item a text: vectors of `size` float32 each, little-endian, one a token with the
    `pooling` none; `tokens` are those of each text.
    """

    embeddings: list[bytes]
    size: int
    pooling: str
    tokens: list[int] = []
    model: str = ""
    fingerprint: str = ""


class TokenizeParams(Map):
    """`tokenize`: text to token ids; `special` reads special tokens' names as these."""

    graph: int
    text: str
    special: bool = False
    bos: bool = False


class TokensResult(Map):
    """Token ids."""

    tokens: list[int]


class DetokenizeParams(Map):
    """`detokenize`: token ids to bytes."""

    graph: int
    tokens: list[int]


class TextResult(Map):
    """Bytes of a text."""

    text: bytes


class TemplateParams(Map):
    """`apply_template`: the prompt that the chat template makes of messages, told of `tools` and of
    `arguments` of its own; with `add_generation_prompt` it ends where an answer begins.
    """

    graph: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    add_generation_prompt: bool = True


class TemplateResult(Map):
    """The prompt, and how many tokens it has."""

    text: bytes
    tokens: int = 0
