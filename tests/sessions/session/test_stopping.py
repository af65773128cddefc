"""What ends a turn, where its session is left, or its daemon killed, and it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.sessions import Session, TurnOptions
from tests.sessions.journal.test_journal import Kept, named, reopened, resumed
from tests.sessions.session.test_sessions import HERE

TEXT = b"ab!cd!efgh"
SURPRISED = {"stop-surprisal": 3.9, "stop-surprisal-window": 5}
"""Two exclamation marks among five tokens."""


async def begun(harness: Kept, **options: object) -> Session:
    """Return a session of whose turn four tokens were told, an exclamation mark with them."""
    harness.port.bench.model.options.surprising = "!"
    session = named(harness)
    await session.input.set_input(TEXT)
    await session.runner.start_turn(TurnOptions(credit=4, options=SURPRISED | options))
    harness.port.run()
    return session


async def gone_on(harness: Kept, seen: bytes) -> tuple[bytes, str, str]:
    """Return what a turn tells that is resumed, and why it ends."""
    harness.port.bench.model.options.surprising = "!"
    session = await reopened(harness)
    told = await resumed(harness, session, seen, seen)
    metadata = session.outputs.metadata()
    return told, metadata["stop_reason"], metadata["stop_detail"]


@pytest.mark.asyncio
async def test_a_turn_whose_session_was_left_remembers_how_surprising_it_was(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path).running() as harness:
        await begun(harness)
        harness.manager.close_connection(HERE)
        harness.port.run()
        assert await gone_on(harness, b"ab!c") == (b"d!", "surprisal", "4.000")


@pytest.mark.asyncio
async def test_a_turn_whose_daemon_was_killed_remembers_how_surprising_it_was(
    tmp_path: Path,
) -> None:
    async with Kept(tmp_path / "a").running() as harness:
        session = await begun(harness)
        await session.wait_recorded()
        async with harness.killed(tmp_path / "b") as other:
            assert await gone_on(other, b"ab!c") == (b"d!", "surprisal", "4.000")


@pytest.mark.asyncio
async def test_tokens_that_only_the_reader_has_are_left_out_of_the_surprise(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        await begun(harness)
        harness.manager.close_connection(HERE)
        harness.port.run()
        assert (await gone_on(harness, b"ab!cd!"))[:2] == (b"efgh", "eos")


@pytest.mark.asyncio
async def test_the_metadata_tell_which_pattern_ended_a_turn(tmp_path: Path) -> None:
    async with Kept(tmp_path).running() as harness:
        session = named(harness)
        await session.input.set_input(TEXT)
        turn = await session.runner.start_turn(TurnOptions(options={"stop-patterns": "c.!"}))
        harness.port.run()
        await session.runner.finish_turn(turn)
        metadata = session.outputs.metadata()
        assert (metadata["stop_reason"], metadata["stop_detail"]) == ("pattern", "c.!")
        assert session.outputs.read_output(0) == b"ab!"
