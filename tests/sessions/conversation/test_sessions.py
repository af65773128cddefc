"""Sessions on a real engine in this process: input, turns, ends, history, cap, expiry."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from inferd.backends.errors import (
    Busy,
    Cancelled,
    EndOfSequence,
    InvalidArgument,
    SessionBusy,
    SessionExpired,
)
from inferd.scheduler.owner import Owner
from inferd.sessions import DormantLimits, Opening, Session, Turn, TurnOptions
from inferd.sessions.table import SessionState
from inferd.wire.frames import CREDIT_MAX
from tests.sessions.doubles import Harness, Source

pytestmark = pytest.mark.asyncio
HERE, THERE = object(), object()


def opened(harness: Harness, connection: object = HERE, **fields: object) -> Session:
    session, _ = harness.manager.open_session(
        Opening(connection, Owner(1000), harness.source, {}, **fields)  # type: ignore[arg-type]
    )
    return session


async def answer(harness: Harness, session: Session, text: bytes) -> bytes:
    await session.set_input(text)
    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(turn)
    return bytes(turn.text)


async def test_a_turn_goes_from_input_to_output() -> None:
    harness = Harness()
    session = opened(harness)

    assert await answer(harness, session, b"hello") == b"hello"
    assert session.state is SessionState.DONE
    assert session.read_output(0) == b"hello"


async def test_the_length_of_a_history_does_not_take_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    session = opened(harness)
    assert session.conversation.size == 0
    await answer(harness, session, b"hello")
    size = len(session.conversation.tokens())
    with monkeypatch.context() as patch:
        patch.setattr(Turn, "history", lambda _: pytest.fail("its tokens are put together"))
        assert session.conversation.size == size == 7 + 5
        assert not session.leaves_state
        await session.ready_client()
        await session.prepare_migration(also_text=False)


async def test_metadata_is_valid_json_at_any_time() -> None:
    harness = Harness()
    session = opened(harness)
    before = msgspec.json.decode(session.read_output(1))
    await session.set_input(b"hello")
    counted = msgspec.json.decode(session.read_output(1))

    assert before["input_tokens"] == before["output_tokens"] == 0
    assert counted["input_tokens"] == 7
    assert {"llama_build_number", "llama_commit", "stop_reason", "seed"} <= before.keys()


async def test_input_replaces_the_history_and_with_append_it_adds() -> None:
    harness = Harness()
    session = opened(harness)
    await answer(harness, session, b"one")
    await session.set_input(b"two")
    assert len(session.conversation.prompt) == 5

    session.set_options({"append": True})
    await session.set_input(b"three")
    assert len(session.conversation.prompt) == 5 + 7, (
        "what was not computed yet is part of the history"
    )
    await session.start_turn(TurnOptions())
    harness.port.run()
    await session.set_input(b"four")

    assert bytes(t for t in session.conversation.prompt if t < 256) == b"twothreethreefour"


async def test_compute_without_new_input_starts_the_same_prompt_anew() -> None:
    harness = Harness()
    session = opened(harness)
    await answer(harness, session, b"again")

    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(turn)

    assert session.read_output(0) == b"again"


async def test_single_tokens_end_with_end_of_sequence_and_then_start_anew() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"ab")

    pieces = [await single(harness, session) for _ in range(2)]
    with pytest.raises(EndOfSequence):
        await single(harness, session)

    assert pieces == [b"a", b"b"]
    assert await single(harness, session) == b"a"


async def single(harness: Harness, session: Session) -> bytes:
    """Call compute_single while the engine turns."""
    outcome: bytes | EndOfSequence = b""
    async with anyio.create_task_group() as group:
        group.start_soon(keep_turning, harness)
        try:
            outcome = await session.pull_token(TurnOptions())
        except EndOfSequence as exc:
            outcome = exc
        group.cancel_scope.cancel()
    if isinstance(outcome, EndOfSequence):
        raise outcome
    return outcome


async def keep_turning(harness: Harness) -> None:
    while True:
        harness.port.turn()
        await anyio.lowlevel.checkpoint()


async def test_n_predict_holds_in_single_mode_and_its_text_comes_before_the_end() -> None:
    harness = Harness()
    session = opened(harness)
    session.set_options({"n-predict": 2})
    await session.set_input(b"abcdef")

    assert [await single(harness, session), await single(harness, session)] == [b"a", b"b"]
    with pytest.raises(EndOfSequence):
        await single(harness, session)
    assert msgspec.json.decode(session.read_output(1))["stop_reason"] == "length"


async def test_a_stop_text_holds_in_single_mode_and_withheld_text_comes_before_the_end() -> None:
    harness = Harness()
    session = opened(harness)
    session.set_options({"stop": "##!"})
    await session.set_input(b"a##")

    pieces = [await single(harness, session) for _ in range(4)]
    with pytest.raises(EndOfSequence):
        await single(harness, session)

    assert b"".join(pieces) == b"a##"
    assert pieces[-1] == b"##", "the text withheld for a stop text came as the last piece"


async def test_fini_single_ends_the_turn_and_keeps_what_was_read() -> None:
    harness = Harness()
    session = opened(harness)
    session.set_options({"append": True})
    await session.set_input(b"abcdef")
    await single(harness, session)

    session.clear_output()
    harness.port.run()

    assert session.read_output(0) == b""
    assert session.state is SessionState.READY
    await session.set_input(b"x")
    assert bytes(t for t in session.conversation.prompt if t < 256) == b"abcdef" + b"a" + b"x"


async def test_parameters_belong_to_their_session() -> None:
    harness = Harness()
    one, other = opened(harness), opened(harness)
    one.set_options({"n-predict": 1})

    assert await answer(harness, one, b"hello") == b"h"
    assert await answer(harness, other, b"hello") == b"hello"


async def test_a_session_takes_one_turn_at_a_time() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    await session.start_turn(TurnOptions())

    with pytest.raises(SessionBusy):
        await session.start_turn(TurnOptions())
    with pytest.raises(SessionBusy):
        await session.set_input(b"other")


async def test_cancel_takes_effect_at_once_and_the_next_turn_is_not_disturbed_by_it() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    turn = await session.start_turn(TurnOptions())

    assert session.cancel_turn()
    with pytest.raises(Cancelled):
        await session.finish_turn(turn)
    again = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(again)

    assert bytes(again.text) == b"hello"
    assert session.state is SessionState.DONE


async def test_a_caller_that_is_cancelled_cancels_its_turn() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    turn = await session.start_turn(TurnOptions())

    with anyio.move_on_after(0):
        await session.finish_turn(turn)

    assert session.state is SessionState.FAILED
    harness.port.run()
    assert harness.port.bench.engine.statistics()["generated"] == 0


async def test_the_cap_refuses_the_next_session_and_says_when() -> None:
    harness = Harness(sessions_max=2)
    harness.manager.dormant.limits = DormantLimits(sessions_max=0)  # none may yield its place
    opened(harness)
    harness.now = 100.0
    opened(harness)

    with pytest.raises(Busy) as caught:
        opened(harness)

    assert caught.value.data["sessions_max"] == 2
    assert caught.value.retry_after_s == 200.0


async def test_idle_sessions_expire_by_a_timer_and_busy_ones_do_not() -> None:
    harness = Harness()
    harness.manager.live.idle_timeout_s = 0.05
    idle, busy = opened(harness), opened(harness)
    await busy.set_input(b"hello")
    await busy.start_turn(TurnOptions())
    harness.now = 1.0

    with anyio.move_on_after(0.02):
        await harness.manager.expire_idle()

    with pytest.raises(SessionExpired):
        harness.manager.live.get_session(HERE, idle.handle)
    assert harness.manager.live.get_session(HERE, busy.handle) is busy


async def test_a_handle_of_another_connection_is_answered_like_one_that_never_was() -> None:
    harness = Harness()
    session = opened(harness)

    with pytest.raises(InvalidArgument) as foreign:
        harness.manager.live.get_session(THERE, session.handle)
    with pytest.raises(InvalidArgument) as unknown:
        harness.manager.live.get_session(THERE, 999)

    assert type(foreign.value) is type(unknown.value)
    assert foreign.value.hint == unknown.value.hint


async def test_a_session_with_an_id_outlives_its_connection_and_only_its_user_gets_it() -> None:
    harness = Harness()
    session = opened(harness, session_id="mine")
    await answer(harness, session, b"hello")
    harness.manager.close_connection(HERE)

    other, attached_other = harness.manager.open_session(
        Opening(THERE, Owner(1001), harness.source, {}, "mine")
    )
    back, attached = harness.manager.open_session(
        Opening(THERE, Owner(1000), harness.source, {}, "mine")
    )

    assert not attached_other
    assert other is not session
    assert attached
    assert bytes(t for t in back.conversation.prompt if t < 256) == b"hellohello"


async def test_the_same_id_on_one_connection_is_the_same_session_and_on_two_it_is_busy() -> None:
    harness = Harness()
    session = opened(harness, session_id="mine")

    assert opened(harness, session_id="mine") is session
    with pytest.raises(SessionBusy):
        opened(harness, THERE, session_id="mine")


@pytest.mark.parametrize("dormant", [False, True])
async def test_a_session_is_attached_only_with_its_own_model(dormant: bool) -> None:
    harness = Harness()
    session = opened(harness, session_id="mine")
    if dormant:
        harness.manager.detach_session(session)
    other = Source(harness.port, "other")
    with pytest.raises(InvalidArgument, match="'mine' has model 'echo', not 'other'"):
        harness.manager.open_session(Opening(HERE, Owner(1000), other, {}, "mine"))
    assert opened(harness, session_id="mine") is session


@pytest.mark.parametrize("session_id", [None, "mine"])
async def test_only_a_session_with_an_id_is_said_to_be_kept_when_it_expires(
    session_id: str | None,
) -> None:
    harness = Harness()
    session = opened(harness, session_id=session_id)
    handle = session.handle
    harness.manager.detach_session(session, expired=True)
    with pytest.raises(SessionExpired) as caught:
        harness.manager.live.get_session(HERE, handle)
    assert ("by its session id" in caught.value.hint) is (session_id is not None)
    assert ("open a new context" in caught.value.hint) is (session_id is None)


async def test_an_expired_session_of_an_unloaded_graph_is_not_said_to_be_kept() -> None:
    harness = Harness()
    session = opened(harness, session_id="mine")
    session.unload()
    harness.manager.detach_session(session, expired=True)
    with pytest.raises(SessionExpired, match="idle") as caught:
        harness.manager.live.get_session(HERE, session.handle)
    assert "open a new context" in caught.value.hint


async def test_unnamed_sessions_end_with_their_connection() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    await session.start_turn(TurnOptions())

    harness.manager.close_connection(HERE)
    harness.port.run()

    assert len(harness.manager.live) == 0
    assert session.state is SessionState.CLOSED
    assert harness.port.bench.engine.statistics()["generated"] == 0


async def test_dormant_sessions_are_bounded_and_the_longest_dormant_goes() -> None:
    harness = Harness(sessions_max=10)
    for name in ("a", "b", "c"):
        opened(harness, session_id=name)
    harness.manager.close_connection(HERE)

    assert len(harness.manager.dormant) == 2
    await harness.manager.deletion.drain()
    assert harness.port.deleted == [(Owner(1000), "id:a")]
    _, attached = harness.manager.open_session(Opening(HERE, Owner(1000), harness.source, {}, "a"))
    assert not attached


async def test_waiting_turns_are_bounded_per_owner_and_the_refusal_says_when() -> None:
    harness = Harness(sessions_max=5, waiting_max=2)
    for _ in range(2):
        session = opened(harness)
        await session.set_input(b"x")
        await session.start_turn(TurnOptions())
    third = opened(harness)
    await third.set_input(b"x")

    with pytest.raises(Busy) as caught:
        await third.start_turn(TurnOptions())

    assert caught.value.data["queue_length"] == 2
    assert caught.value.retry_after_s > 0
    harness.port.run()
    await third.start_turn(TurnOptions())


async def test_an_unloaded_session_can_be_read_and_nothing_else() -> None:
    harness = Harness()
    session = opened(harness)
    await answer(harness, session, b"hello")

    session.unload()

    assert session.read_output(0) == b"hello"
    with pytest.raises(InvalidArgument):
        await session.set_input(b"more")
    with pytest.raises(InvalidArgument):
        await session.start_turn(TurnOptions())


async def test_a_chat_after_raw_text_begins_anew() -> None:
    harness = Harness()
    session = opened(harness)
    await session.add_messages([{"role": "user", "content": "first"}])
    await session.set_input(b"raw")

    await session.add_messages([{"role": "user", "content": "second"}])

    assert session.conversation.messages == [{"role": "user", "content": "second"}]


async def test_a_refused_turn_leaves_the_text_of_a_history_of_another_vocabulary() -> None:
    """The call retokenizes the history before it adds its input."""
    harness = Harness()
    session = opened(harness)
    await session.add_text(b"hello")
    session.conversation.vocabulary.hash, session.conversation.vocabulary.saved_text = (
        "another",
        b"hello, as it was said",
    )
    harness.ledger.bounds.tasks_max = 0
    with pytest.raises(Busy):
        async with session.turn_input(lambda: session.add_text(b"more")):
            await session.start_turn(TurnOptions())
    said = await harness.port.detokenize(session.conversation.tokens())
    assert b"hello, as it was said" in said and b"more" not in said
    assert session.conversation.vocabulary.hash == harness.port.info.vocab_hash

    await session.add_text(b"more")
    said = await harness.port.detokenize(session.conversation.tokens())
    assert b"hello, as it was said" in said and b"more" in said
    assert session.conversation.vocabulary.saved_text is None


async def test_a_turn_continues_elsewhere_with_no_more_credit_than_engines_count() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    turn = await session.start_turn(TurnOptions(credit=1))
    for _ in range(3):
        turn.add_credit(CREDIT_MAX)

    spec = turn.continue_on(turn.client)

    assert spec is not None and spec.credit == CREDIT_MAX
