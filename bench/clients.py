"""Equal clients: one asyncio connection a stream, opened before the clock starts."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Protocol

from tools.build_engine import ROOT

from .scenario import Job, Stream, check_cached

HTTP_LINE_BYTES_MAX = 1 << 20


class Client(Protocol):
    """One program that asks for one stream at a time."""

    async def ask(self, text: str, n_predict: int) -> Stream:
        """Send the prompt, read its answer to the end."""


async def ask_together(clients: Sequence[Client], job: Job) -> list[Stream]:
    """Let every client ask at once; return the streams in the clients' order."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.ask(text, job.n_predict))
            for client, text in zip(clients, job.prompts(), strict=True)
        ]
    return [task.result() for task in tasks]


class LlamaServerClient:
    """Streams llama-server's own /completion over one kept HTTP connection."""

    def __init__(self, slot: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.slot, self.reader, self.writer = slot, reader, writer

    @classmethod
    async def connect(cls, port: int, slot: int) -> LlamaServerClient:
        """Open the connection of a client that is to be served in *slot*."""
        opened = await asyncio.open_connection("127.0.0.1", port, limit=HTTP_LINE_BYTES_MAX)
        return cls(slot, *opened)

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()

    async def ask(self, text: str, n_predict: int) -> Stream:
        """Send the prompt, read its answer to the end."""
        asked_s = time.perf_counter()
        arrivals: list[float] = []
        self.writer.write(_request(text, n_predict, self.slot))
        while True:
            line = await self.reader.readline()
            if not line:
                raise ConnectionError("llama-server closed the connection")
            if not line.startswith(b"data: "):
                continue  # headers, and the chunks' lengths
            event: dict[str, Any] = json.loads(line[6:])
            if event["stop"]:
                await self._end_of_body()
                check_cached(event["timings"]["cache_n"])
                return Stream(asked_s, tuple(arrivals), int(event["tokens_predicted"]))
            arrivals.append(time.perf_counter())

    async def _end_of_body(self) -> None:
        while await self.reader.readline() not in (b"0\r\n", b""):
            pass
        await self.reader.readline()


def _request(text: str, n_predict: int, slot: int) -> bytes:
    # A chain of the temperature alone is llama-server's cheapest way to sample greedily.
    body = {"prompt": text, "n_predict": n_predict, "stream": True, "temperature": 0}
    body |= {"samplers": ["temperature"], "ignore_eos": True, "cache_prompt": False}
    # Left to itself it takes the least recently used slots, in time not next to each other, and
    # llama.cpp cuts a batch with gaps into several (4 streams: 105 to 122 tok/s instead of 155).
    body["id_slot"] = slot
    raw = json.dumps(body).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def llama_server_run(port: int, job: Job) -> list[Stream]:
    """Run the scenario on llama-server."""
    clients = [await LlamaServerClient.connect(port, slot) for slot in range(job.streams)]
    try:
        return await ask_together(clients, job)
    finally:
        for client in clients:
            client.close()


async def bare_run(job: Job) -> list[Stream]:
    """Run the scenario in a bare loop, a process of its own."""
    command = [sys.executable, "-m", "bench.bare", *map(str, astuple(job))]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the bare loop ended with status {process.returncode}")
    return [Stream(asked_s, tuple(times), tokens) for asked_s, times, tokens in json.loads(out)]
