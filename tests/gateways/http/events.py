"""A reader of the gateway's streams of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

from tests.gateways.http.own_paths import PATH, Caller


class Events:
    """Reads the events of a response."""

    def __init__(self, response: HTTPResponse):
        self._response = response

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        while (event := self.read()) is not None:
            yield event

    def read(self) -> tuple[str, Any] | None:
        """Return the next event, or None at the end."""
        kind, found = "", None
        while line := self._response.readline().decode():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ").rstrip("\n")
            elif line.startswith("data: "):
                found = kind, json.loads(line.removeprefix("data: "))
            elif line == "\n" and found is not None:
                return found
        return None

    def next_of(self, kind: str) -> Any:
        """Return the data of the next event of a kind."""
        return next(data for name, data in self if name == kind)


@contextmanager
def events(caller: Caller, query: str = "") -> Iterator[Events]:
    """Yield the events of a caller, whose stream then ends."""
    with caller.opened("GET", f"{PATH}/events{query}") as response:
        assert response.status == 200, response.read()
        yield Events(response)
