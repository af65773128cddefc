"""Cases from the vectors: whole exchanges, replayed with the server's own handles."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from ..page import VECTORS, binary
from ..peer import CREDIT, ERROR, EVENT, RESULT, Connection, Map, Skipped, check, check_error
from ..suite import Server, add_case

HANDLES = ("graph", "context", "contexts")
VARYING = {
    *("cached_tokens", "queue_ms", "ttft_ms", "prompt_ms", "predicted_ms", "llama_build_number"),
    *("llama_commit", "fingerprint", "model", "message", "hint", "starts_in_s", "kv", "parks"),
    *("slots", "ctx_size"),
}
"""Keys whose values differ between servers or runs, besides those that an exchange names."""
_SLOTS = 4
"""The slots of the echo model with which the vectors were recorded."""


class ExchangeReplay:
    """One exchange: the client's messages are sent, and each answer is compared."""

    def __init__(self, server: Server, connection: Connection, frames: list[Map]):
        self._server, self._connection, self._frames = server, connection, frames
        self._handles: dict[int, int] = {}
        """The server's handles, by the handles in the vectors."""

    def run(self) -> None:
        """Play the frames after both hellos."""
        for entry in self._frames[2:]:
            message = binary(entry["means"])
            if entry["from"] == "client":
                self._send(message, entry.get("descriptors", []))
            else:
                self._compare(message, self._next(message), entry.get("varies", []))

    def _send(self, message: list[Any], descriptors: list[str]) -> None:
        if message[0] == CREDIT:
            return self._connection.send(message)
        kind, number, call, params = message
        if params.get("name") == "echo":
            params["name"] = self._server.model
        fds = [_memfd(bytes.fromhex(data)) for data in descriptors]
        try:
            self._connection.send([kind, number, call, self._own(params)], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _own(self, value: Any) -> Any:
        """Replace the vectors' handles by the server's."""
        if isinstance(value, dict):
            return {
                key: self._handle(item) if key in HANDLES else self._own(item)
                for key, item in value.items()
            }
        return [self._own(item) for item in value] if isinstance(value, list) else value

    def _handle(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._handle(item) for item in value]
        return self._handles.get(value, value)

    def _next(self, expected: list[Any]) -> list[Any]:
        """Return the next message; skip positions in the queue unless one is *expected*."""
        while True:
            message = self._connection.read_message()
            is_position = message[0] == EVENT and "waiting" in message[2]
            if not is_position or "waiting" in expected[2]:
                return message

    def _compare(self, expected: list[Any], message: list[Any], varies: list[str]) -> None:
        check(message[:2] == expected[:2], f"{message!r:.300} came instead of {expected!r:.300}")
        got, wanted = message[2], expected[2]
        if expected[0] == ERROR:
            got = check_error(got)
        if expected[0] in (RESULT, EVENT):
            self._learn(wanted, got)
        for key, value in wanted.items():
            self._check_value(f"/2/{key}", key, self._own({key: value})[key], got.get(key), varies)

    def _learn(self, wanted: Map, got: Map) -> None:
        for key in HANDLES:
            old, new = wanted.get(key, []), got.get(key, [])
            pairs = zip(old, new, strict=False) if isinstance(old, list) else [(old, new)]
            self._handles.update({a: b for a, b in pairs if isinstance(a, int)})

    def _check_value(self, path: str, key: str, value: Any, got: Any, varies: list[str]) -> None:
        if path in varies or key in VARYING:
            check(got is not None, f"{path} is missing")
        elif isinstance(value, dict) and isinstance(got, dict):
            for inner, item in value.items():
                self._check_value(f"{path}/{inner}", inner, item, got.get(inner), varies)
        else:
            check(got == value, f"{path} is {got!r:.200}, not {value!r:.200}")


def replay(exchange: Map, server: Server) -> None:
    """Replay an exchange of the vectors, and delete the sessions that it began."""
    connection = server.connect()
    slots = connection.call("load_by_name", name=server.model).get("slots")
    if exchange["name"] == "a place in the queue" and slots != _SLOTS:
        raise Skipped(f"the vectors have {_SLOTS} slots, the model {slots}")
    connection.close()
    connection = server.connect()
    try:
        ExchangeReplay(server, connection, exchange["frames"]).run()
    finally:
        connection.close()
        cleaner = server.connect()
        for name in _session_ids(exchange["frames"]):
            cleaner.call("delete_session", session_id=name)


def _session_ids(frames: list[Map]) -> set[str]:
    """Return the ids of the sessions that an exchange begins."""
    ids: set[str] = set()
    for entry in frames:
        if entry["from"] == "client" and entry["means"][0] == 1:
            params = entry["means"][3]
            ids |= {*params.get("session_ids", []), params.get("session_id")}
    return ids - {None}


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("conformance")
    os.write(fd, data)
    return fd


for _exchange in VECTORS["exchanges"]:
    add_case(
        "exchanges." + _exchange["name"].replace(" ", "_"),
        "An exchange in hex",
        f"The exchange of the vectors is answered as recorded: {_exchange['name']}.",
        partial(replay, _exchange),
    )
