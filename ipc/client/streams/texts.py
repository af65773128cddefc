"""Texts with further values: pieces of an answer, whole answers, rendered prompts."""

from __future__ import annotations

from typing import Any, Self, cast

from ....backends.errors import InferdError, error_from_wire
from ...messages import AnswersResult, TurnResult
from ..results import Metadata


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


class Reply(str):
    """A turn's whole text, with its `metadata` and its `reasoning`."""

    __slots__ = ("metadata", "reasoning")
    metadata: Metadata
    reasoning: str

    def __new__(cls, text: str, metadata: Metadata | None = None, reasoning: str = "") -> Self:
        """Make a reply from *text*."""
        self = super().__new__(cls, text)
        self.metadata, self.reasoning = metadata or {}, reasoning
        return self


class Answer(Reply):
    """One of several answers: its text so far, its `metadata`, and its `error` if it failed."""

    error: InferdError | None = None


class Rendered(str):
    """The prompt that a chat template made, with its number of `tokens`."""

    __slots__ = ("tokens",)
    tokens: int

    def __new__(cls, text: str, tokens: int = 0) -> Self:
        """Make a prompt from *text*."""
        self = super().__new__(cls, text)
        self.tokens = tokens
        return self


def reply_of(result: TurnResult) -> Reply:
    """Return the reply in a whole turn's result."""
    metadata = cast("Metadata", result.metadata)
    return Reply(_decode(result.text), metadata, _decode(result.reasoning))


def answers_of(result: AnswersResult) -> list[Answer]:
    """Return the answers in the result of `answers`."""
    return [_answer_of(fields) for fields in result.answers]


def _answer_of(fields: dict[str, Any]) -> Answer:
    text, reasoning = (_decode(fields.get(key, b"")) for key in ("text", "reasoning"))
    answer = Answer(text, fields.get("metadata"), reasoning)
    error = fields.get("error")
    answer.error = error and error_from_wire(error)
    return answer


def _decode(data: bytes) -> str:
    return bytes(data).decode(errors="replace")
