"""A session's turn that waits for the comparison of a sentence: left, killed, resumed, branched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.scheduler.owner import Owner, Priority
from inferd.sessions import Session, TurnOptions
from inferd.sessions.worker_client import Comparison, Similarity
from tests.sessions.conversation.test_sessions import HERE, opened
from tests.sessions.doubles import Harness
from tests.sessions.journal.test_journal import Kept, named, reopened, resumed

pytestmark = pytest.mark.asyncio
TEXT = b"One. Two. Three"
SENT = b"One. "


def finding(cosine: float) -> Callable[[Comparison, Callable[[Similarity], None]], None]:
    return lambda _, report: report(Similarity(cosine))


def unanswered(*_: object) -> None:
    """Leave a sentence as it is for now."""


async def waiting(harness: Harness, session: Session, **options: Any) -> None:
    """Begin a turn that waits for the comparison of its first sentence."""
    harness.source.comparer = unanswered
    session.set_options({"stop-similarity": "a text"})
    await session.set_input(TEXT)
    turn = await session.start_turn(TurnOptions(options=options))
    harness.port.run()
    assert (bytes(turn.text), bytes(turn.tokens)) == (b"One.", SENT)


async def test_a_turn_says_for_whom_and_with_what_a_sentence_is_compared() -> None:
    harness, asked = Harness(), []

    def comparer(comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        asked.append(comparison)
        report(Similarity(0.9 if comparison.sentence == "Two." else 0.1))

    harness.source.comparer = comparer
    session = opened(harness)
    session.set_options({"stop-similarity": "a text"})
    session.settings.priority = Priority.URGENT
    await session.set_input(TEXT)
    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(turn)

    assert asked == [
        Comparison(Owner(1000), Priority.URGENT, said, "a text") for said in ("One.", "Two.")
    ]
    assert session.read_output(0) == b"One. Two."
    metadata = session.metadata()
    assert (metadata.stop_reason, metadata.stop_detail) == ("similarity", "0.900")
    assert metadata.adjusted == {}


async def test_the_metadata_say_why_sentences_were_not_compared() -> None:
    harness = Harness()
    harness.source.comparer = lambda _, report: report(Similarity(None, "nobody is there"))
    session = opened(harness)
    session.set_options({"stop-similarity": "a text"})
    await session.set_input(TEXT)
    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(turn)
    assert session.read_output(0) == TEXT
    assert session.metadata().adjusted == {
        "stop-similarity": "2 of 2 sentences were not compared: nobody is there"
    }


@pytest.mark.parametrize(("cosine", "rest"), [(0.9, b""), (0.1, b" Two. Three")])
@pytest.mark.parametrize("killed", [False, True])
async def test_a_turn_that_waited_continues_as_if_it_had_not(
    tmp_path: Path, cosine: float, rest: bytes, killed: bool
) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = named(harness)
        await waiting(harness, session)
        await session.wait_recorded()
        async with harness.killed(tmp_path / "b") as other:
            at = other if killed else harness
            at.source.comparer = finding(cosine)
            if not killed:
                harness.manager.close_connection(HERE)
                harness.port.run()
            back = await reopened(at)
            assert await resumed(at, back, SENT, b"One.") == rest
            assert back.metadata().stop_reason == ("eos" if rest else "similarity")
            assert back.turn is not None and bytes(back.turn.text) == b"One." + rest


@pytest.mark.parametrize(("cosine", "rest"), [(0.9, b""), (0.1, b" ")])
async def test_a_turn_whose_last_token_is_there_waits_for_the_comparison_all_the_same(
    tmp_path: Path, cosine: float, rest: bytes
) -> None:
    async with Kept(tmp_path).running() as harness:
        await waiting(harness, named(harness), **{"n-predict": len(SENT)})
        harness.manager.close_connection(HERE)
        harness.port.run()
        harness.source.comparer = finding(cosine)
        session = await reopened(harness)
        assert await resumed(harness, session, SENT, b"One.") == rest
        assert session.metadata().stop_reason == ("length" if rest else "similarity")


async def test_a_chat_continues_after_the_text_that_was_sent() -> None:
    harness = Harness()
    harness.source.comparer = finding(0.9)
    session = opened(harness)
    session.set_options({"stop-similarity": "a text"})
    await session.add_messages([{"role": "user", "content": TEXT.decode()}])
    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(turn)
    await session.add_messages([{"role": "user", "content": "Next. And on"}])
    assert session.conversation.messages[1] == {"role": "assistant", "content": "One."}
    turn = await session.start_turn(TurnOptions())
    harness.port.run()
    await session.finish_turn(turn)
    assert session.read_output(0) == b"Next."


async def test_a_branch_has_the_condition_too() -> None:
    harness = Harness()
    harness.source.comparer = finding(0.9)
    trunk = opened(harness)
    trunk.set_options({"stop-similarity": "a text"})
    await trunk.set_input(TEXT)
    [branch] = harness.manager.fork_session(HERE, trunk, 1)
    turn = await branch.start_turn(TurnOptions())
    harness.port.run()
    await branch.finish_turn(turn)
    assert branch.read_output(0) == b"One."


async def test_a_comparison_that_comes_after_the_end_changes_nothing() -> None:
    harness, sent = Harness(), []
    session = opened(harness)
    harness.source.comparer = lambda _, report: sent.append(report)
    session.set_options({"stop-similarity": "a text"})
    await session.set_input(TEXT)
    await session.start_turn(TurnOptions())
    harness.port.run()
    session.cancel_turn()
    harness.port.run()
    [report] = sent
    report(Similarity(0.9))
    assert harness.port.commands == []
    assert session.metadata().stop_reason == "Cancelled"
    assert session.read_output(0) == b"One."
