"""Requests of the daemon's own paths, by Python's own HTTP client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any, NamedTuple

from tests.gateways.http.driver import CALL_S_MAX, RunningGateway

PATH = "/v1/inferd"


class Response(NamedTuple):
    """A status, and the JSON of a body."""

    status: int
    json: Any


class Caller:
    """A sender of requests, perhaps with a key."""

    def __init__(self, running: RunningGateway, key: str | None = None, **headers: str):
        self.running = running
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            self.headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Response:
        return self.send("GET", path)

    def post(self, path: str, **fields: Any) -> Response:
        return self.send("POST", path, fields)

    def delete(self, path: str) -> Response:
        return self.send("DELETE", path)

    def send(self, method: str, path: str, fields: dict[str, Any] | None = None) -> Response:
        """Return the response to a request of one of the daemon's own paths."""
        with self.opened(method, f"{PATH}{path}", fields) as response:
            return Response(response.status, json.loads(response.read()))

    @contextmanager
    def opened(
        self, method: str, path: str, fields: dict[str, Any] | None = None
    ) -> Iterator[HTTPResponse]:
        """Yield the response to a request, whose connection then ends."""
        connection = HTTPConnection(self.running.host, self.running.port, timeout=CALL_S_MAX)
        body, headers = None, self.headers
        if fields is not None:
            body, headers = json.dumps(fields), {"Content-Type": "application/json", **headers}
        try:
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def chat(self, model: str, text: str, session_id: str | None = None, **fields: Any) -> str:
        """Return the answer to a message."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        if session_id is not None:
            body["session_id"] = session_id
        with self.opened("POST", "/v1/chat/completions", body) as response:
            found = json.loads(response.read())
            assert response.status == 200, found
        return str(found["choices"][0]["message"]["content"])
