"""Both sides, each with one slot and one request at a time, so that no requests share a batch."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bench import daemon, llama_server
from inferd import AsyncClient, AsyncSession

__all__ = ("SIDES", "Answer", "Side", "post_json")

CTX_SIZE = 512
THREADS = 1
"""Two threads give the same answers, but would wait for each other if another program took a core.
"""
ANSWER_S_MAX = 300
ENDS = {"eos": "eos", "limit": "length", "word": "stop"}


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """An answer's text, tokens and end."""

    text: str
    tokens: list[int]
    end: str


class Side(Protocol):
    """A running side with a model."""

    async def send_request(self, prompt: str, request: Mapping[str, Any]) -> Answer:
        """Return the answer to *prompt*."""


class Inferd:
    """A session of a daemon, which is emptied before each prompt."""

    def __init__(self, session: AsyncSession):
        self._session = session

    async def send_request(self, prompt: str, request: Mapping[str, Any]) -> Answer:
        """Return the answer to *prompt*."""
        await self._session.reset()
        # llama-server samples each token, also those that a grammar forces.
        options = {**request, "jump-forward": False}
        async with self._session.stream(prompt, options=options) as stream:
            text = "".join([piece async for piece in stream])
        return Answer(text, list(stream.tokens), str(stream.metadata["stop_reason"]))


class LlamaServer:
    """llama-server's own /completion."""

    def __init__(self, port: int):
        self._port = port

    async def send_request(self, prompt: str, request: Mapping[str, Any]) -> Answer:
        """Return the answer to *prompt*."""
        body = {**request, "prompt": prompt, "return_tokens": True}
        reply = await asyncio.to_thread(post_json, self._port, "/completion", body)
        end = str(reply["stop_type"])
        return Answer(str(reply["content"]), list(reply["tokens"]), ENDS.get(end, end))


def post_json(port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of llama-server to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"llama-server answered {response.status}: {text}")
    return dict(json.loads(text))


@asynccontextmanager
async def _inferd(model: Path) -> AsyncIterator[Side]:
    text = daemon.configuration(1, CTX_SIZE, {"models-dir": str(model.parent), "cores": THREADS})
    text += f'\n[models."{model.stem}"]\nflash-attn = "on"\n'  # as llama-server does by itself
    async with (
        daemon.running(text) as running,
        AsyncClient(running.socket) as client,
        client.session(model.stem, raw=True) as session,
    ):
        yield Inferd(session)


@asynccontextmanager
async def _llama_server(model: Path) -> AsyncIterator[Side]:
    threads = ("-t", str(THREADS), "-tb", str(THREADS))
    flags = ("-m", str(model), *threads, *llama_server.NO_CACHES)  # the last -m, -t, -tb count
    async with llama_server.running(1, CTX_SIZE, flags) as running:
        yield LlamaServer(running.port)


SIDES = {"inferd": _inferd, "llama-server": _llama_server}
