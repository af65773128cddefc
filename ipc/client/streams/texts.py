"""Texts with further values: pieces of an answer, whole answers, rendered prompts."""

from __future__ import annotations

from typing import Any, Self

from ...messages import TurnResult


class Piece(str):
    """A piece of an answer, with the new part of its `reasoning`.

    Only the parameter `reasoning-format` makes `reasoning` non-empty; the text may then be empty.
    """

    __slots__ = ("reasoning",)
    reasoning: str

    def __new__(cls, text: str, reasoning: str = "") -> Self:
        """Make a piece from *text*."""
        self = super().__new__(cls, text)
        self.reasoning = reasoning
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.reasoning


class Reply(str):
    """A turn's whole text, with its `metadata` and its `reasoning`."""

    __slots__ = ("metadata", "reasoning")
    metadata: dict[str, Any]
    reasoning: str

    def __new__(cls, text: str, metadata: dict[str, Any], reasoning: str = "") -> Self:
        """Make a reply from *text*."""
        self = super().__new__(cls, text)
        self.metadata, self.reasoning = metadata, reasoning
        return self

    def __getnewargs__(self) -> tuple[str, dict[str, Any], str]:  # type: ignore[override]
        return str(self), self.metadata, self.reasoning


class Rendered(str):
    """The prompt that a chat template made, with its number of `tokens`."""

    __slots__ = ("tokens",)
    tokens: int

    def __new__(cls, text: str, tokens: int) -> Self:
        """Make a prompt from *text*."""
        self = super().__new__(cls, text)
        self.tokens = tokens
        return self

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return str(self), self.tokens


def reply_of(result: TurnResult) -> Reply:
    """Return the reply in a whole turn's result."""
    text, reasoning = (part.decode(errors="replace") for part in (result.text, result.reasoning))
    return Reply(text, result.metadata, reasoning)
