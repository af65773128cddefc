"""Scenario of sixteen WebAssembly guests, each a process, that pull their tokens one by one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from bench import daemon
from bench.clients import Request, send_together
from bench.machine import MODEL
from bench.runs import Figure, Target
from bench.streams import Stream
from tests.gateways.wasm.guests import c_guest

from . import decode
from .base import Scenario, Side, Started, Work, start_inferd

GUESTS = 16
SLOTS = GUESTS
CTX_SIZE = 512
PUSHED, PULLED, GUEST = "inferd stream", "inferd pull", "guests"
READ_BYTES = 1 << 16


class GuestClient:
    """A guest of `inferd wasm run` with one context, which a line on its input gives a prompt."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.last_answer = ""
        self._process = process

    async def send_request(self, request: Request) -> Stream:
        """Let the guest set the input and compute one token per call until the turn ends."""
        assert self._process.stdin is not None and self._process.stdout is not None
        requested_s = time.perf_counter()
        options = json.dumps(daemon.options(request.tokens))
        self._process.stdin.write(f"{options}\n{' '.join(request.text.split())}\n".encode())
        arrivals: list[float] = []
        answer = b""
        while not (answer.endswith(b"\n") and b"\0" in answer):
            data = await self._process.stdout.read(READ_BYTES)
            assert data, "the guest has ended"
            arrivals.append(time.perf_counter())
            answer += data
        text, _, metadata = answer.partition(b"\0")
        self.last_answer = text.decode(errors="replace")
        found: Mapping[str, Any] = json.loads(metadata)
        return daemon.stream_of(request, requested_s, arrivals, found)


@asynccontextmanager
async def guest_client(server: daemon.Inferd) -> AsyncIterator[GuestClient]:
    """Run a guest until the context ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inferd", "wasm", "run", "--socket", str(server.socket)),
        *(str(c_guest()), "--", "serve", MODEL.stem, "{}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield GuestClient(process)
    finally:
        process.kill()
        await process.wait()


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon and the guests."""
    server = await start_inferd(stack, SLOTS, CTX_SIZE)
    guests = [await stack.enter_async_context(guest_client(server)) for _ in range(GUESTS)]

    async def drive_guests(work: Work) -> list[Stream]:
        return await send_together(guests, decode.requests(work))

    sides: dict[str, Side] = {
        PUSHED: partial(decode.drive_inferd, server, daemon.StreamClient),
        PULLED: partial(decode.drive_inferd, server, daemon.PullClient),
        GUEST: drive_guests,
    }
    return Started(sides, {})


SCENARIO = Scenario(
    name="guests",
    title="WebAssembly guests",
    about=f"""\
{GUESTS} programs send a prompt of 40 to 60 tokens each at once, and read {decode.TOKENS} tokens.
**{GUEST}** are processes of `inferd wasm run`. Their guest, compiled from C, calls `compute_single`
and `get_output_single` for each token and prints it. **{PUSHED}** and **{PULLED}** are clients in
one process, as in the scenario `decode`. All share a daemon with {SLOTS} slots of {CTX_SIZE}
tokens.""",
    figures=(
        Figure("tokens_per_s", "tokens/s", 1),
        Figure("ttft_ms", "first token, ms", 1),
        Figure("gap_p50_ms", "gap p50, ms", 1),
        Figure("gap_p99_ms", "gap p99, ms", 1),
    ),
    targets=(
        Target("tokens_per_s", PULLED, PUSHED, least=0.9, case=GUESTS),
        Target("tokens_per_s", GUEST, PUSHED, least=0.9, case=GUESTS),
    ),
    start=start,
    measure=decode.measure,
    cases=(GUESTS,),
    case_heading="guests",
    pictures=(PUSHED, GUEST),
    picture_case=GUESTS,
)
