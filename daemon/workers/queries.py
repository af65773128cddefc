"""Queries to one worker that have no answer yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from ...backends.errors import InferdError


class _PendingQuery:
    """A query whose answer is awaited; *data* is the part that a client supplied."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.done = anyio.Event()
        self.value: Any = None
        self.error: InferdError | None = None


class PendingQueries:
    """The pending queries by number, from 1 on. Lives on the daemon's event loop."""

    def __init__(self) -> None:
        self._pending: dict[int, _PendingQuery] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add_query(self, data: bytes = b"") -> int:
        """Add a query and return its number."""
        self._last_number += 1
        self._pending[self._last_number] = _PendingQuery(data)
        return self._last_number

    async def wait_answer(self, number: int) -> Any:
        """Wait for the answer to a query.

        :raises InferdError: the query was refused.
        """
        query = self._pending[number]
        try:
            await query.done.wait()
        finally:
            self._pending.pop(number, None)
        if query.error is not None:
            raise query.error
        return query.value

    def resolve_query(self, number: int, value: Any) -> None:
        """Answer a query, unless its caller was cancelled."""
        if number in self._pending:
            self._pending[number].value = value
            self._pending[number].done.set()

    def refuse_query(self, number: int, error: InferdError) -> None:
        """Refuse a query, unless its caller was cancelled."""
        if number in self._pending:
            self._pending[number].error = error
            self._pending[number].done.set()

    def refuse_all(self, error: Callable[[int, bytes], InferdError]) -> None:
        """Refuse all queries; *error* returns the error for a number and its data."""
        for number, query in list(self._pending.items()):
            self.refuse_query(number, error(number, query.data))
