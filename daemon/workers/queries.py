"""What a worker was asked, and who awaits its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from ...backends.errors import InferdError

__all__ = ("Questions",)


class _Question:
    """One whose answer is awaited."""

    def __init__(self, given: bytes) -> None:
        self.given = given
        """What was asked about, if it is of the client's making."""
        self.done = anyio.Event()
        self.value: Any = None
        self.error: InferdError | None = None


class Questions:
    """Those of one worker, by their numbers, which begin at 1. Lives on the daemon's event loop."""

    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}
        self._asked = 0

    def __len__(self) -> int:
        return len(self._open)

    def put(self, given: bytes = b"") -> int:
        """Return the number of a new question."""
        self._asked += 1
        self._open[self._asked] = _Question(given)
        return self._asked

    async def answer_to(self, number: int) -> Any:
        """Wait for the answer to a question.

        :raises InferdError: the question was refused.
        """
        question = self._open[number]
        try:
            await question.done.wait()
        finally:
            self._open.pop(number, None)
        if question.error is not None:
            raise question.error
        return question.value

    def answered(self, number: int, value: Any) -> None:
        """Take the answer to a question; it may come when nobody waits for it any more."""
        if number in self._open:
            self._open[number].value = value
            self._open[number].done.set()

    def refused(self, number: int, error: InferdError) -> None:
        """Take the refusal of a question."""
        if number in self._open:
            self._open[number].error = error
            self._open[number].done.set()

    def refuse_all(self, error: Callable[[int, bytes], InferdError]) -> None:
        """Refuse all that are open, each by the *error* for its number and what was given."""
        for number, question in list(self._open.items()):
            self.refused(number, error(number, question.given))
