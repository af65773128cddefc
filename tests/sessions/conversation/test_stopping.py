"""Stop conditions of turns that are resumed after a disconnection or a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.sessions import Session, TurnOptions
from tests.sessions.conversation.test_sessions import HERE
from tests.sessions.journal.test_journal import Kept, named, reopened, resumed

TEXT = b"ab!cd!efgh"
SURPRISED = {"stop-surprisal": 3.9, "stop-surprisal-window": 5}
"""Two exclamation marks among five tokens."""


async def begun(harness: Kept, **options: object) -> Session:
    """Return a session whose turn has sent four tokens, an exclamation mark among them."""
    harness.port.bench.model.options.surprising = "!"
    session = named(harness)
    await session.set_input(TEXT)
    await session.start_turn(TurnOptions(credit=4, options=SURPRISED | options))
    harness.port.run()
    return session


async def continued(harness: Kept, seen: bytes) -> tuple[bytes, str | None, str]:
    """Return what a turn tells that is resumed, and why it ends."""
    harness.port.bench.model.options.surprising = "!"
    session = await reopened(harness)
    sent = await resumed(harness, session, seen, seen)
    metadata = session.metadata()
    return sent, metadata.stop_reason, metadata.stop_detail


@pytest.mark.asyncio
async def test_a_turn_whose_session_was_left_remembers_how_surprising_it_was(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path).running() as harness:
        await begun(harness)
        harness.manager.close_connection(HERE)
        harness.port.run()
        assert await continued(harness, b"ab!c") == (b"d!", "surprisal", "4.000")


@pytest.mark.asyncio
async def test_a_turn_whose_daemon_was_killed_remembers_how_surprising_it_was(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = await begun(harness)
        await session.wait_recorded()
        async with harness.killed(tmp_path / "b") as other:
            assert await continued(other, b"ab!c") == (b"d!", "surprisal", "4.000")


@pytest.mark.asyncio
async def test_tokens_that_only_the_reader_has_do_not_count_as_surprisal(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        await begun(harness)
        harness.manager.close_connection(HERE)
        harness.port.run()
        assert (await continued(harness, b"ab!cd!"))[:2] == (b"efgh", "eos")


@pytest.mark.asyncio
async def test_the_metadata_name_the_pattern_that_ended_a_turn(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await session.set_input(TEXT)
        turn = await session.start_turn(TurnOptions(options={"stop-patterns": "c.!"}))
        harness.port.run()
        await session.finish_turn(turn)
        metadata = session.metadata()
        assert (metadata.stop_reason, metadata.stop_detail) == ("pattern", "c.!")
        assert session.read_output(0) == b"ab!"
