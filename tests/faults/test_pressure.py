"""Memory pressure by other programs: which states and models are evicted, and which stay.

The daemon reads a /proc that the test writes; its workers are real processes.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from inferd import AsyncClient, Stats
from inferd.testing import RunningDaemon
from tests.echo import echo_model

pytestmark = pytest.mark.asyncio

KIB = 1024
TOTAL = 16 * KIB**3
PLENTY, NONE = TOTAL // 2, TOTAL // 100
MODELS = echo_model("quick", weight_bytes=1000) + echo_model("pinned", weight_bytes=1000)
MODELS += echo_model("slow", weight_bytes=1000, load_ms=300)
MODELS += echo_model("busy", weight_bytes=1000, step_ms=1)
STORY = "there was a king who had three sons, and that is how it began. " * 2


class Proc:
    """A /proc with the values that the test sets."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "self").mkdir(parents=True)
        self.available(PLENTY)

    def available(self, size: int) -> None:
        """Set the available memory to *size* bytes."""
        text = f"MemTotal: {TOTAL // KIB} kB\nMemAvailable: {size // KIB} kB\n"
        self._write("meminfo", text)

    def stalled(self, seconds: float) -> None:
        """Set the total time that tasks have waited for memory."""
        (self.folder / "pressure").mkdir(exist_ok=True)
        total = int(seconds * 1e6)
        self._write("pressure/memory", f"some avg10=0.00 total={total}\nfull total=0\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / "new"
        temporary.write_text(text)
        temporary.rename(self.folder / name)


SERVE = """
import sys
from pathlib import Path
from inferd.daemon.app import serve
from inferd.daemon.config.sources import load_config
from inferd.daemon.residency.machine import MachineMemory
from inferd.daemon.residency.pressure import Pace

_, proc, *pairs = sys.argv[1:]
proc = Path(proc)
flags = {key.removeprefix("--"): value for key, value in zip(pairs[::2], pairs[1::2])}
pace = Pace(poll_s_ample=0.01, poll_s=0.01, poll_s_pressed=0.01, settle_s=0.05, calm_s=0.05)
sys.exit(serve(load_config(flags), MachineMemory(proc, proc / "cgroups"), pace))
"""


class WatchingDaemon(RunningDaemon):
    """A daemon that polls *proc* for its memory, a hundred times a second."""

    def __init__(self, proc: Proc):
        super().__init__(MODELS)
        self._proc = proc

    def _command(self) -> list[str]:
        options = super()._command()[len(("python", "-m", "inferd", "serve")) :]
        return [sys.executable, "-c", SERVE, "serve", str(self._proc.folder), *options]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[RunningDaemon, AsyncClient, Proc]]:
    """Yield a daemon that reads a /proc of the test, its client, and that /proc."""
    proc = Proc(folder / "proc")
    async with WatchingDaemon(proc) as daemon, AsyncClient(daemon.socket) as client:
        yield daemon, client, proc


async def until(client: AsyncClient, is_so: Callable[[dict[str, Any]], bool]) -> Stats:
    """Return the daemon's statistics once *is_so* holds for those of memory."""
    with anyio.fail_after(60):
        while True:
            stats = await client.stats()
            if is_so(stats["memory"]):
                return stats


async def is_watched(client: AsyncClient) -> bool:
    parts = (await client.stats())["components"]
    return bool(next(part["up"] for part in parts if part["component"] == "memory"))


async def states(client: AsyncClient) -> dict[str, str]:
    found = {model["name"]: model["state"] for model in await client.models()}
    return {name: state for name, state in found.items() if name != "echo"}


async def settled(client: AsyncClient) -> dict[str, str]:
    """Return the models' states as soon as none is being unloaded."""
    with anyio.fail_after(60):
        while True:
            if "unloading" not in (found := await states(client)).values():
                return found
            await anyio.sleep(0.002)


async def test_states_are_evicted_first_then_idle_models_while_busy_and_pinned_models_stay(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (daemon, client, proc):
        await client.pin("pinned")
        for name in ("pinned", "quick", "slow"):
            await client.unload(await client.load_by_name(name), keep=True)
        async with AsyncExitStack() as stack:
            for number in range(7):  # more sessions than slots: some states are in memory
                session = await stack.enter_async_context(client.session("busy", raw=True))
                await session.chat(f"{number} says hello")
            stream = session.stream(STORY)
            output = await anext(stream)
            proc.available(NONE)
            await until(client, lambda memory: memory["low_events"] == 1)
            stats = await client.stats()
            assert stats["memory"]["kv_bytes_freed"] > 0
            assert stats["models"]["busy"]["kv_ram_bytes"] == 0

            stats = await until(client, lambda memory: memory["models_unloaded"] == 2)
            assert stats["memory"]["model_bytes_freed"] == 2000
            assert await settled(client) == {
                "quick": "cold",
                "slow": "cold",
                "pinned": "ready",
                "busy": "ready",
            }
            # Before the stream ends: then the busy model is idle, too.
            unloaded = re.findall("memory.model_unloaded .*model=(\\w+)", daemon.log)
            assert unloaded == ["quick", "slow"]
            async for piece in stream:
                output += piece
            assert output == STORY

        proc.available(PLENTY)
        await until(client, lambda memory: not memory["low"])
        assert (await client.stats())["memory"]["free_bytes"] > 0


async def test_without_stall_information_the_daemon_serves_and_checks_free_memory(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (_, client, proc):
        stats = await until(client, lambda memory: memory["free_bytes"] is not None)
        assert stats["memory"]["pressure_known"] is False
        async with client.session("echo", raw=True) as session:
            assert await session.chat("hello") == "hello"
            (proc.folder / "meminfo").unlink()
            while await is_watched(client):
                assert await session.chat("hello") == "hello"
        proc.available(NONE)
        await until(client, lambda memory: memory["low"])
        assert await is_watched(client)


async def test_stalls_alone_are_enough(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client, proc):
        await client.unload(await client.load_by_name("quick"), keep=True)
        proc.available(TOTAL // 10)
        proc.stalled(0.0)
        await until(client, lambda memory: memory["pressure_known"])
        seconds = itertools.count(1.0)

        def stalls_go_on(memory: dict[str, Any]) -> bool:
            proc.stalled(next(seconds))
            return bool(memory["models_unloaded"])

        await until(client, stalls_go_on)
        await until(client, lambda memory: not memory["low"])
