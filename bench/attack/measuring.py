"""One measurement: a victim alone, under attack, and beside processes as busy as the attacker's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from bench import daemon, gateway
from bench.machine import MODEL
from bench.resting import rss_mb
from inferd import AsyncClient

from .attack import Attack, Mode, Service
from .users import VICTIM, connecting_as
from .victim import Victim, VictimFigures

START_S_MAX = 30.0
BEFORE_S = 1.5
"""Time from the attackers' start to the begin of the measurement."""
AFTER_S_MAX = 5.0
"""Time in which the memory must shrink after an attack."""
SAMPLE_S = 0.1
ERRORS = "errors"
"""File of a program's errors, in its folder."""
BUSY_CORES_LEAST = 0.05
"""With less, the victim beside busy processes is the victim alone."""
BUSY = """
import sys, time
while True:
    end = time.thread_time() + 0.005 * float(sys.argv[1])
    begin = time.monotonic()
    while time.thread_time() < end: pass
    time.sleep(max(begin + 0.005 - time.monotonic(), 0))
"""
"""A program that keeps a share of one core busy."""


@dataclass(frozen=True)
class Setup:
    """A daemon's configuration, and the model that the victim streams from."""

    text: str
    model: str


DEFAULT = Setup(f'[daemon]\nmodels-dir = "{MODEL.parent}"\nsocket-mode = "0666"\n', MODEL.stem)
"""All settings that concern the load have their defaults."""


@dataclass(frozen=True)
class Measurement:
    """A victim's figures and the daemon's memory, alone and under one attack."""

    alone: VictimFigures
    """The figures without another program."""
    busy: VictimFigures
    """The figures beside processes that use as many cores as the attackers' own."""
    attacked: VictimFigures
    program_cores: float
    """The average number of cores that the attackers' processes used themselves."""
    before_mb: float
    """Resident memory of the daemon without its workers, and of the gateway if there is one."""
    largest_mb: float
    """The largest one during the attack."""
    after_mb: float
    """The one after the attack."""


@dataclass(frozen=True)
class Running:
    """A daemon with a loaded model, and the gateway before it if the mode has one."""

    mode: Mode
    setup: Setup
    socket: str
    gateway: gateway.Gateway | None
    keys: Sequence[str]
    """The keys of the victim and of each attacker."""
    processes: Sequence[psutil.Process]

    def service(self, user: int) -> Service:
        """Return the service of the victim, 0, or of the attacker *user*, from 1."""
        return Service(
            socket=self.socket,
            model=self.setup.model,
            priority=self.mode.attacker if user else self.mode.victim,
            gateway=f"http://127.0.0.1:{self.gateway.port}" if self.gateway else "",
            gateway_key=self.keys[user] if self.gateway else "",
        )

    def rss_mb(self) -> float:
        """Return the resident memory of the daemon and the gateway."""
        return sum(map(rss_mb, self.processes))


@asynccontextmanager
async def running(setup: Setup, mode: Mode, attackers: int) -> AsyncIterator[Running]:
    """Run a daemon, and a gateway with keys of the victim and the attackers if the mode has one."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="inferd-attack-"))
        os.chmod(folder, 0o711)
        server = await stack.enter_async_context(daemon.running(setup.text, Path(folder)))
        async with (
            AsyncClient(server.socket) as client,
            client.session(setup.model, raw=True) as session,
        ):
            await session.chat("hello", options=daemon.options(4))  # it loads the model
        web = None
        if mode.has_gateway:
            names = ["victim", *(f"attacker-{number}" for number in range(attackers))]
            web = await stack.enter_async_context(gateway.running(server, names))
        processes = [server.process, web.process] if web else [server.process]
        keys = web.user_keys if web else ()
        yield Running(mode, setup, str(server.socket), web, keys, processes)


async def measure(
    attack: Attack, mode: Mode, seconds: float, setup: Setup = DEFAULT
) -> Measurement:
    """Measure a victim alone, under attack, and beside processes as busy as the attacker's."""
    async with running(setup, mode, attack.users) as server:
        alone = await _measure_victim(server, seconds)
        before_mb = server.rss_mb()
        async with _attacking(attack, server, seconds) as attackers:
            await asyncio.sleep(BEFORE_S)
            memory = asyncio.create_task(_largest_rss_mb(server, seconds))
            before_s = _cpu_s(attackers)
            attacked = await _measure_victim(server, seconds)
            cores = (_cpu_s(attackers) - before_s) / seconds
            largest_mb = await memory
        after_mb = await _rss_mb_after(server, before_mb + attack.bounds.mb_left_max)
    busy = alone
    if cores >= BUSY_CORES_LEAST:
        # Another daemon, which the attack has left nothing in.
        async with running(setup, mode, 0) as server, _keeping_busy(cores):
            busy = await _measure_victim(server, seconds)
    return Measurement(alone, busy, attacked, cores, before_mb, largest_mb, after_mb)


async def _measure_victim(server: Running, seconds: float) -> VictimFigures:
    with connecting_as(VICTIM):
        return await Victim(server.service(0), seconds).measure()


@asynccontextmanager
async def _attacking(attack: Attack, server: Running, seconds: float) -> AsyncIterator[list[int]]:
    """Run the program of each attacking user until the block ends; yield their process ids."""
    # Programs are killed, and leave their files.
    with tempfile.TemporaryDirectory(prefix="inferd-attackers-") as home:
        folders = [Path(home) / str(number) for number in range(attack.users)]
        processes: list[asyncio.subprocess.Process] = []
        try:
            for number, folder in enumerate(folders):
                folder.mkdir()
                target = asdict(server.service(1 + number)) | {"number": number}
                processes.append(await _start(attack.name, seconds, folder, target))
            async with asyncio.timeout(START_S_MAX):
                for process in processes:
                    assert process.stdout is not None
                    await process.stdout.readline()
            yield [process.pid for process in processes]
            for process, folder in zip(processes, folders, strict=True):
                if process.returncode is not None:
                    raise SystemExit(f"{attack.name} ended:\n{(folder / ERRORS).read_text()}")
        finally:
            await _kill(processes)


async def _start(
    name: str, seconds: float, folder: Path, target: dict[str, Any]
) -> asyncio.subprocess.Process:
    lasts_s = START_S_MAX + BEFORE_S + seconds + 5
    with (folder / ERRORS).open("wb") as errors:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.attack.program"),
            *(name, str(lasts_s), str(folder), json.dumps(target)),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )


def _cpu_s(pids: Sequence[int]) -> float:
    total_s = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            total_s += sum(psutil.Process(pid).cpu_times()[:4])
    return total_s


@asynccontextmanager
async def _keeping_busy(cores: float) -> AsyncIterator[None]:
    """Keep that many cores busy, each with a process that sleeps for the rest of its time."""
    count = math.ceil(cores)
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY, str(cores / count))
        for _ in range(count)
    ]
    try:
        yield
    finally:
        await _kill(processes)


async def _kill(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.kill()
    for process in processes:
        await process.wait()


async def _largest_rss_mb(server: Running, seconds: float) -> float:
    """Return the largest resident memory over the time of a measurement."""
    ends_at_s = time.monotonic() + seconds
    largest = 0.0
    while time.monotonic() < ends_at_s:
        largest = max(largest, server.rss_mb())
        await asyncio.sleep(SAMPLE_S)
    return largest


async def _rss_mb_after(server: Running, enough_mb: float) -> float:
    """Return the resident memory when it is at most *enough_mb*, or at the end of the wait."""
    for _ in range(round(AFTER_S_MAX / SAMPLE_S)):
        if server.rss_mb() <= enough_mb:
            break
        await asyncio.sleep(SAMPLE_S)
    return server.rss_mb()


def median_of(measured: Sequence[Measurement]) -> Measurement:
    """Return the median of each figure, and all errors."""
    return Measurement(
        alone=_median_of_victims([m.alone for m in measured]),
        busy=_median_of_victims([m.busy for m in measured]),
        attacked=_median_of_victims([m.attacked for m in measured]),
        **_medians(measured),
    )


def _median_of_victims(found: Sequence[VictimFigures]) -> VictimFigures:
    errors = tuple(sorted({error for figures in found for error in figures.errors}))
    return VictimFigures(errors=errors, **_medians(found))


def _medians(measured: Sequence[Measurement] | Sequence[VictimFigures]) -> dict[str, Any]:
    """Return the median of each field that is a number."""
    return {
        field.name: statistics.median(getattr(m, field.name) for m in measured)
        for field in fields(measured[0])
        if field.type == "float"
    }
