"""Texts of an entry's metrics that are requested at the same time."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from inferd.gateways.fleet.config import read_config
from inferd.gateways.fleet.entry import metrics
from inferd.gateways.fleet.entry.client import Fleet
from tests.gateways.fleet.members import certificates

pytestmark = pytest.mark.asyncio


async def test_one_text_is_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates(tmp_path / "keys")
    file = tmp_path / "fleet.toml"
    file.write_text(
        'certificates = "keys"\nstate-dir = "state"\n[nodes.a]\naddress = "127.0.0.1:1"\n'
    )
    both, texts, together = threading.Barrier(2), 0, 0

    def write(families: metrics.FleetFamilies) -> bytes:
        nonlocal texts, together
        texts += 1
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
            together += 1
        return b""

    monkeypatch.setattr(metrics, "generate_latest", write)
    async with anyio.create_task_group() as group:
        fleet = Fleet(read_config(file), lambda _: None, group)
        async with anyio.create_task_group() as callers:
            for _ in range(2):
                callers.start_soon(metrics.metrics_text, fleet)
    assert (texts, together) == (2, 0)
