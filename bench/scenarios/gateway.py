"""Scenario of streams over HTTP: llama-server, inferd's own protocol, and the gateway before it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from bench import daemon, gateway, llama_server
from bench.clients import Client, send_together
from bench.runs import Figure, Target
from bench.streams import Stream

from . import decode
from .base import GATEWAY, GATEWAY_LOSS_MAX, INFERD, LLAMA_SERVER, Scenario, Started, Work

CASES = decode.CASES


async def drive(server: daemon.Inferd | gateway.Gateway, work: Work) -> list[Stream]:
    """Stream the texts of the scenario `decode`."""
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(server.client()) for _ in range(work.case)
        ]
        return await send_together(clients, decode.requests(work))


async def start(stack: AsyncExitStack) -> Started:
    """Start both servers, and the gateway."""
    reference = await stack.enter_async_context(
        llama_server.running(decode.SLOTS, decode.CTX_SIZE, llama_server.NO_CACHES)
    )
    text = daemon.configuration(decode.SLOTS, decode.CTX_SIZE)
    server = await stack.enter_async_context(daemon.running(text))
    await server.keep_loaded(stack)
    http = await stack.enter_async_context(gateway.running(server))
    return Started(
        {
            LLAMA_SERVER: partial(decode.drive_llama_server, reference),
            INFERD: partial(drive, server),
            GATEWAY: partial(drive, http),
        },
        {},
    )


SCENARIO = Scenario(
    name="gateway",
    title="Decoding over HTTP",
    about=f"""\
The streams of the first scenario, once by inferd's own protocol (**{INFERD}**) and once by
`/v1/completions` of `inferd gateway` before the same daemon (**{GATEWAY}**). The clients of
**{LLAMA_SERVER}** use HTTP as everywhere. Server, gateway and clients share two cores, so that each
microsecond of the gateway counts.""",
    figures=(
        Figure("tokens_per_s", "tokens/s", 1),
        Figure("ttft_ms", "first token, ms", 1),
        Figure("gap_p50_ms", "gap p50, ms", 1),
        Figure("gap_p99_ms", "gap p99, ms", 1),
    ),
    targets=(
        *(
            Target("tokens_per_s", GATEWAY, INFERD, least=1 - GATEWAY_LOSS_MAX, case=case)
            for case in CASES
        ),
        *(Target("tokens_per_s", GATEWAY, LLAMA_SERVER, least=0.98, case=case) for case in CASES),
    ),
    start=start,
    measure=decode.measure,
    cases=CASES,
    case_heading="streams",
    pictures=(),
)
