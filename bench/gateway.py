"""The HTTP gateway as a side of the bench: its process before a daemon, and its clients."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from inferd.gateways.http.callers.keys import new_key

from .clients import HttpClient, Request
from .daemon import Inferd
from .machine import MODEL
from .streams import Stream

START_S_MAX = 30
_SERVING = b"serving HTTP on "
_END = b"[DONE]\n\n\r\n0\r\n\r\n"


class _Choice(msgspec.Struct):
    text: str


class _Chunk(msgspec.Struct):
    """The parts of a chunk that the client reads; it shares the cores with the servers."""

    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


async def _read_chunk(reader: asyncio.StreamReader) -> _Chunk:
    """Return the next chunk of a response, and skip comments, which have the place in the queue."""
    while True:
        _, begin, text = (await reader.readuntil(b"\n\n")).partition(b"data: ")
        if begin:
            return _decode_chunk(text)


class GatewayClient(HttpClient):
    """Streams `/v1/completions`. It sends the whole text of the conversation with each turn, as
    programs do; the daemon finds the tokens that it has already computed.
    """

    def __init__(self, port: int, key: str, model: str):
        headers = f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        super().__init__(port, "/v1/completions", headers)
        self.last_answer = ""
        self._model, self._history = model, ""

    async def send_request(self, request: Request) -> Stream:
        """Send the text and read its answer to the end."""
        requested_s = time.perf_counter()
        self._history += request.text
        reader = await self.post(self._body(request))
        arrivals: list[float] = []
        pieces: list[str] = []
        end = _Chunk()
        status = await reader.readline()
        if b" 200 " in status:
            while not (end.usage or end.error):
                end = await _read_chunk(reader)
                for text in (choice.text for choice in end.choices if choice.text):
                    arrivals.append(time.perf_counter())
                    pieces.append(text)
        if end.usage:
            await reader.readuntil(_END)
        else:
            self.close()
        self.last_answer = "".join(pieces)
        self._history += self.last_answer
        return _stream(request, requested_s, arrivals, end)

    def forget(self) -> None:
        """Begin another conversation."""
        self._history = ""

    def _body(self, request: Request) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": self._history,
            "max_tokens": request.tokens,
            "temperature": 0,
            "priority": request.priority,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.schema is None:
            return body | {"ignore-eos": True}
        return body | {"json-schema": request.schema}


def _stream(request: Request, requested_s: float, arrivals: list[float], end: _Chunk) -> Stream:
    usage = end.usage or {}
    return Stream(
        requested_s=requested_s,
        arrivals_s=tuple(arrivals),
        tokens=int(usage.get("completion_tokens", 0)),
        tokens_requested=request.tokens,
        label=request.label,
        priority=request.priority,
        input_tokens=int(usage.get("prompt_tokens", 0)),
        cached_tokens=int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)),
        error="" if usage else str(end.error or "refused"),
    )


@dataclass(frozen=True)
class Gateway:
    """A running gateway."""

    port: int
    key: str
    process: psutil.Process

    @asynccontextmanager
    async def client(self, slot: int = -1, model: str = MODEL.stem) -> AsyncIterator[GatewayClient]:
        """Connect a program; the daemon leases slots itself."""
        client = GatewayClient(self.port, self.key, model)
        await client.connect()
        try:
            yield client
        finally:
            client.close()


@asynccontextmanager
async def running(server: Inferd) -> AsyncIterator[Gateway]:
    """Run a gateway before a daemon, with a key whose programs may be of any class."""
    key, entry = new_key("bench")
    with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(f'{entry}user = ""\npriority-max = "urgent"\n')
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inferd", "gateway", "--listen", "127.0.0.1:0"),
            *("--keys", str(keys)),
            env={**os.environ, "INFERD_SOCKET": str(server.socket)},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(START_S_MAX):
                line = await process.stderr.readline()
            if not line.startswith(_SERVING):
                raise SystemExit(f"the gateway did not start: {line.decode()}")
            port = int(line.decode().strip().rpartition(":")[2])
            yield Gateway(port, key, psutil.Process(process.pid))
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()
