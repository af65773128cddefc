"""The victim: one stream and cheap calls of a user, measured while somebody else attacks."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from dataclasses import dataclass

import anyio

from bench.daemon import options
from bench.streams import percentile
from inferd import AsyncClient, InferdError

CALL_PAUSE_S = 0.02
TOKENS = 1024
PROMPT = "Write a long story about a lighthouse keeper and the sea."


@dataclass(frozen=True)
class VictimFigures:
    """A victim's figures over one measurement."""

    tokens_per_s: float
    gap_worst_s: float
    """Longest time between two pieces of the stream."""
    call_p99_ms: float
    call_worst_ms: float
    errors: tuple[str, ...]
    """Names of the errors that the victim got; none is expected."""
    daemon_mb: float = 0.0
    """The daemon's largest resident memory meanwhile, without its workers."""
    program_cores: float = 0.0
    """The average number of cores that the process of the other program used itself."""


class Victim:
    """Streams and calls over two connections until its time ends."""

    def __init__(self, socket: str, model: str, seconds: float):
        self._socket, self._model, self._seconds = socket, model, seconds
        self._arrivals_s: list[float] = []
        self._calls_s: list[float] = []
        self._errors: list[str] = []

    async def measure(self) -> VictimFigures:
        """Connect, stream and call for the given time, and return the figures."""
        begin_s = time.perf_counter()
        with anyio.move_on_after(self._seconds):
            async with anyio.create_task_group() as group:
                group.start_soon(self._stream)
                group.start_soon(self._make_calls)
        end_s = time.perf_counter()
        times = [begin_s, *self._arrivals_s, end_s]
        return VictimFigures(
            tokens_per_s=len(self._arrivals_s) / (end_s - begin_s),
            gap_worst_s=max(b - a for a, b in itertools.pairwise(times)),
            call_p99_ms=1000 * percentile(self._calls_s, 0.99),
            call_worst_ms=1000 * max(self._calls_s, default=self._seconds),
            errors=tuple(sorted(set(self._errors))),
        )

    async def _stream(self) -> None:
        while True:
            try:
                async with (
                    AsyncClient(self._socket) as client,
                    client.session(self._model, raw=True) as session,
                ):
                    async for _ in session.stream(PROMPT, options=options(TOKENS)):
                        self._arrivals_s.append(time.perf_counter())
            except InferdError as exc:
                self._errors.append(exc.name)
                await anyio.sleep(0.1)

    async def _make_calls(self) -> None:
        while True:
            try:
                async with AsyncClient(self._socket) as client:
                    while True:
                        begin_s = time.perf_counter()
                        with suppress(TimeoutError):
                            await client.models()
                        self._calls_s.append(time.perf_counter() - begin_s)
                        await anyio.sleep(CALL_PAUSE_S)
            except InferdError as exc:
                self._errors.append(exc.name)
                await anyio.sleep(0.1)
