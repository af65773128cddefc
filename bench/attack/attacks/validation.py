"""Attacks with requests that take long to check, and with many requests at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

from bench.attack.attack import Attack, Target
from inferd import Client, InferdError
from inferd.wire.frames import REPLY_BYTES_MAX, FrameReader, pack_frame

KEYS = 20_000
NUMBERS = 200_000
"""`KEYS` keys or `NUMBERS` numbers fit into a frame of 1 MiB."""
CLIENTS = 4
CALLS = 200
Request = Callable[[], object]
_MISSPELT: dict[str, Any] = {f"temperatur{i:x}": i for i in range(KEYS)}
_JSON = json.dumps({"a": [{}] * NUMBERS})


def send_many_keys(target: Target) -> None:
    """Set many unknown keys that resemble a known one, over and over."""
    _repeat(target, lambda client, _, context: [lambda: client.set_options(context, _MISSPELT)])


def send_large_values(target: Target) -> None:
    """Send values that take long to check, in several calls."""
    _repeat(target, _large_requests)


def send_many_calls(target: Target) -> None:
    """Send as many cheap calls at once as the connections may have in flight."""
    frames = b"".join(pack_frame([1, n, "models", {}]) for n in range(1, CALLS + 1))
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(_greeted(target)) for _ in range(CLIENTS)]
        while not target.is_over():
            for sock in socks:
                sock.sendall(frames)
            for sock in socks:
                _read_replies(sock, CALLS)


def _large_requests(client: Client, graph: int, context: int) -> list[Request]:
    return [
        lambda: client.init_backend(_JSON),
        lambda: client.set_options(context, {"stop": ["a"] * NUMBERS}),
        lambda: client.set_options(context, {"logit-bias": [[1, 1.0]] * 10_000}),
        lambda: client.detokenize(graph, [1] * NUMBERS),
        lambda: client.set_input(context, 1, _JSON),
    ]


def _greeted(target: Target) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(target.socket)
    sock.sendall(pack_frame([0, {"protocol": [1, 0]}]))
    _read_replies(sock, 1)
    return sock


def _read_replies(sock: socket.socket, count: int) -> None:
    frames = FrameReader(REPLY_BYTES_MAX)
    while count > 0 and (data := sock.recv(1 << 16)):
        count -= sum(1 for _ in frames.read_frames(data))


def _repeat(target: Target, requests: Callable[[Client, int, int], list[Request]]) -> None:
    """Make the requests of several clients in turn until the attack is over."""
    with contextlib.ExitStack() as stack:
        every: list[Request] = []
        for _ in range(CLIENTS):
            client = stack.enter_context(Client(target.socket))
            with contextlib.suppress(InferdError):  # other attacks may use up the user's bounds
                graph = client.load_by_name(target.model)
                every += requests(client, graph, client.init_execution_context(graph))
        for request in itertools.cycle(every):
            if target.is_over():
                return
            with contextlib.suppress(InferdError):
                request()


ATTACKS = (
    Attack("many-keys", "20 000 misspelt keys in one request", send_many_keys),
    Attack("many-calls", "200 cheap calls at once on each of 4 connections", send_many_calls),
    Attack("large-values", "values that take long to check", send_large_values),
)
