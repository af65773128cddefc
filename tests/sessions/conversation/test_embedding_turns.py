"""Sessions whose turns make embeddings, on a real engine in this process."""

from __future__ import annotations

import msgspec
import pytest

from inferd.backends.echo.model import EMBEDDING_SIZE
from inferd.backends.errors import Cancelled, OutOfMemory, UnsupportedOperation
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from inferd.sessions import Opening, Session, TurnOptions
from inferd.sessions.conversation.outputs import embedding_json
from inferd.sessions.table import SessionState
from tests.sessions.doubles import Harness

pytestmark = pytest.mark.asyncio
EMBED = TurnOptions(embeds=True)


def opened(harness: Harness, **options: object) -> Session:
    session, _ = harness.manager.open_session(
        Opening(object(), Owner(1000), harness.source, {"embedding": True, **options})
    )
    return session


async def embed(harness: Harness, session: Session, text: bytes) -> dict[str, object]:
    await session.set_input(text)
    turn = await session.start_turn(EMBED)
    harness.port.run()
    await session.finish_turn(turn)
    found: dict[str, object] = msgspec.json.decode(session.read_output(0))
    return found


async def test_output_0_is_wasmedges_json() -> None:
    harness = Harness()
    session = opened(harness)

    found = await embed(harness, session, b"hello")

    assert list(found) == ["n_embedding", "embedding"]
    assert found["n_embedding"] == EMBEDDING_SIZE == len(found["embedding"])  # type: ignore[arg-type]
    metadata = session.metadata()
    assert (metadata.input_tokens, metadata.output_tokens) == (7, 0)
    assert metadata.stop_reason == "embedded"
    assert session.state is SessionState.DONE


async def test_without_pooling_each_token_has_a_list() -> None:
    harness = Harness()
    found = await embed(harness, opened(harness, pooling="none"), b"hello")

    assert [len(row) for row in found["embedding"]] == [EMBEDDING_SIZE] * 7  # type: ignore[attr-defined]


async def test_the_text_stays_the_prompt_of_whatever_comes_next() -> None:
    harness = Harness()
    session = opened(harness)
    await embed(harness, session, b"hello")
    prompt = session.conversation.tokens()

    session.set_options({"embedding": False})
    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(turn)

    assert m.unpack_tokens(turn.spec.tokens) == prompt
    assert bytes(turn.text) == b"hello"


async def test_a_chat_whose_history_was_embedded_goes_on_as_if_it_had_not() -> None:
    harness = Harness()
    session = opened(harness, embedding=False)
    await session.add_messages([{"role": "user", "content": "hello"}])
    before = list(session.conversation.messages)
    session.set_options({"embedding": True})
    turn = await session.start_turn(EMBED)
    harness.port.run()
    await session.finish_turn(turn)

    session.set_options({"embedding": False})
    await session.add_messages([{"role": "user", "content": "more"}])
    assert session.conversation.messages == [*before, {"role": "user", "content": "more"}]


async def test_calls_for_answers_are_refused_and_leave_the_session_as_it_was() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")

    with pytest.raises(UnsupportedOperation, match="embeddings"):
        await session.start_turn(TurnOptions())
    with pytest.raises(UnsupportedOperation):
        await session.pull_token(TurnOptions())
    assert session.state is SessionState.READY


async def test_options_that_change_meanwhile_hold_from_the_next_turn_on() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    turn = await session.start_turn(EMBED)
    session.set_options({"embedding": False})

    assert turn.spec.embed is not None
    harness.port.run()
    assert turn.embedding is not None


async def test_no_turn_begins_without_the_memory_for_it() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    harness.port.room = OutOfMemory("there is too little")

    with pytest.raises(OutOfMemory):
        await session.start_turn(EMBED)
    assert session.state is SessionState.READY


async def test_a_cancelled_one_has_no_output() -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    turn = await session.start_turn(EMBED)
    session.cancel_turn()
    harness.port.run()

    with pytest.raises(Cancelled):
        await session.finish_turn(turn)
    assert session.read_output(0) == b""


async def test_embeddings_teach_nothing_about_how_long_answers_are() -> None:
    harness = Harness()
    held_s = harness.ledger.turn_s
    await embed(harness, opened(harness), b"hello")

    assert harness.ledger.turn_s == held_s


async def test_numbers_have_the_digits_that_a_float32_has() -> None:
    sent = m.Embedded(1, 2, "mean", bytes.fromhex("cdcccc3d0000803f"))

    assert embedding_json(sent) == b'{"n_embedding":2,"embedding":[0.100000001,1.0]}'
