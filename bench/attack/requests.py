"""Requests of a user: over the daemon's socket, or over the HTTP gateway with the user's key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import httpx

from bench.daemon import options
from inferd import AsyncClient, InferdError

from .attack import Service

TIMEOUT_S = 60.0
ERRORS = (InferdError, httpx.HTTPError)
"""The errors of all requests."""


class Requests(Protocol):
    """A user's requests over one connection to the daemon, or over HTTP."""

    def stream(self, prompt: str, tokens: int) -> AsyncIterator[str]:
        """Stream an answer in a conversation of its own."""

    async def embed(self, texts: Sequence[str]) -> None:
        """Compute the embeddings of texts."""

    async def list_models(self) -> None:
        """List the models: a cheap call."""


class SocketRequests:
    """Requests over a connection to the daemon."""

    def __init__(self, client: AsyncClient, service: Service):
        self._client, self._service = client, service

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[str]:
        """Stream an answer in a session of its own."""
        service = self._service
        async with self._client.session(
            service.model, raw=True, priority=service.priority
        ) as session:
            async for piece in session.stream(prompt, options=options(tokens)):
                yield piece

    async def embed(self, texts: Sequence[str]) -> None:
        """Compute the embeddings of texts."""
        await self._client.embed(self._service.model, texts, priority=self._service.priority)

    async def list_models(self) -> None:
        """List the models."""
        await self._client.models()


class HttpRequests:
    """Requests to the gateway's API of OpenAI."""

    def __init__(self, client: httpx.AsyncClient, service: Service):
        self._client = client
        self._fields = {"model": service.model, "priority": service.priority}

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[str]:
        """Stream a completion."""
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
        body |= {"temperature": 0, "ignore-eos": True}
        async with self._client.stream(
            "POST", "/v1/completions", json=self._fields | body
        ) as response:
            if response.is_error:
                await response.aread()
            _check(response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for text in _texts(json.loads(line[6:]), response):
                        yield text

    async def embed(self, texts: Sequence[str]) -> None:
        """Compute the embeddings of texts."""
        body = self._fields | {"input": list(texts), "encoding_format": "base64"}
        _check(await self._client.post("/v1/embeddings", json=body))

    async def list_models(self) -> None:
        """List the models."""
        _check(await self._client.get("/v1/models"))


def _check(response: httpx.Response) -> None:
    if response.is_error:
        raise _error(f"HTTP {response.status_code}", response)


def _texts(chunk: dict[str, Any], response: httpx.Response) -> list[str]:
    """Return the texts of a chunk of a stream, or raise the error in it."""
    if "error" in chunk:
        raise _error(f"HTTP stream: {chunk['error'].get('code')}", response)
    return [choice["text"] for choice in chunk["choices"] if choice["text"]]


def _error(name: str, response: httpx.Response) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(name, request=response.request, response=response)


def error_name(error: Exception) -> str:
    """Return the short name of one of `ERRORS`."""
    if isinstance(error, InferdError):
        return error.name
    return str(error) if isinstance(error, httpx.HTTPStatusError) else type(error).__name__


@asynccontextmanager
async def connect(service: Service) -> AsyncIterator[Requests]:
    """Connect to the gateway if there is one, else to the daemon."""
    if not service.gateway:
        async with AsyncClient(service.socket) as client:
            yield SocketRequests(client, service)
        return
    async with httpx.AsyncClient(
        base_url=service.gateway,
        headers={"Authorization": f"Bearer {service.gateway_key}"},
        timeout=TIMEOUT_S,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
        verify=False,  # there is no TLS, and reading the authorities takes 30 ms
    ) as web:
        yield HttpRequests(web, service)
