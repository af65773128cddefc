"""The programs of each kind run, and give the same with both clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from inferd import AsyncClient, Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.examples import programs as p

PROGRAMS: list[
    tuple[Callable[[Client, str], str], Callable[[AsyncClient, str], Awaitable[str]], str]
] = [
    (p.complete, p.complete_async, "2 words, 8 tokens"),
    (p.talk, p.talk_async, "system user assistant, 1 turns"),
    (p.stream, p.stream_async, "tell me, eos"),
    (p.embed, p.embed_async, "2 of 16, True, True"),
    (p.use_tools, p.use_tools_async, "3, add 1"),
    (p.extract, p.extract_async, "Oslo -4 OSLO It snows."),
    (p.manage, p.manage_async, "True echo True [] 0 False True"),
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(echo_model("hermes", tool_format="hermes")) as running:
        yield running


@pytest.mark.parametrize(("program", "_", "expected"), PROGRAMS)
def test_a_synchronous_program_runs(
    program: Callable[[Client, str], str], _: object, expected: str, daemon: RunningDaemon
) -> None:
    with Client(daemon.socket) as client:
        assert program(client, "hermes") == expected


@pytest.mark.anyio
@pytest.mark.parametrize(("_", "program", "expected"), PROGRAMS)
async def test_an_asynchronous_program_runs(
    _: object,
    program: Callable[[AsyncClient, str], Awaitable[str]],
    expected: str,
    daemon: RunningDaemon,
    anyio_backend: str,
) -> None:
    async with AsyncClient(daemon.socket) as client:
        assert await program(client, "hermes") == expected
