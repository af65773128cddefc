"""Continuing a turn after its connection was lost: the decision, and the requests sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd import AsyncClient, AsyncSession, ConnectionLost, InferdError, InvalidArgument
from inferd.backends.errors import Busy, ShuttingDown, WorkerCrashed
from inferd.ipc.client.attachment import SessionProgress
from inferd.ipc.client.streams import LOSSES_MAX
from inferd.ipc.client.turn_request import RecoveryStep, recovery_step
from tests.ipc.fake_server import METADATA, Exchange, FakeServer, fake_server

BEFORE = SessionProgress(turns=3, tokens=50)
TAKEN = SessionProgress(turns=3, tokens=60)
BEGUN = SessionProgress(turns=4, tokens=60)


@pytest.mark.parametrize(
    ("before", "after", "resumable", "tokens_read", "refused", "step"),
    [
        (None, BEFORE, False, 0, False, RecoveryStep.REPEAT),  # lost before it was sent
        (BEFORE, BEFORE, False, 0, False, RecoveryStep.REPEAT),
        (BEFORE, BEFORE, True, 0, False, RecoveryStep.REPEAT),  # that is the turn before
        (BEFORE, BEFORE, False, 0, True, RecoveryStep.REPEAT),
        (BEFORE, BEFORE, False, 2, False, RecoveryStep.FAIL),  # the daemon does not know the turn
        (BEFORE, BEFORE, True, 2, False, RecoveryStep.FAIL),
        (BEFORE, TAKEN, False, 0, False, RecoveryStep.ANSWER),
        (BEFORE, BEGUN, False, 0, True, RecoveryStep.ANSWER),  # it waited when the daemon drained
        (BEFORE, BEGUN, False, 0, False, RecoveryStep.FAIL),  # another input has followed
        (BEFORE, BEGUN, False, 9, False, RecoveryStep.FAIL),
        (BEFORE, BEGUN, True, 0, False, RecoveryStep.RESUME),
        (BEFORE, BEGUN, True, 9, False, RecoveryStep.RESUME),
        (BEFORE, BEGUN, True, 9, True, RecoveryStep.RESUME),
    ],
)
def test_the_step_after_a_loss(
    before: SessionProgress | None,
    after: SessionProgress,
    resumable: bool,
    tokens_read: int,
    refused: bool,
    step: RecoveryStep,
) -> None:
    found = recovery_step(
        before, after, resumable=resumable, tokens_read=tokens_read, refused=refused
    )
    assert found is step


class LossyDaemon:
    """A daemon that loses the connection during the first *losses* turns, then ends the turn."""

    def __init__(self, server: FakeServer, losses: int, then: SessionProgress, *, detached: bool):
        self.server, self.losses, self.then, self.detached = server, losses, then, detached
        self.at = BEFORE
        server.answers |= {
            "sessions": self.sessions,
            "get_output": self.metadata,
            "stream": self.answer_turn,
            "resume": self.answer_turn,
        }

    async def sessions(self, _: Exchange) -> dict[str, Any]:
        return {"sessions": [{"context": 12, "turns": self.at.turns, "tokens": self.at.tokens}]}

    async def metadata(self, _: Exchange) -> dict[str, Any]:
        reason = "detached" if self.detached else None
        return {"data": msgspec.json.encode({"stop_reason": reason})}

    async def answer_turn(self, exchange: Exchange) -> dict[str, Any]:
        if self.losses:
            self.losses -= 1
            self.at = self.then
            if self.detached and not exchange.params.get("tokens"):
                await exchange.emit({"tokens": [7, 8], "text": b"seen "})
            await exchange.peer.stream.aclose()
            raise ConnectionLost("it was lost")
        await exchange.emit({"tokens": [9], "text": b"rest"})
        return {"metadata": METADATA}


@asynccontextmanager
async def losing(
    folder: Path, losses: int, then: SessionProgress, *, detached: bool = False, **options: Any
) -> AsyncIterator[tuple[FakeServer, AsyncSession]]:
    async with fake_server(folder) as server:
        LossyDaemon(server, losses, then, detached=detached)
        async with (
            AsyncClient(server.path, **options) as client,
            client.session("m", session_id="known", resume=True) as session,
        ):
            yield server, session


def turns(server: FakeServer) -> list[tuple[str, dict[str, Any]]]:
    return [(name, params) for name, params in server.calls if name in ("stream", "resume")]


@pytest.mark.anyio
async def test_a_turn_that_never_arrived_is_requested_again(tmp_path: Path) -> None:
    async with losing(tmp_path, 1, BEFORE) as (server, session):
        assert [piece async for piece in session.stream("hello")] == ["rest"]
        assert [params["prompt"] for _, params in turns(server)] == ["hello", "hello"]


@pytest.mark.anyio
async def test_an_input_that_arrived_is_not_sent_twice(tmp_path: Path) -> None:
    async with losing(tmp_path, 2, TAKEN) as (server, session):
        assert [piece async for piece in session.stream("hello")] == ["rest"]
        assert [p.get("prompt") for _, p in turns(server)] == ["hello", None, None]


@pytest.mark.anyio
async def test_an_interrupted_turn_is_resumed_with_the_part_that_was_read(tmp_path: Path) -> None:
    async with losing(tmp_path, 1, BEGUN, detached=True) as (server, session):
        stream = session.stream("hello", priority="urgent")
        assert [piece async for piece in stream] == ["seen ", "rest"]
        assert stream.tokens == [7, 8, 9]
        name, params = turns(server)[-1]
        assert (name, params["tokens"], params["text"]) == ("resume", [7, 8], b"seen ")
        assert params["priority"] == "urgent"
        # The session was opened again by its id, over a new connection.
        assert len(server.peers) == 2
        assert server.names().count("init_execution_context_with_session_id") == 2


class FleetLosingNodes(LossyDaemon):
    """An entry whose node is lost in the first turn, and the next one before its first answer."""

    def __init__(self, server: FakeServer):
        super().__init__(server, 0, BEFORE, detached=False)
        self.lost = ["turn", "context"]

    async def sessions(self, exchange: Exchange) -> dict[str, Any]:
        if self.lost == ["context"]:
            self.lost.clear()
            return {"sessions": []}
        return await super().sessions(exchange)

    async def answer_turn(self, exchange: Exchange) -> dict[str, Any]:
        if "turn" in self.lost:
            self.lost.remove("turn")
            raise WorkerCrashed("the node was lost", data={"cause": "node", "node": "a"})
        return await super().answer_turn(exchange)


@pytest.mark.anyio
async def test_a_turn_outlives_the_loss_of_a_second_node_during_its_recovery(
    tmp_path: Path,
) -> None:
    async with fake_server(tmp_path) as server:
        FleetLosingNodes(server)
        async with (
            AsyncClient(server.path) as client,
            client.session("m", session_id="known", resume=True) as session,
        ):
            assert [piece async for piece in session.stream("hello")] == ["rest"]
        assert server.names().count("init_execution_context_with_session_id") == 3


@pytest.mark.anyio
async def test_a_turn_that_the_daemon_no_longer_has_is_an_error(tmp_path: Path) -> None:
    async with losing(tmp_path, 1, BEGUN) as (_, session):
        with pytest.raises(ConnectionLost, match="no longer has the turn") as caught:
            [piece async for piece in session.stream("hello")]
        assert (caught.value.data["tokens"], caught.value.data["text"]) == ([], "")


@pytest.mark.anyio
async def test_a_turn_fails_after_too_many_losses(tmp_path: Path) -> None:
    async with losing(tmp_path, 1000, BEGUN, detached=True) as (server, session):
        with pytest.raises(ConnectionLost, match="2 tokens of the answer") as caught:
            [piece async for piece in session.stream("hello")]
        assert caught.value.data["text"] == "seen "
        assert len(turns(server)) == 1 + LOSSES_MAX


@pytest.mark.anyio
@pytest.mark.parametrize("error", [Busy("full"), ShuttingDown("not yet")])
async def test_attaching_is_retried_after_a_retryable_error(
    error: InferdError, tmp_path: Path
) -> None:
    async with losing(tmp_path, 1, BEGUN, detached=True) as (server, session):
        load, refusals = server.answers["load_by_name_with_config"], 2

        async def refuse(exchange: Exchange) -> dict[str, Any]:
            nonlocal refusals
            refusals -= 1
            if refusals < 0:
                return await load(exchange)
            if isinstance(error, ShuttingDown):
                exchange.peer.requests.clear()
                await exchange.peer.send([6, error.to_wire()])
            raise error

        server.answers["load_by_name_with_config"] = refuse
        assert [piece async for piece in session.stream("hello")] == ["seen ", "rest"]
        assert refusals == -1


@pytest.mark.anyio
@pytest.mark.parametrize(
    "call", ["load_by_name_with_config", "init_execution_context_with_session_id", "set_options"]
)
async def test_a_session_whose_daemon_ends_while_it_opens_is_opened_on_the_next_daemon(
    call: str, tmp_path: Path
) -> None:
    async with fake_server(tmp_path) as server:
        answer = server.answers[call]

        async def lose(exchange: Exchange) -> dict[str, Any]:
            server.answers[call] = answer
            await exchange.peer.send([6, ShuttingDown("it ends").to_wire()])
            raise ConnectionLost("it was lost")

        server.answers[call] = lose
        async with (
            AsyncClient(server.path) as client,
            client.session("m", session_id="new", resume=True, options={"temp": 0}) as session,
        ):
            assert session.context == 12
            assert server.names()[-1] == "set_options"
            assert len(server.peers) == 2
        assert server.names()[-2:] == ["finalize_execution_context", "unload"]


def test_only_a_session_with_an_id_can_resume() -> None:
    with pytest.raises(InvalidArgument, match="session_id"):
        AsyncClient("nowhere").session("m", resume=True)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_the_time_to_attach_again_is_above_0(timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="resume_timeout"):
        AsyncClient("nowhere", resume_timeout=timeout)
