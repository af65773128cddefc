"""Several answers to one prompt, at the client's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from ....backends.errors import InferdError, error_from_wire
from ... import messages as w
from .texts import Reply

if TYPE_CHECKING:
    from ..sessions.session import AsyncSession

__all__ = ("Answer", "ContextsCallback", "ask")

ContextsCallback = Callable[[list[int]], None]
"""Called with the contexts of the answers, in their order, once the first has begun."""


class Answer(Reply):
    """One answer: its text, as far as it got, its `metadata`, and its `error` if it failed."""

    __slots__ = ("error",)
    error: InferdError | None

    def __new__(
        cls,
        text: str,
        metadata: dict[str, Any],
        reasoning: str = "",
        error: InferdError | None = None,
    ) -> Self:
        """Make an answer of *text*."""
        self = super().__new__(cls, text, metadata, reasoning)
        self.error = error
        return self

    def __getnewargs__(self) -> tuple[str, dict[str, Any], str, InferdError | None]:  # type: ignore[override]
        return str(self), self.metadata, self.reasoning, self.error


async def ask(
    session: AsyncSession,
    n: int,
    fields: dict[str, Any],
    timeout: float | None,
    on_contexts: ContextsCallback | None,
) -> list[Answer]:
    """Do the call `answers` on a session, with the *fields* of any turn."""
    params = w.AnswersParams(context=session.context, n=n, **fields)
    result = await session.client.call(
        "answers", params, w.AnswersResult, timeout,
        on_event=_contexts(on_contexts), on_start=session.took_turn,
    )  # fmt: skip
    return [_answer(found) for found in result.answers]


def _contexts(told: ContextsCallback | None) -> Callable[[dict[str, Any]], None]:
    return lambda event: None if told is None else told(list(event.get("contexts", ())))


def _answer(found: dict[str, Any]) -> Answer:
    text, reasoning = (_text(found.get(key, b"")) for key in ("text", "reasoning"))
    error = found.get("error")
    return Answer(text, found.get("metadata", {}), reasoning, error and error_from_wire(error))


def _text(data: bytes) -> str:
    return bytes(data).decode(errors="replace")
