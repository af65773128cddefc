"""The HTTP gateway as a side of the bench: its process before a daemon, and its clients."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from inferd.gateways.http.callers import new_key

from .clients import HttpClient, Request
from .daemon import Inferd
from .machine import MODEL
from .streams import Stream

START_S_MAX = 30
_SERVING = "serving HTTP on "
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
    user_keys: Sequence[str] = ()
    """Keys of further users."""

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
async def running(server: Inferd, users: Sequence[str] = ()) -> AsyncIterator[Gateway]:
    """Run a gateway before a daemon, with a key whose programs may be of any class.

    Each of the *users* has a key, too, with the default rights.
    """
    key, entry = new_key("bench")
    keys_of_users = [new_key(user) for user in users]
    with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
        keys, log_path = Path(folder) / "keys.toml", Path(folder) / "log"
        keys.write_text(
            f'{entry}user = ""\npriority-max = "urgent"\n'
            + "".join(entry for _, entry in keys_of_users)
        )
        with log_path.open("wb") as log:  # a pipe would fill up, and the gateway wait
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inferd", "gateway", "--listen", "127.0.0.1:0"),
                *("--keys", str(keys)),
                env={**os.environ, "INFERD_SOCKET": str(server.socket)},
                stderr=log,
            )
        try:
            async with asyncio.timeout(START_S_MAX):
                port = await _up(process, log_path)
            user_keys = [user_key for user_key, _ in keys_of_users]
            yield Gateway(port, key, psutil.Process(process.pid), user_keys)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _up(process: asyncio.subprocess.Process, log: Path) -> int:
    """Return the port that the gateway names in the first line of its log."""
    while True:
        line, newline, _ = _text(log).partition("\n")
        if newline and line.startswith(_SERVING):
            return int(line.rpartition(":")[2])
        if process.returncode is not None:
            raise SystemExit(f"the gateway did not start: {_text(log)}")
        await asyncio.sleep(0.05)


def _text(log: Path) -> str:
    return log.read_text(errors="replace")
