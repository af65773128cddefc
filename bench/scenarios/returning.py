"""Scenario of a conversation that continues after a restart of the server."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench import daemon, llama_server, texts
from bench import streams as s
from bench.clients import Client, Request
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, LLAMA_SERVER, Scenario, Side, Started, Work

SLOTS = 4
CTX_SIZE = 2560
WORDS = 1250
TOKENS = 64
FRESH = "inferd, fresh state"

Connect = Callable[[], AbstractAsyncContextManager[tuple[Client, bool]]]
"""Starts a server and connects a program. True means that its session still has its history."""


async def drive(first: Connect, again: Connect, work: Work) -> list[Stream]:
    """Run a turn, restart the server, and send the whole conversation again with a question."""
    rng = work.rng()
    prompt = f"{work.mark} {texts.story(rng, 150 if work.small else WORDS)}"
    question = texts.question(rng)
    async with first() as (client, _):
        before = await client.send_request(Request(prompt, TOKENS, "before the restart"))
        history = prompt + client.last_answer
    async with again() as (client, attached):
        text = question if attached else history + question
        return [before, await client.send_request(Request(text, TOKENS, "returns"))]


@asynccontextmanager
async def llama_server_side() -> AsyncIterator[tuple[Client, bool]]:
    """Run llama-server and connect to it."""
    async with llama_server.running(SLOTS, CTX_SIZE) as server, server.client() as client:
        yield client, False


@asynccontextmanager
async def inferd_side(home: Path) -> AsyncIterator[tuple[Client, bool]]:
    """Run a daemon with its state in *home*, and open a session with the same id each time."""
    text = daemon.configuration(SLOTS, CTX_SIZE)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(daemon.running(text, home))
        await server.keep_loaded(stack)
        client = await stack.enter_async_context(server.client(session_id="returning"))
        yield client, (await client.open_session()).attached


def inferd(*, keeps_state: bool) -> Side:
    """Return the side of a daemon that restarts with its state, or with an empty folder."""

    async def side(work: Work) -> list[Stream]:
        with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
            first, other = Path(folder) / "first", Path(folder) / "other"
            first.mkdir()
            other.mkdir()
            second = first if keeps_state else other
            return await drive(lambda: inferd_side(first), lambda: inferd_side(second), work)

    return side


async def reference(work: Work) -> list[Stream]:
    """Run the work on llama-server."""
    return await drive(llama_server_side, llama_server_side, work)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the times to the first token, and the cached input of the returning turn."""
    s.check_complete(streams)
    before, back = streams
    s.check_cold([before])
    return {
        "ttft_s": back.ttft_s,
        "first_ttft_s": before.ttft_s,
        "input_tokens": back.input_tokens,
        "cached_tokens": back.cached_tokens,
    }


async def start(_stack: AsyncExitStack) -> Started:
    """Return the sides; each run starts and stops its own server twice."""
    sides: dict[str, Side] = {LLAMA_SERVER: reference, INFERD: inferd(keeps_state=True)}
    return Started(sides | {FRESH: inferd(keeps_state=False)}, {})


SCENARIO = Scenario(
    name="return",
    title="A conversation returns after a restart",
    about=f"""\
A program sends {WORDS} words and reads {TOKENS} tokens. The server is stopped (SIGTERM) and started
again, and the model is loaded. Then the program sends the conversation again with a question at its
end; where the server still knows its session by its id, it sends the question alone. The clock runs
from there to the first token. **{FRESH}** is inferd restarted with another, empty state directory.
{SLOTS} slots of {CTX_SIZE} tokens.""",
    figures=(
        Figure("ttft_s", "returns: first token, s", 3),
        Figure("first_ttft_s", "before the restart: first token, s", 3),
        Figure("input_tokens", "returns: input tokens", 0),
        Figure("cached_tokens", "of these cached", 0),
    ),
    targets=(
        Target("ttft_s", FRESH, INFERD, least=10.0),
        Target("ttft_s", LLAMA_SERVER, INFERD, least=10.0),
    ),
    start=start,
    measure=measure,
)
