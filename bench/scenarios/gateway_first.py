"""Scenario of the gateway's share in the time to the first token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import daemon, gateway
from bench import streams as s
from bench.clients import Request
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd import AsyncClient

from .base import GATEWAY, Scenario, Started, Work

PAIRS, PAIRS_SMALL = 300, 20
TOKENS = 4
SOCKET, HTTP = "socket", "http"
LATER_MS_MAX = 1.0
MODEL = "echo"


async def drive(server: daemon.Inferd, http: gateway.Gateway, work: Work) -> list[Stream]:
    """Send each text over the socket, in a session of its own, and then over HTTP."""
    streams: list[Stream] = []
    async with AsyncClient(server.socket) as client, http.client(model=MODEL) as program:
        for number in range(PAIRS_SMALL if work.small else PAIRS):
            text = f"{work.mark} {number} how are you?"
            socket = daemon.StreamClient(client, model=MODEL)
            async with socket:
                streams.append(await socket.send_request(Request(text, TOKENS, SOCKET)))
            streams.append(await program.send_request(Request(text, TOKENS, HTTP)))
            program.forget()
    return streams


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the median times to the first token, and the median of each pair's difference."""
    s.check_complete(streams)
    times = {
        label: [1000 * stream.ttft_s for stream in streams if stream.label == label]
        for label in (SOCKET, HTTP)
    }
    later = [http - socket for socket, http in zip(times[SOCKET], times[HTTP], strict=True)]
    return {
        "later_p50_ms": statistics.median(later),
        "socket_p50_ms": statistics.median(times[SOCKET]),
        "http_p50_ms": statistics.median(times[HTTP]),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with an echo model, and a gateway."""
    server = await stack.enter_async_context(daemon.running(daemon.echo_configuration([MODEL], 4)))
    await server.keep_loaded(stack, MODEL)
    http = await stack.enter_async_context(gateway.running(server))

    async def side(work: Work) -> list[Stream]:
        return await drive(server, http, work)

    return Started({GATEWAY: side}, {})


SCENARIO = Scenario(
    name="gateway-first",
    title="The first token over HTTP",
    about=f"""\
{PAIRS} texts, each sent twice: over inferd's socket, in a session that is opened for it, and by
`/v1/completions` of the gateway, both on connections that stay open. The model is inferd's `echo`,
which computes nothing, so that the difference of the two times is the gateway's work.""",
    figures=(
        Figure("later_p50_ms", "over HTTP later by, median, ms", 2),
        Figure("socket_p50_ms", "socket: first token, median, ms", 2),
        Figure("http_p50_ms", "HTTP: first token, median, ms", 2),
    ),
    targets=(Target("later_p50_ms", GATEWAY, most=LATER_MS_MAX),),
    start=start,
    measure=measure,
    pictures=(),
)
