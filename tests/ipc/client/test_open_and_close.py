"""Sessions without a block: opened, closed, and forgotten."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio
import pytest

from inferd import AsyncClient, Client, InvalidArgument
from tests.ipc.fake_server import FakeServer, fake_server

OPENED = ["load_by_name_with_config", "init_execution_context"]
CLOSED = ["finalize_execution_context", "unload"]


def test_a_session_is_opened_and_closed_once(server: FakeServer) -> None:
    with Client(server.path) as client:
        session = client.session("m").open()
        assert session.open() is session
        assert session.chat("hi") == "hi"
        session.close()
        session.close()
        assert server.names() == [*OPENED, "chat", *CLOSED]
        with pytest.raises(InvalidArgument, match="not open"):
            session.chat("hi")
        with session:
            session.open()
            session.close()
        assert server.names().count("unload") == 2


def test_a_session_that_is_open_is_not_entered_again(server: FakeServer) -> None:
    with Client(server.path) as client:
        session = client.session("m").open()
        with pytest.raises(InvalidArgument, match="already open"):
            session.__enter__()
        session.close()


def test_closing_a_session_that_was_never_open_does_nothing(server: FakeServer) -> None:
    with Client(server.path) as client:
        client.session("m").close()
        assert server.names() == []


def test_a_closed_session_closes_its_branches(server: FakeServer) -> None:
    with Client(server.path) as client:
        session = client.session("m").open()
        branches = session.fork(2)
        assert branches[0].open() is branches[0]
        session.close()
        assert server.names().count("finalize_execution_context") == 3
        branches[0].close()
        assert server.names().count("finalize_execution_context") == 3


def test_a_forgotten_session_warns_and_is_closed_in_the_daemon(server: FakeServer) -> None:
    with Client(server.path) as client:
        session = client.session("m").open()
        with pytest.warns(ResourceWarning, match=r"unclosed <AsyncSession with m \[context \d+\]>"):
            del session
            gc.collect()
        client.stats()
        assert server.names() == [*OPENED, *CLOSED, "stats"]


def test_a_session_is_kept_while_its_turn_is_read(server: FakeServer) -> None:
    with Client(server.path) as client:
        stream = client.session("m").open().stream("one two")
        pull = client.session("m").open().pull("a b")
        gc.collect()
        assert [*stream] == ["one ", "two ", "."]
        assert [*pull] == ["a ", "b "]
        with pytest.warns(ResourceWarning, match="unclosed <AsyncSession with m"):
            del stream, pull
            gc.collect()


def test_a_session_of_a_closed_client_is_forgotten_in_silence(server: FakeServer) -> None:
    client = Client(server.path)
    session = client.session("m").open()
    client.close()
    del session
    gc.collect()
    assert server.names() == OPENED


@pytest.mark.anyio
async def test_the_asynchronous_session_is_opened_and_closed(
    tmp_path: Path, anyio_backend: str
) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        session = await client.session("m").open()
        assert await session.open() is session
        assert await session.chat("hi") == "hi"
        await session.aclose()
        await session.aclose()
        assert server.names() == [*OPENED, "chat", *CLOSED]
        forgotten = await client.session("m").open()
        with pytest.warns(ResourceWarning, match="unclosed <AsyncSession with m"):
            del forgotten
            gc.collect()
        await server.await_call("unload", 2)


@pytest.mark.anyio
async def test_a_forgotten_session_on_a_graph_of_the_program_leaves_it_loaded(
    tmp_path: Path, anyio_backend: str
) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        graph = await client.load_by_name("m")
        forgotten = await client.session("m", graph=graph).open()
        with pytest.warns(ResourceWarning, match="unclosed <AsyncSession with m"):
            del forgotten
            gc.collect()
        await server.await_call("finalize_execution_context")
        await client.stats()  # a call that was sent before has arrived
        assert "unload" not in server.names()


@pytest.mark.anyio
async def test_a_session_is_opened_by_one_task_at_a_time(
    tmp_path: Path, anyio_backend: str
) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        session = client.session("m")
        refused: list[str] = []

        async def open_it() -> None:
            try:
                await session.open()
            except InvalidArgument as exc:
                refused.append(exc.message)

        async with anyio.create_task_group() as group:
            group.start_soon(open_it)
            group.start_soon(open_it)
        assert refused == ["the session is being opened"]
        assert server.names() == OPENED
        await session.aclose()


@pytest.mark.anyio
async def test_a_session_whose_opening_is_cancelled_can_be_opened_again(
    tmp_path: Path, anyio_backend: str
) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        session = client.session("m")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await session.open()
        await session.open()
        await session.aclose()
        assert server.names()[-4:] == [*OPENED, *CLOSED]
