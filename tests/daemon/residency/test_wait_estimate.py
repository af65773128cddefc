"""The number of slots that the wait estimate uses for models that are not loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from inferd.backends.errors import Busy
from inferd.backends.params import Options
from inferd.daemon.calls.running import with_waits
from inferd.daemon.config.model_settings import ModelConfig
from inferd.daemon.config.settings import Config
from inferd.daemon.core import Daemon
from inferd.daemon.models.specs import spec_of
from inferd.ipc.messages import CALLS
from inferd.scheduler import Owner
from inferd.sessions.admission.bounds import Ticket
from tests.daemon.other_users import Stranger

MODELS = {
    "plain": ModelConfig(backend="echo"),
    "two": ModelConfig(backend="echo", options={"slots": 2}),
}


async def ticket_for(daemon: Daemon, name: str, monkeypatch: pytest.MonkeyPatch) -> Ticket:
    """Return the ticket with which a call waits for the model *name*, which is not loaded."""
    held: list[Ticket] = []

    def refuse(ticket: Ticket) -> None:
        held.append(ticket)
        raise Busy("the queue is full")

    async def compute(_: Daemon, __: Any) -> None:
        pytest.fail("the model is not loaded")

    lease = daemon.registry.lease(name, uid=1)
    connection: Any = Stranger(1)
    with daemon.graphs.opening(connection, lease, Options()) as graph:
        pass
    params = SimpleNamespace(graph=graph.handle, priority="", queue_timeout_s=0.0, timeout_s=0.0)
    request: Any = SimpleNamespace(
        row=CALLS["embed"], params=params, connection=connection, owner=Owner(1)
    )
    monkeypatch.setattr(daemon.ledger, "add_ticket", refuse)
    with pytest.raises(Busy):
        await with_waits(CALLS["embed"], compute)(daemon, request)
    return held[0]


@pytest.mark.parametrize(("name", "slots"), [("plain", 4), ("two", 2)])
@pytest.mark.asyncio
async def test_a_turn_that_waits_for_a_load_counts_on_the_slots_of_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, slots: int
) -> None:
    config = Config(
        socket=tmp_path / "s",
        models_dir=tmp_path,
        state_dir=tmp_path,
        cores=1,
        kv_ram_bytes=0,
        models=MODELS,
    )
    async with anyio.create_task_group() as group:
        daemon = Daemon(config, group, 1)
        ticket = await ticket_for(daemon, name, monkeypatch)
        model = daemon.registry.catalog.get(name, uid=1)
        assert ticket.slots == spec_of(model, config, daemon.registry.tuner).slots == slots
        group.cancel_scope.cancel()
