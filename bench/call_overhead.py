"""The time of a call that computes nothing: `python -m bench.call_overhead`.

It calls `get_output` of an echo context on a daemon of its own: with blocking reads of a socket,
with the synchronous client, and with the asynchronous one. They take turns, so that other load on
the machine slows all of them. Before each call, the daemon has time to wait for requests again: the
next request of a raw socket would otherwise reach it before it waits, which saves up to half of a
call, and depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import msgspec

from inferd import AsyncClient, Client, __version__
from inferd.testing import running_daemon

_PAUSE_S = 1e-4
"""Time before a call, in which the daemon begins to wait for requests."""
_HELLO = (0, {"protocol": (1, 0), "software": f"bench {__version__}"})


class RawSocket:
    """The lower bound in Python: one request at a time, without ids, credit, checks or errors."""

    def __init__(self, path: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._read()
        self._ids = itertools.count(1)
        self._send(_HELLO)

    def call(self, name: str, params: dict[str, object]) -> Any:
        self._send((1, next(self._ids), name, params))
        return self._read()[2]

    def _send(self, message: object) -> None:
        body = msgspec.msgpack.encode(message)
        self._socket.send(struct.pack("<I", len(body)) + body)

    def _read(self) -> Any:  # a small reply arrives in one piece
        return msgspec.msgpack.decode(self._socket.recv(1 << 16)[4:])

    def close(self) -> None:
        self._socket.close()


def time_calls(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        time.sleep(_PAUSE_S)
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


async def time_async_calls(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    times = []
    for _ in range(count):
        await asyncio.sleep(_PAUSE_S)
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return times


def measure(path: str, rounds: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of all calls by client."""
    times: dict[str, list[float]] = {"raw socket": [], "Client": [], "AsyncClient": []}
    raw = RawSocket(path)
    with Client(path) as client, asyncio.Runner() as runner:
        context = client.init_execution_context(client.load_by_name("echo"))
        graph = raw.call("load_by_name", {"name": "echo"})["graph"]
        raw_context = raw.call("init_execution_context", {"graph": graph})["context"]
        asynchronous = AsyncClient(path)

        async def open_context() -> int:
            graph = await asynchronous.load_by_name("echo")
            return await asynchronous.init_execution_context(graph)

        async_context = runner.run(open_context())
        params: dict[str, object] = {"context": raw_context}
        for _ in range(rounds):
            times["raw socket"] += time_calls(lambda: raw.call("get_output", params), count)
            times["Client"] += time_calls(lambda: client.get_output(context), count)
            times["AsyncClient"] += runner.run(
                time_async_calls(lambda: asynchronous.get_output(async_context), count)
            )
        runner.run(asynchronous.aclose())
    raw.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200, help="calls of each client in a round")
    arguments = parser.parse_args()
    with running_daemon() as daemon:
        times = measure(daemon.socket, arguments.rounds, arguments.calls)
    print(f"{'client':12}  median µs  fastest tenth, µs")
    for name, seconds in times.items():
        tenth = sorted(seconds)[len(seconds) // 10]
        print(f"{name:12}  {1e6 * median(seconds):9.0f}  {1e6 * tenth:17.0f}")


if __name__ == "__main__":
    main()
