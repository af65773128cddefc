"""Scenario of an editor that asks for the text at the cursor, alone and beside a queue."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench import daemon, gateway, llama_server, texts
from bench import streams as s
from bench.clients import (
    Client,
    HttpClient,
    Request,
    completion_event,
    completion_stream,
    send_at,
    send_in_turn,
)
from bench.fim_model import write_fim
from bench.runs import Figure, Target
from bench.streams import Stream

from . import urgent
from .base import (
    GATEWAY,
    IDLE_S_MAX,
    INFERD,
    LLAMA_SERVER,
    Scenario,
    Side,
    Started,
    Work,
    as_slow_as_inferd,
    measure_setting,
    measured_text,
)

SLOTS, CTX_SIZE = 4, 4096
IDLE, BESIDE = CASES = 1, 2
FUNCTIONS, PLACES = 22, (5, 10, 15, 21)
"""The functions of the file, and the numbers of those before which an edit takes place."""
TYPED = (
    "def count",
    "_words(path):\n",
    "    total = 0\n    for line in ",
    "read(path):\n        total += ",
    "len(line.split())\n    ",
)
"""The texts that are typed at a place, with a request after each."""
SUFFIX_LINES = 16
EDITS = len(PLACES) * len(TYPED)
TOKENS_LEAST, TOKENS_MOST = 8, 16
LOW, LOW_TOKENS = 40, 192
FIRST_S, EVERY_S = 1.0, 2.0
EDIT = "edit"
HEAD_TOKENS_MAX = 24
"""The most tokens at the front of all prompts: names of the project and of the file, marks."""

Connect = Callable[[], AbstractAsyncContextManager[Client]]


class InfillClient(HttpClient):
    """Streams `/infill` of llama-server or of the gateway, as editors do."""

    def __init__(self, port: int, model: str, key: str = ""):
        headers = "Content-Type: application/json\r\n"
        super().__init__(port, "/infill", headers + f"Authorization: Bearer {key}\r\n" * bool(key))
        self.last_answer = ""
        self._model = model

    async def send_request(self, request: Request) -> Stream:
        """Send the texts around the place, and read the answer to the end."""
        requested_s = time.perf_counter()
        body: dict[str, Any] = {
            "model": self._model,
            "input_prefix": request.text,
            "input_suffix": request.suffix,
            "n_predict": request.tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "stream": True,
            "priority": request.priority,
        }
        reader = await self.post(body)
        arrivals: list[float] = []
        pieces: list[str] = []
        while not (event := await completion_event(reader)).get("stop") and "error" not in event:
            arrivals.append(time.perf_counter())
            pieces.append(event["content"])
        self.close()
        self.last_answer = "".join(pieces)
        return completion_stream(request, requested_s, arrivals, event)


@asynccontextmanager
async def infill_client(port: int, model: str, key: str = "") -> AsyncIterator[InfillClient]:
    """Open a client's connection, and close it at the end."""
    client = InfillClient(port, model, key)
    await client.connect()
    try:
        yield client
    finally:
        client.close()


def function(rng: random.Random, mark: str) -> str:
    """Return a function of about 100 tokens, whose name has *mark*."""
    name, other = (name.lower() for name in texts.names(rng, 2))
    return (
        f"def read_{mark}_{name}(path):\n"
        f'    """Return the lines of the file of {other}, without those that are empty."""\n'
        f"    with open(path) as file:\n        {name} = file.read().splitlines()\n"
        f"    if len({name}) < {rng.randint(3, 90)}:\n"
        f'        raise ValueError("the file of {other} is too short")\n'
        f"    return [line.strip() for line in {name} if line.strip()]\n\n\n"
    )


def edits(work: Work) -> list[Request]:
    """Return the requests of a file that is edited at one place after the other."""
    rng = work.rng()
    functions = [function(rng, work.mark) for _ in range(FUNCTIONS)]
    found: list[Request] = []
    prefix, before = "", 0
    for place in PLACES:
        prefix += "".join(functions[before:place])
        before = place
        suffix = "\n\n\n" + "".join(functions[place:])
        for typed in TYPED:
            prefix += typed
            found.append(
                Request(
                    text=prefix,
                    suffix="".join(suffix.splitlines(keepends=True)[:SUFFIX_LINES]),
                    tokens=rng.randint(TOKENS_LEAST, TOKENS_MOST),
                    label=f"{EDIT} {len(found) + 1}",
                    priority="urgent",
                )
            )
        prefix += "\n\n\n"
    return found[:2] if work.small else found


async def drive(connect: Connect, connect_infill: Connect, work: Work) -> list[Stream]:
    """Send the requests of the edits: alone one after the other, else at their moments."""
    requests = edits(work)
    if work.case == IDLE:
        async with connect_infill() as client:
            return await send_in_turn(client, requests)
    low = urgent.low_requests(work, LOW, LOW_TOKENS)
    moments_s = [FIRST_S + EVERY_S * number for number in range(len(requests))]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect()) for _ in low]
        clients += [await stack.enter_async_context(connect_infill()) for _ in requests]
        return await send_at(clients, low + requests, [*[0.0] * len(low), *moments_s])


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the times to the first token after an edit, and the outcome of the queue."""
    edited = [stream for stream in streams if stream.label.startswith(EDIT)]
    low = [stream for stream in streams if stream not in edited]
    s.check_complete(edited)
    first = min(edited, key=lambda stream: stream.requested_s)
    cached = first.cached_tokens
    assert cached <= HEAD_TOKENS_MAX, f"{cached} tokens of a new file came from a cache"
    return {
        "ttft_median_s": s.ttft_median_s(edited),
        "ttft_worst_s": max(stream.ttft_s for stream in edited),
        "computed_tokens": s.computed_tokens(edited),
        "low_s": s.makespan_s(low) if low else 0.0,
        "low_lost": sum(stream.lost for stream in low),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start llama-server with its default caches, and a daemon with a gateway before it."""
    file = write_fim(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferd-bench-"))))
    reference = await stack.enter_async_context(llama_server.running(SLOTS, CTX_SIZE, model=file))
    text = daemon.configuration(SLOTS, CTX_SIZE, {"models-dir": str(file.parent)})
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferd-bench-")))

    async def edit(server: daemon.Inferd) -> None:
        connect = partial(server.client, model=file.stem)
        await drive(connect, connect, Work(IDLE, 0, 0))

    records = await measure_setting(text, home, file.stem, edit)
    server = await stack.enter_async_context(daemon.running(text, home))
    await server.keep_loaded(stack, file.stem)
    http = await stack.enter_async_context(gateway.running(server))
    own = partial(server.client, model=file.stem)
    sides: dict[str, Side] = {
        LLAMA_SERVER: partial(
            drive, reference.client, partial(infill_client, reference.port, file.stem)
        ),
        INFERD: partial(drive, own, own),
        GATEWAY: partial(
            drive,
            partial(http.client, model=file.stem),
            partial(infill_client, http.port, file.stem, http.key),
        ),
    }
    model = f"{file.stem}: SmolLM2 135M with tokens to fill in the middle"
    return Started(sides, {"model": model, "its setting": measured_text(records)})


SCENARIO = Scenario(
    name="infill",
    title="The text at the cursor",
    about=f"""\
A source file of about 2000 tokens is edited at {len(PLACES)} places, from its front to its end. At
each, some characters are typed {len(TYPED)} times, and after each time an editor asks for
{TOKENS_LEAST} to {TOKENS_MOST} tokens at the cursor, {EDITS} times in all. It sends the whole text
before the cursor, and {SUFFIX_LINES} lines behind it, which are computed again each time. Case
{IDLE}: each request follows the answer to the previous one. Case {BESIDE}: {LOW} requests of low
priority for {LOW_TOKENS} tokens each have arrived at once, and the editor's urgent ones follow, one
every {EVERY_S:g} s; llama-server has no priorities and serves in the order of arrival, so that its
times are those of the whole queue. {SLOTS} slots of {CTX_SIZE} tokens.

The model is a copy of SmolLM2-135M-Instruct, with the same weights, in whose vocabulary four unused
control tokens are those to fill in the middle. inferd has edited a file before and was idle for up
to {IDLE_S_MAX} s, in which it measured its setting for such steps. Both servers lay out the prompt
alike. Of a prefix with more than 1536 tokens, as at the last place, llama-server takes the last
1536, while inferd's beginning stays the same for 256 tokens. **{LLAMA_SERVER}** and **{GATEWAY}**
answer `/infill`, of which llama-server ignores the priority; **{INFERD}** streams by its own
protocol.""",
    figures=(
        Figure("ttft_median_s", "first token, median, s", 3),
        Figure("ttft_worst_s", "first token, worst, s", 3),
        Figure("computed_tokens", "prompt tokens computed", 0),
        Figure("low_s", "low: all done, s"),
        Figure("low_lost", "low: lost, worst run", 0, over="max"),
    ),
    targets=(
        Target("ttft_median_s", INFERD, LLAMA_SERVER, most=1.0, case=IDLE),
        as_slow_as_inferd("ttft_median_s", IDLE),
        Target("ttft_median_s", LLAMA_SERVER, INFERD, least=20, case=BESIDE),
        Target("low_lost", INFERD, most=0, case=BESIDE),
    ),
    start=start,
    measure=measure,
    cases=CASES,
    case_heading="case",
    pictures=(),
)
