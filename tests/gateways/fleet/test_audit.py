"""Kills of daemons and relays under many sessions: every acknowledged turn is there, once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from inferd import AsyncClient
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet

CONFIG = echo_model("slow", step_ms=5, slots=8)
SESSIONS, TURNS = 16, 8


async def converse(fleet: RunningFleet, number: int) -> list[str]:
    """Hold a conversation over all losses; return the texts of its turns."""
    texts = [f"turn {turn} of session {number} " for turn in range(TURNS)]
    async with (
        AsyncClient(fleet.socket) as client,
        client.session("slow", session_id=f"audit-{number}", resume=True) as session,
    ):
        for text in texts:
            assert str(await session.chat(text)) == text
    return texts


async def kill_members(fleet: RunningFleet) -> None:
    """Kill a daemon and a relay of each node, one after the other, and start them again."""
    for name, daemon in fleet.daemons.items():
        await asyncio.to_thread(daemon.kill)
        await asyncio.to_thread(daemon.start_again)
        await asyncio.to_thread(fleet.until_noted, f"node {name} serves")
        await asyncio.to_thread(fleet.kill_relay, name)
        await asyncio.to_thread(fleet.start_relay, name)
        await asyncio.to_thread(fleet.until_noted, f"node {name} serves")


async def audit(fleet: RunningFleet) -> None:
    async with asyncio.TaskGroup() as group:
        talks = [group.create_task(converse(fleet, number)) for number in range(SESSIONS)]
        kills = group.create_task(kill_members(fleet))
    assert kills.done()
    await check_histories(fleet.socket, [talk.result() for talk in talks])


async def check_histories(socket: str, conversations: Sequence[Sequence[str]]) -> None:
    """Check that the history of each session has the texts of its turns once and in order."""
    async with AsyncClient(socket) as client:
        for number, texts in enumerate(conversations):
            async with client.session("slow", session_id=f"audit-{number}") as session:
                assert session.context.attached
                messages = (await session.history()).messages
                expected = [text for text in texts for _ in range(2)]
                assert [str(message["content"]) for message in messages] == expected


@pytest.mark.process
def test_every_acknowledged_turn_is_in_its_history_once_and_in_order(tmp_path: Path) -> None:
    with running_fleet(tmp_path, CONFIG, "a", "b") as fleet:
        asyncio.run(audit(fleet))
