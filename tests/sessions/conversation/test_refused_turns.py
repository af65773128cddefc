"""Turns that the engine refuses: the session is then as it was before their input."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from inferd.backends.errors import (
    Busy,
    Cancelled,
    InferdError,
    InvalidArgument,
    KvFull,
    PromptTooLong,
    ShuttingDown,
    Timeout,
)
from inferd.scheduler import messages as m
from inferd.sessions import Session, Turn, TurnOptions
from inferd.sessions.table import SessionState
from tests.sessions.conversation.test_sessions import answer, opened
from tests.sessions.doubles import Harness

pytestmark = pytest.mark.asyncio
USER = [{"role": "user", "content": "more"}]


def seen_by_clients(session: Session) -> dict[str, Any]:
    """Return everything that a client sees of a session."""
    return {
        "tokens": session.conversation.tokens(),
        "messages": session.conversation.messages,
        "state": session.state,
        "output": session.read_output(0),
        "metadata": replace(session.metadata(), fingerprint="of the model, once loaded"),
        "turns": (session.turns_begun, session.conversation.turns_back),
        "parameters": session.settings.parameters.effective(),
    }


async def begin_turn(session: Session, **options: Any) -> Turn:
    """Start a turn on a message, as the calls for chats do."""
    async with session.turn_input(lambda: session.add_messages(USER)):
        return await session.start_turn(TurnOptions(**options))


async def error_of(session: Session, turn: Turn) -> InferdError:
    with pytest.raises(InferdError) as caught:
        await session.finish_turn(turn)
    return caught.value


async def had_a_turn(harness: Harness) -> Session:
    session = opened(harness)
    await session.add_messages([{"role": "user", "content": "hello"}])
    await session.start_turn(TurnOptions())
    harness.port.run()
    return session


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"options": {"ctx-size": 4}}, PromptTooLong),
        ({"options": {"stop-tokens": [10_000]}}, InvalidArgument),
    ],
)
async def test_a_turn_that_the_engine_refuses_leaves_nothing_of_its_input(
    earlier: int, options: dict[str, Any], error: type[InferdError]
) -> None:
    harness = Harness()
    session = await had_a_turn(harness) if earlier else opened(harness)
    before = seen_by_clients(session)

    turn = await begin_turn(session, **options)
    harness.port.run()

    assert isinstance(await error_of(session, turn), error)
    assert seen_by_clients(session) == before
    turn = await begin_turn(session)
    harness.port.run()
    await session.finish_turn(turn)
    contents = [message["content"] for message in session.conversation.messages]
    assert contents.count("more") == 1


@pytest.mark.parametrize(
    ("error", "restores"),
    [
        (Busy("the model was swapped"), True),
        (ShuttingDown("the daemon stops"), True),
        (KvFull("no cells are left"), True),
        (Timeout("the queue timeout has passed", data={"timeout": "queue"}), True),
        (Timeout("the timeout has passed", data={"timeout": "total"}), False),
        (Timeout("sampling took too long", data={"timeout": "sampling"}), False),
        (Cancelled("the turn was cancelled"), False),
    ],
)
async def test_the_error_decides_whether_the_message_stays(
    error: InferdError, restores: bool
) -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    before = seen_by_clients(session)
    turn = await begin_turn(session)

    turn.report(m.Failed(turn.spec.id, error.to_wire()))

    await error_of(session, turn)
    assert (seen_by_clients(session) == before) is restores
    assert (session.conversation.messages[-1] == USER[0]) is not restores


async def test_a_turn_with_a_token_keeps_its_message() -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    turn = await begin_turn(session, credit=1)
    harness.port.run()
    assert turn.tokens

    turn.report(m.Failed(turn.spec.id, Busy("the engine is full").to_wire()))

    await error_of(session, turn)
    assert session.conversation.messages[-1] == USER[0]


async def test_the_input_of_set_input_stays() -> None:
    harness = Harness()
    session = opened(harness)
    await answer(harness, session, b"hello")
    await session.set_input(b"next")
    tokens = session.conversation.tokens()
    turn = await session.start_turn(TurnOptions(options={"stop-tokens": [10_000]}))
    harness.port.run()

    await error_of(session, turn)

    assert session.conversation.tokens() == tokens


async def test_options_that_change_meanwhile_stay() -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    turn = await begin_turn(session)
    session.set_options({"n-predict": 3})

    turn.report(m.Failed(turn.spec.id, Busy("the model was swapped").to_wire()))

    await error_of(session, turn)
    assert session.settings.parameters.standing("n-predict") == 3


async def test_the_earlier_history_counts_until_the_turn_has_ended() -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    bytes_of = harness.ledger.kept_bytes.open_bytes
    before = bytes_of(1000)
    turn = await begin_turn(session)
    waiting = bytes_of(1000)
    harness.port.run()
    await session.finish_turn(turn)

    assert waiting > before
    assert session.conversation.last.before is None
    assert bytes_of(1000) == session.kept_bytes


async def test_a_history_of_an_unloaded_model_keeps_its_text_though_its_turn_is_refused() -> None:
    """A swap saves the texts while the turn waits, and refuses the turn afterwards."""
    harness = Harness()
    session = opened(harness)
    await answer(harness, session, b"hello")
    await session.add_text(b"more")
    turn = await session.start_turn(TurnOptions())
    harness.source.old = harness.port
    await session.prepare_migration(also_text=True)
    harness.source.old = None

    turn.report(m.Failed(turn.spec.id, Busy("the model was swapped").to_wire()))

    await error_of(session, turn)
    text = session.conversation.vocabulary.saved_text
    assert text is not None
    assert b"hello" in text and b"more" not in text


async def test_a_cancelled_call_whose_turn_has_not_begun_leaves_nothing() -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    before = seen_by_clients(session)
    with anyio.CancelScope() as scope:
        async with session.turn_input(lambda: session.add_messages(USER)):
            scope.cancel()
            await anyio.lowlevel.checkpoint()

    assert seen_by_clients(session) == before


async def test_a_call_that_came_during_a_turn_is_rolled_back_to_the_end_of_that_turn() -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    turn = await begin_turn(session)

    async def begin_another() -> None:
        with pytest.raises(Busy):
            await begin_turn(session)

    async with anyio.create_task_group() as group, session.exclusive():
        group.start_soon(begin_another)
        await anyio.wait_all_tasks_blocked()
        harness.port.run()
        await session.finish_turn(turn)
        before = seen_by_clients(session)
        harness.ledger.bounds.tasks_max = 0

    assert seen_by_clients(session) == before


async def test_a_session_that_is_unloaded_before_its_turn_begins_stays_unloaded() -> None:
    session = await had_a_turn(Harness())
    with pytest.raises(Cancelled):
        async with session.turn_input(lambda: session.add_messages(USER)):
            session.unload()
            raise Cancelled("the graph was unloaded")
    assert session.state is SessionState.UNLOADED


async def test_another_input_waits_until_a_turn_has_started_or_was_refused() -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    has_input, is_refused = anyio.Event(), anyio.Event()

    async def add_refused() -> None:
        with pytest.raises(Busy):
            async with session.turn_input(
                lambda: session.add_messages([{"role": "user", "content": "refused"}])
            ):
                has_input.set()
                await is_refused.wait()
                raise Busy("too many tasks wait")

    async with anyio.create_task_group() as group:
        group.start_soon(add_refused)
        await has_input.wait()
        group.start_soon(begin_turn, session)
        await anyio.wait_all_tasks_blocked()
        is_refused.set()

    contents = [message["content"] for message in session.conversation.messages]
    assert "refused" not in contents and contents[-1] == "more"


async def test_a_refused_turn_changes_neither_the_time_of_rest_nor_the_unused_parameters() -> None:
    harness = Harness()
    session = await had_a_turn(harness)
    session.settings.parameters.unused = {"mirostat": "not for this input"}
    session.rested_at = rested_at = 1.0
    turn = await begin_turn(session)

    turn.report(m.Failed(turn.spec.id, Busy("the model was swapped").to_wire()))

    await error_of(session, turn)
    assert session.rested_at == rested_at
    assert "mirostat" in session.settings.parameters.unused
