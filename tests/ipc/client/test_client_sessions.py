"""Conversations, streams and pulls of the asynchronous client, under asyncio and trio."""

from __future__ import annotations

import gc
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from inferd import (
    AsyncClient,
    AsyncSession,
    Busy,
    Cancelled,
    ConnectionLost,
    InvalidArgument,
    NotFound,
    Piece,
    QueueEvent,
    Reply,
    SessionBusy,
    Timeout,
    WorkerCrashed,
)
from inferd.wire.frames import pack_frame
from tests.ipc.fake_server import CANCELLED, METADATA, Exchange, FakeServer, fake_server

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def talking(folder: Path, **options: Any) -> AsyncIterator[tuple[FakeServer, AsyncSession]]:
    async with (
        fake_server(folder) as server,
        AsyncClient(server.path, **options) as client,
        client.session("m") as session,
    ):
        yield server, session


def _loop() -> str:
    return "trio" if trio.lowlevel.in_trio_run() else "asyncio"


async def test_a_stream_has_pieces_tokens_and_metadata(
    tmp_path: Path, anyio_backend_name: str
) -> None:
    assert _loop() == anyio_backend_name
    async with talking(tmp_path) as (server, session):
        stream = session.stream("one two", options={"temp": 0}, queue_timeout=5)
        assert not stream.metadata
        assert [piece async for piece in stream] == ["one ", "two ", "."]
        assert (stream.tokens, stream.metadata, session.metadata) == ([0, 1], METADATA, METADATA)
        assert [piece async for piece in stream] == []
        sent = server.calls[-1][1]
        assert (sent["prompt"], sent["priority"]) == ("one two", "normal")
        assert (sent["options"], sent["queue_timeout_s"]) == ({"temp": 0}, 5)
        await stream.aclose()
        assert "cancel" not in server.names()


async def test_a_waiting_turn_reports_its_place_and_then_streams_all_pieces(tmp_path: Path) -> None:
    places: list[QueueEvent] = []
    async with talking(tmp_path) as (server, session):
        stream = session.stream("one two", on_queue=places.append)
        assert [piece async for piece in stream] == ["one ", "two ", "."]
        assert await session.chat("x", on_queue=places.append) == "x"
        assert [place.position for place in places] == [2, 1, 2, 1]
        assert (places[0].waiting, places[0].starts_in_s) == (5, 0.5)
        assert stream.tokens == [0, 1]
        assert server.credits == []
        assert await session.chat("x") == "x"
        assert "queue_events" not in server.calls[-1][1]


@pytest.mark.parametrize("call", ["stream", "chat"])
async def test_an_error_in_on_queue_reaches_the_reader_and_cancels_the_turn(
    call: str, tmp_path: Path
) -> None:
    def bad(place: QueueEvent) -> None:
        raise LookupError(str(place.position))

    async with talking(tmp_path) as (_, session):
        with pytest.raises(LookupError, match="2"):
            if call == "stream":
                [piece async for piece in session.stream("hold", on_queue=bad)]
            else:
                await session.chat("hold", on_queue=bad)
        assert await session.chat("next") == "next"


async def test_branches_are_sessions_on_the_same_lease_and_close_with_their_trunk(
    tmp_path: Path,
) -> None:
    async with talking(tmp_path) as (server, session):
        one, two = await session.fork(2, session_ids=["a", "b"])
        assert (one.context, two.context, one.session_id) == (13, 14, "a")
        assert (one.graph, one.model) == (session.graph, "m")
        assert await one.chat("x") == "x"
        async with two:
            assert await two.chat("y") == "y"
        assert server.calls[-1][0] == "finalize_execution_context"
        assert server.calls[-1][1]["context"] == 14
        with pytest.raises(InvalidArgument):
            await two.chat("closed")
    closed = [params["context"] for name, params in server.calls if name.startswith("finalize")]
    assert closed == [14, 13, 12]
    assert server.names().count("unload") == 1


async def test_sessions_on_a_graph_of_the_program_leave_it_loaded(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        graph = await client.load_by_name("m")
        for _ in range(2):
            async with client.session("m", graph=graph) as session:
                assert (session.graph, await session.chat("x")) == (graph, "x")
        assert server.names().count("load_by_name") == 1
        assert "unload" not in server.names()
        with pytest.raises(InvalidArgument, match="resume"):
            client.session("m", graph=graph, session_id="a", resume=True)


async def test_a_session_is_rewound_and_deleted(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        result = await session.rewind(1)
        assert (result.tokens, result.turns, result.kv) == (5, 1, "recomputed")
        assert server.calls[-1] == ("rewind", {"context": 12, "turns": 1})
        await session.rewind(tokens=3)
        assert server.calls[-1] == ("rewind", {"context": 12, "tokens": 3})
        await session.delete()
        with pytest.raises(InvalidArgument):
            await session.chat("x")
    assert "finalize_execution_context" not in server.names()
    assert server.names()[-1] == "unload"


async def test_characters_are_whole_wherever_their_bytes_are_split(tmp_path: Path) -> None:
    async def split(exchange: Exchange) -> dict[str, Any]:
        data = "é€😀".encode()
        for byte in data:
            await exchange.emit({"tokens": [1], "text": bytes([byte])})
        return {"text": b"\xe2\x82", "metadata": METADATA}

    async with talking(tmp_path) as (server, session):
        server.answers["stream"] = split
        assert [piece async for piece in session.stream("x")] == ["é", "€", "😀", "�"]


async def test_credit_is_granted_in_bulk_as_the_reader_reads(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        stream = session.stream("word " * 200)
        assert await anext(stream) == "word "
        await anyio.wait_all_tasks_blocked()
        assert server.credits == []
        assert len([piece async for piece in stream]) == 200
        assert 5 <= len(server.credits) <= 6 and set(server.credits) == {32}


class Taker:
    """A taker of pieces that refuses further ones after the calls whose numbers are *refused*."""

    def __init__(self, *refused: int):
        self.calls: list[list[str]] = []
        self._refused = refused

    def __call__(self, pieces: Iterator[Piece]) -> bool:
        self.calls.append([str(piece) for piece in pieces])
        return len(self.calls) not in self._refused

    @property
    def text(self) -> str:
        return "".join(piece for call in self.calls for piece in call)


async def test_pieces_that_arrive_at_once_are_passed_in_one_call(tmp_path: Path) -> None:
    async def burst(exchange: Exchange) -> dict[str, Any]:
        events = ({"tokens": [number], "text": b"%d" % number} for number in range(5))
        frames = (pack_frame([4, exchange.number, event]) for event in events)
        await exchange.peer.stream.send(b"".join(frames))
        return {"text": b"end", "metadata": METADATA}

    async with talking(tmp_path) as (server, session):
        server.answers["stream"] = burst
        stream, take = session.stream("x"), Taker()
        assert not await stream.pass_pieces(take)
        assert take.calls == [["0", "1", "2", "3", "4"], ["end"]]
        assert (stream.tokens, stream.metadata) == ([0, 1, 2, 3, 4], METADATA)
        assert not await stream.pass_pieces(take) and len(take.calls) == 2


async def test_a_taker_that_refuses_more_holds_the_turn_at_its_credit(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        stream, take = session.stream("word " * 200), Taker(1)
        assert await stream.pass_pieces(take)
        await anyio.wait_all_tasks_blocked()
        assert len(take.calls) == 1 and server.credits == []
        assert not await stream.pass_pieces(take)
        assert take.text == "word " * 200 + "."
        assert 5 <= len(server.credits) <= 6 and set(server.credits) == {32}


async def test_an_error_of_a_taker_is_raised_and_ends_only_its_turn(tmp_path: Path) -> None:
    def bad(pieces: Iterator[Piece]) -> bool:
        raise LookupError(next(pieces))

    async with talking(tmp_path) as (server, session):
        with pytest.raises(LookupError, match="held"):
            await session.stream("hold").pass_pieces(bad)
        assert await session.chat("next") == "next"
        assert "cancel" in server.names()


@pytest.mark.parametrize("takes_more", [True, False])
async def test_a_task_that_is_cancelled_while_pieces_are_passed_ends_its_turn(
    takes_more: bool, tmp_path: Path
) -> None:
    taken: list[str] = []

    def take(pieces: Iterator[Piece]) -> bool:
        taken.extend(pieces)
        scope.cancel()
        return takes_more

    async with talking(tmp_path) as (server, session):
        stream = session.stream("hold")
        with anyio.CancelScope() as scope:
            await stream.pass_pieces(take)
        assert scope.cancelled_caught and not await stream.pass_pieces(take)
        assert await session.chat("next") == "next"
        assert taken == ["held "] and "cancel" in server.names()


async def test_a_chat_returns_text_with_metadata(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        reply = await session.chat([{"role": "user", "content": "hi"}], raw=True, priority="high")
        assert (reply, reply.metadata, session.metadata) == ("hi", METADATA, METADATA)
        sent = server.calls[-1][1]
        assert (sent["raw"], sent["priority"], sent["timeout_s"]) == (True, "high", 600)
        again = pickle.loads(pickle.dumps(reply))
        assert (again, again.metadata, type(again)) == ("hi", METADATA, Reply)


async def test_a_session_opens_with_all_its_settings_and_closes_everything(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        fractions: list[float] = []
        async with client.session(
            "m", system="be kind", session_id="mine", priority="high",
            options={"temp": 0}, config={"ctx-size": 9}, on_progress=fractions.append,
        ) as session:  # fmt: skip
            assert (session.graph, session.context, session.attached) == (11, 12, False)
            await session.chat("x")
        assert fractions == [0.25, 0.5, 1.0]
        assert [(n, p) for n, p in server.calls if n != "chat"] == [
            (
                "load_by_name_with_config",
                {"name": "m", "config": '{"ctx-size":9}', "progress": True},
            ),
            (
                "init_execution_context_with_session_id",
                {"graph": 11, "session_id": "mine", "priority": "high"},
            ),
            ("reset", {"context": 12, "system": "be kind"}),
            ("set_options", {"context": 12, "options": {"temp": 0}}),
            ("finalize_execution_context", {"context": 12, "keep": True}),
            ("unload", {"graph": 11, "keep": True}),
        ]  # fmt: skip
        with pytest.raises(InvalidArgument, match="not open"):
            _ = session.context


async def test_the_history_of_an_existing_session_is_kept(tmp_path: Path) -> None:
    async with (
        fake_server(tmp_path) as server,
        AsyncClient(server.path) as client,
        client.session("m", system="be kind", session_id="known") as session,
    ):
        assert session.attached
        assert "reset" not in server.names()
        await session.reset()
        assert server.calls[-1] == ("reset", {"context": 12, "system": "be kind"})


@pytest.mark.parametrize(
    ("failing", "tidied"),
    [
        ("load_by_name_with_config", []),
        ("init_execution_context", ["unload"]),
        ("reset", ["finalize_execution_context", "unload"]),
        ("set_options", ["finalize_execution_context", "unload"]),
    ],
)
@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_a_failed_or_cancelled_enter_leaves_nothing_behind(
    tmp_path: Path, failing: str, tidied: list[str], how: str
) -> None:
    async def refuse(exchange: Exchange) -> dict[str, Any]:
        raise NotFound("no")

    async def enter(client: AsyncClient) -> None:
        async with client.session("m", system="s", options={"temp": 0}):
            pytest.fail("it has opened")

    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        server.answers[failing] = refuse if how == "refused" else Exchange.hold
        if how == "refused":
            with pytest.raises(NotFound):
                await enter(client)
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(enter, client)
                await server.await_call(failing)
                group.cancel_scope.cancel()
        await server.await_idle()
        closing = ("finalize_execution_context", "unload")
        assert [name for name in server.names() if name in closing] == tidied


async def test_closing_a_lost_or_deleted_session_raises_nothing(
    tmp_path: Path,
) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        with pytest.raises(ConnectionLost):
            async with client.session("m") as session:
                await server.peers[0].stream.aclose()
                await session.chat("x")


# Leaving a stream.


async def test_a_deleted_stream_is_cancelled_at_once(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        async for _ in session.stream("hold"):
            break
        await server.await_call("cancel")
        assert await session.chat("next") == "next"


async def test_leaving_async_with_waits_until_the_turn_has_ended(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        async with session.stream("hold") as stream:
            assert await anext(stream) == "held "
        assert not server.busy
        assert stream.metadata == session.metadata == CANCELLED
        assert await session.chat("next") == "next"


async def test_a_stream_left_in_a_variable_is_cancelled_by_the_next_call(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        stream = session.stream("hold")
        async for _ in stream:
            break
        await anyio.wait_all_tasks_blocked()
        assert "cancel" not in server.names()
        assert await session.chat("next") == "next"
        assert (stream.metadata, session.metadata) == (CANCELLED, METADATA)
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_the_metadata_of_a_cancelled_turn_are_in_its_error(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session), anyio.create_task_group() as group:
        group.start_soon(cancel_held_turn, server, session)
        with pytest.raises(Cancelled) as caught:
            await session.chat("hold")
        assert caught.value.data["metadata"] == session.metadata == CANCELLED


async def test_a_turn_that_has_ended_when_its_stream_is_left_has_its_metadata(
    tmp_path: Path,
) -> None:
    async with talking(tmp_path) as (server, session):
        async with session.stream("one two") as stream:
            assert await anext(stream) == "one "
            await server.await_idle()
            await anyio.wait_all_tasks_blocked()
        assert stream.metadata == session.metadata == METADATA
        assert "cancel" not in server.names()


async def test_a_late_stream_has_the_metadata_of_its_end(tmp_path: Path) -> None:
    async with talking(tmp_path) as (_, session):
        stream = session.stream("hold", timeout=0.2)
        with pytest.raises(Timeout):
            async for _ in stream:
                pass
        assert await session.chat("next") == "next"
        assert stream.metadata == CANCELLED


async def cancel_held_turn(server: FakeServer, session: AsyncSession) -> None:
    await server.await_held_turn()
    await session.cancel()


async def test_a_stream_that_was_never_read_sends_nothing(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        async with session.stream("hold"):
            pass
        session.stream("hold")
        await session.stream("hold").aclose()
        await server.await_idle()
        assert "stream" not in server.names()


async def test_a_turn_that_another_task_reads_is_not_disturbed(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(session.chat, "hold")
                await server.await_call("chat")
                with pytest.raises(SessionBusy):
                    await session.chat("mine")
                assert "cancel" not in server.names()
                scope.cancel()
        assert await session.chat("now") == "now"


async def test_a_cancelled_reader_cancels_its_turn(tmp_path: Path) -> None:
    async def read(session: AsyncSession) -> None:
        async for _ in session.stream("hold"):
            pass

    async with talking(tmp_path) as (server, session):
        async with anyio.create_task_group() as group:
            group.start_soon(read, session)
            await server.await_call("stream")
            group.cancel_scope.cancel()
        await server.await_call("cancel")
        assert await session.chat("next") == "next"


async def test_an_error_in_the_loops_body_cancels_the_turn(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        with pytest.raises(LookupError):
            async for _ in session.stream("hold"):
                raise LookupError
        await server.await_call("cancel")


async def test_a_stream_in_a_cycle_is_cancelled_when_it_is_collected(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        stream = session.stream("hold")
        await anext(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
        await server.await_call("cancel")


async def test_cancel_ends_the_turn_that_another_task_reads(tmp_path: Path) -> None:
    pieces: list[str] = []

    async def read(session: AsyncSession) -> None:
        with pytest.raises(Cancelled):
            async for piece in session.stream("hold"):
                pieces.append(piece)  # noqa: PERF401 - the loop ends with an error

    async with talking(tmp_path) as (server, session):
        async with anyio.create_task_group() as group:
            group.start_soon(read, session)
            await server.await_call("stream")
            assert await session.cancel()
        assert pieces == ["held "]
        assert await session.chat("next") == "next"


async def test_leaving_the_session_in_the_middle_of_a_turn_closes_it(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        async with client.session("m") as session:
            stream = session.stream("hold")
            await anext(stream)
        assert server.names()[-3:] == ["cancel", "finalize_execution_context", "unload"]


async def test_a_late_stream_is_a_timeout_after_the_pieces_so_far(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        stream = session.stream("hold", timeout=0.05)
        assert await anext(stream) == "held "
        with pytest.raises(Timeout):
            await anext(stream)
        await server.await_call("cancel")
        assert await session.chat("next") == "next"


async def test_busy_is_retried_but_never_after_the_first_token(tmp_path: Path) -> None:
    async def crash(exchange: Exchange) -> dict[str, Any]:
        await exchange.emit({"tokens": [1], "text": b"some "})
        raise WorkerCrashed("gone")

    async with talking(tmp_path, retries=3) as (server, session):
        pieces = [piece async for piece in session.stream("refuse 3 times")]
        assert (pieces[0], server.names().count("stream")) == ("refuse ", 4)
        with pytest.raises(Busy):
            await anext(session.stream("refuse 5 times"))
        server.answers["stream"] = crash
        before = server.names().count("stream")
        stream = session.stream("x")
        assert await anext(stream) == "some "
        with pytest.raises(WorkerCrashed):
            await anext(stream)
        assert server.names().count("stream") == before + 1


async def test_the_wasi_nn_calls_stream_too(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        await client.set_input(12, 0, "as it is")
        assert "".join([p async for p in client.stream(12)]) == "as it is ."
        async with client.stream(12, "hold", raw=True) as stream:
            assert await anext(stream) == "held "
        assert not server.busy
        assert server.calls[-2][1]["raw"] is True


# Pulls.


async def test_a_pull_requests_every_token(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        pull = session.pull("a b", priority="urgent")
        assert await anext(pull) == "a "
        assert server.names().count("compute_single") == 1
        await session.set_options({"temp": 1})
        assert [piece async for piece in pull] == ["b "]
        assert (pull.metadata, session.metadata) == (METADATA, METADATA)
        assert [piece async for piece in pull] == []
        assert server.calls[-2] == (
            "compute_single",
            {"context": 12, "priority": "urgent", "queue_timeout_s": 0.0},
        )
        assert "fini_single" not in server.names()


async def test_a_pull_adds_to_the_history(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        for _ in range(2):
            assert [piece async for piece in session.pull("a")] == ["a "]
        inputs = [params for name, params in server.calls if name == "set_input"]
        assert [p["index"] for p in inputs] == [1, 0, 0]
        assert inputs[0]["tensor"]["data"] == b'{"append":true}'
        await session._client.set_input(session.context, 0, "b")
        assert [piece async for piece in session.pull()] == ["b "]


async def test_a_pull_left_early_is_ended(tmp_path: Path) -> None:
    async with talking(tmp_path) as (server, session):
        async for _ in session.pull("a b"):
            break
        await server.await_call("fini_single")
        async with session.pull("a b") as pull:
            await anext(pull)
        assert server.names()[-1] == "fini_single"
        pull = session.pull("a b")
        await anext(pull)
        before = server.names().count("fini_single")
        await session.chat("next")
        assert server.names().count("fini_single") == before + 1
        with pytest.raises(StopAsyncIteration):
            await anext(pull)
