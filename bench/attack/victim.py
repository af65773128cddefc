"""The victim: one stream and cheap calls of a user, measured while somebody else attacks."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import anyio

from bench.streams import percentile

from .attack import Service
from .requests import ERRORS, connect, error_name

CALL_PAUSE_S = 0.02
RETRY_PAUSE_S = 0.1
TOKENS = 1024
PROMPT = "Write a long story about a lighthouse keeper and the sea."


@dataclass(frozen=True)
class VictimFigures:
    """A victim's figures over one measurement."""

    tokens_per_s: float
    gap_worst_s: float
    """Longest time without a piece of the stream, including its begin."""
    call_p99_ms: float
    call_worst_ms: float
    errors: tuple[str, ...]
    """Names of the errors that the victim got; none is expected."""


class Victim:
    """Streams and calls over two connections until its time ends."""

    def __init__(self, service: Service, seconds: float):
        self._service, self._seconds = service, seconds
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
                async with connect(self._service) as requests:
                    async for _ in requests.stream(PROMPT, TOKENS):
                        self._arrivals_s.append(time.perf_counter())
            except ERRORS as exc:
                self._errors.append(error_name(exc))
                await anyio.sleep(RETRY_PAUSE_S)

    async def _make_calls(self) -> None:
        while True:
            begin_s = time.perf_counter()
            try:
                async with connect(self._service) as requests:
                    while True:
                        await requests.list_models()
                        self._note_call(begin_s)
                        begin_s = 0.0
                        await anyio.sleep(CALL_PAUSE_S)
                        begin_s = time.perf_counter()
            except ERRORS as exc:
                self._errors.append(error_name(exc))
                self._note_call(begin_s)
                await anyio.sleep(RETRY_PAUSE_S)
            except anyio.get_cancelled_exc_class():
                if begin_s:  # a call without an answer has taken at least this long
                    self._note_call(begin_s)
                raise

    def _note_call(self, begin_s: float) -> None:
        self._calls_s.append(time.perf_counter() - begin_s)
