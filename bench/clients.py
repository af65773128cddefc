"""The bench's clients: one asyncio connection per program, opened before the clock starts."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import anyio

from inferd import Priority
from tools.build_engine import ROOT

from .streams import Stream

HTTP_LINE_BYTES_MAX = 1 << 20
MEDIA_MARKER = "<__media__>"
"""llama-server gets this marker by an environment variable; by default it is a random one."""
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A program's request: a text, and the number of answer tokens."""

    text: str
    tokens: int
    label: str = ""
    priority: Priority = "normal"
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the answer."""
    image: bytes | None = None
    """A PNG file, whose place in the text is the `MEDIA_MARKER`."""
    speculation: str | None = None
    """inferd's drafter for the answer, or None for the model's."""
    suffix: str | None = None
    """The text behind the answer, where it is text between two others."""


class Client(Protocol):
    """One program on one connection, in one conversation that each request continues."""

    last_answer: str

    async def send_request(self, request: Request) -> Stream:
        """Send the text and read its answer to the end."""


class Server(Protocol):
    """A running server."""

    def client(self, slot: int = -1) -> AbstractAsyncContextManager[Client]:
        """Connect a program; it is served in *slot* if given and if the server supports it."""


async def connect(stack: AsyncExitStack, server: Server, count: int) -> list[Client]:
    """Connect *count* programs until *stack* closes."""
    return [await stack.enter_async_context(server.client()) for _ in range(count)]


async def gather_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all *calls* side by side; return their results in the same order.

    This uses anyio's task group. Under Python 3.11 asyncio's group leaves its task marked as
    cancelled when a child fails, and the open clients around it then hide the error.
    """
    results: dict[int, T] = {}

    async def run(number: int, call: Coroutine[Any, Any, T]) -> None:
        results[number] = await call

    async with anyio.create_task_group() as group:
        for number, call in enumerate(calls):
            group.start_soon(run, number, call)
    return [result for _, result in sorted(results.items(), key=itemgetter(0))]


async def send_together(clients: Sequence[Client], requests: Sequence[Request]) -> list[Stream]:
    """Send every client's request at once; return the streams in the clients' order."""
    return await gather_all(
        c.send_request(request) for c, request in zip(clients, requests, strict=True)
    )


async def send_at(
    clients: Sequence[Client], requests: Sequence[Request], moments_s: Sequence[float]
) -> list[Stream]:
    """Send each client's request at its moment from now; return the streams in that order."""
    begin_s = time.perf_counter()

    async def send_later(client: Client, request: Request, moment_s: float) -> Stream:
        await asyncio.sleep(begin_s + moment_s - time.perf_counter())
        return await client.send_request(request)

    return await gather_all(map(send_later, clients, requests, moments_s))


async def send_in_turn(client: Client, requests: Sequence[Request]) -> list[Stream]:
    """Send the client's requests, each as soon as the previous one is answered."""
    return [await client.send_request(request) for request in requests]


class HttpClient:
    """A connection over which event streams are requested by HTTP."""

    def __init__(self, port: int, path: str, headers: str = ""):
        self._port, self._path, self._headers = port, path, headers
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> asyncio.StreamReader:
        """Open a connection."""
        self.close()
        self._connection = await asyncio.open_connection(
            "127.0.0.1", self._port, limit=HTTP_LINE_BYTES_MAX
        )
        return self._connection[0]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection[1].close()
        self._connection = None

    async def post(self, body: dict[str, Any]) -> asyncio.StreamReader:
        """Send a request; the server may have closed the connection after the previous one."""
        if self._connection is None or self._connection[0].at_eof():
            await self.connect()
        assert self._connection is not None
        reader, writer = self._connection
        raw = json.dumps(body).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\n{self._headers}"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return reader


class LlamaServerClient(HttpClient):
    """Streams llama-server's own /completion over HTTP.

    The server closes a connection after each answer, or after 5 s of silence; the next request
    opens another. The client sends the whole conversation with each turn: its own texts unchanged,
    the answers as the generated token ids, so that nothing is tokenized differently.
    """

    def __init__(self, port: int, slot: int = -1, *, cache: bool = True):
        super().__init__(port, "/completion")
        self.last_answer = ""
        self._slot, self._cache = slot, cache
        self._history: list[str | int] = []

    async def send_request(self, request: Request) -> Stream:
        """Send the text and read its answer to the end."""
        requested_s = time.perf_counter()
        self._history.append(request.text)
        reader = await self.post(self._body(request))
        arrivals: list[float] = []
        pieces: list[str] = []
        tokens: list[int] = []
        while not (event := await completion_event(reader)).get("stop") and "error" not in event:
            arrivals.append(time.perf_counter())
            pieces.append(event["content"])
            tokens += event["tokens"]
        self.close()
        self.last_answer = "".join(pieces)
        # A token that only begins a character has no event of its own.
        whole = len(tokens) == event.get("tokens_predicted")
        self._history += tokens if whole else [self.last_answer]
        return completion_stream(request, requested_s, arrivals, event)

    def _body(self, request: Request) -> dict[str, Any]:
        prompt: Any = self._history if len(self._history) > 1 else request.text
        if request.image is not None:
            encoded = base64.b64encode(request.image).decode()
            prompt = {"prompt_string": request.text, "multimodal_data": [encoded]}
        # A chain of only the temperature is llama-server's cheapest greedy sampling.
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": request.tokens,
            "stream": True,
            "temperature": 0,
        }
        body |= {"samplers": ["temperature"], "ignore_eos": True, "cache_prompt": self._cache}
        if request.schema is not None:
            body["json_schema"] = request.schema
        # By default the server takes the least recently used slots, which drift apart over time.
        # llama.cpp splits a batch with gaps into several (4 streams: 105 to 122 tok/s, not 155).
        return body | {"id_slot": self._slot}


async def completion_event(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next event of a stream in the form of llama-server's completions."""
    while line := await reader.readline():
        if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            return {"error": line.decode().strip()}
        if line.startswith(b"data: "):
            return dict(json.loads(line[6:]))
    return {"error": "the server closed the connection"}


def completion_stream(
    request: Request, requested_s: float, arrivals: list[float], end: dict[str, Any]
) -> Stream:
    """Return the record of an answer with the last event *end* of its stream."""
    if "error" in end or not arrivals:
        error = str(end.get("error", "no answer"))
        return Stream(
            requested_s,
            tuple(arrivals),
            0,
            request.tokens,
            request.label,
            request.priority,
            error=error,
        )
    timings = end["timings"]
    waited_s = arrivals[0] - requested_s - timings["prompt_ms"] / 1000
    return Stream(
        requested_s=requested_s,
        arrivals_s=tuple(arrivals),
        tokens=int(end["tokens_predicted"]),
        tokens_requested=request.tokens,
        label=request.label,
        priority=request.priority,
        waited_s=max(0.0, waited_s),
        input_tokens=int(timings["cache_n"] + timings["prompt_n"]),
        cached_tokens=int(timings["cache_n"]),
    )


@asynccontextmanager
async def llama_server_client(
    port: int, slot: int, *, cache: bool
) -> AsyncIterator[LlamaServerClient]:
    """Open a client's connection, and close it at the end."""
    client = LlamaServerClient(port, slot, cache=cache)
    await client.connect()
    try:
        yield client
    finally:
        client.close()


async def bare_run(
    requests: Sequence[Request], slots: int, ctx_size: int, *, share: bool = False
) -> list[Stream]:
    """Run all requests at once in a bare loop, a process of its own.

    With *share* it computes the prompts' shared beginning once.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.bare"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    texts, tokens = [request.text for request in requests], requests[0].tokens
    job = json.dumps([texts, tokens, slots, ctx_size, share])
    out, _ = await process.communicate(job.encode())
    if process.returncode != 0:
        raise SystemExit(f"the bare loop ended with status {process.returncode}")
    return [
        Stream(
            requested_s,
            tuple(times),
            len(times),
            tokens,
            request.label,
            input_tokens=size,
            cached_tokens=cached,
        )
        for (requested_s, times, size, cached), request in zip(
            json.loads(out), requests, strict=True
        )
    ]
