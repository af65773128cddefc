"""A worker that the kernel kills to free memory is started again in a smaller shape."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from inferd.daemon.models.model import ManagedModel
from inferd.daemon.models.registry import Registry
from tests.daemon.workers.test_recovery import registry_in

pytestmark = [pytest.mark.asyncio, pytest.mark.process]


async def kill_idle_worker(registry: Registry, model: ManagedModel, *, by_kernel: bool) -> int:
    """Kill the worker of *model*; return the slots of the next one."""
    registry.loader.oom_kills.claim_kill = lambda: by_kernel  # type: ignore[method-assign]
    worker = await model.load()
    os.kill(worker.pid, signal.SIGKILL)
    await worker.exited.wait()
    return (await model.load()).info.slots


async def test_a_model_shrinks_after_an_oom_kill_and_not_after_another_one(tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        registry = registry_in(tmp_path, group)
        model = registry.catalog.get("echo", 0)
        with anyio.fail_after(60):
            assert await kill_idle_worker(registry, model, by_kernel=False) == 4
            assert model.fitted == {}
            assert await kill_idle_worker(registry, model, by_kernel=True) == 2
            assert await kill_idle_worker(registry, model, by_kernel=True) == 1
            assert model.fitted == {"slots": 1}
        await registry.close()
