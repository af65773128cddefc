"""Several answers to one prompt, at the client's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from ....backends.errors import InferdError, error_from_wire
from ...messages import AnswersResult
from .texts import Reply

ContextsCallback = Callable[[list[int]], None]
"""Called with the contexts of the answers, in order, when the first answer has begun."""


class Answer(Reply):
    """One answer: its text so far, its `metadata`, and its `error` if it failed."""

    __slots__ = ("error",)
    error: InferdError | None

    def __new__(
        cls,
        text: str,
        metadata: dict[str, Any],
        reasoning: str = "",
        error: InferdError | None = None,
    ) -> Self:
        """Make an answer from *text*."""
        self = super().__new__(cls, text, metadata, reasoning)
        self.error = error
        return self

    def __getnewargs__(self) -> tuple[str, dict[str, Any], str, InferdError | None]:  # type: ignore[override]
        return str(self), self.metadata, self.reasoning, self.error


def answers_of(result: AnswersResult) -> list[Answer]:
    """Return the answers of a call's result."""
    return [_answer(found) for found in result.answers]


def context_events(on_contexts: ContextsCallback | None) -> Callable[[dict[str, Any]], None]:
    """Return a function that passes a call's events to *on_contexts*."""
    return lambda event: on_contexts and on_contexts(list(event.get("contexts", ())))


def _answer(found: dict[str, Any]) -> Answer:
    text, reasoning = (_text(found.get(key, b"")) for key in ("text", "reasoning"))
    error = found.get("error")
    return Answer(text, found.get("metadata", {}), reasoning, error and error_from_wire(error))


def _text(data: bytes) -> str:
    return bytes(data).decode(errors="replace")
