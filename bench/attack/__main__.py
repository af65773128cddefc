"""`make attack`: another user's figures beside an ordinary program and beside each attack."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console

from bench import daemon
from bench.__main__ import alone
from bench.machine import MODEL, machine
from bench.resting import rss_mb
from inferd import AsyncClient

from .attack import Attack
from .attacks import ATTACKS
from .program import ALL, ORDINARY
from .report import Measurement, print_measurement, save
from .users import VICTIM, connecting_as
from .victim import Victim, VictimFigures

SECONDS = 8.0
BEFORE_S = 1.5
"""Time from the attacker's start to the begin of the measurement."""
ROUNDS = 3
SLOTS, SLOT_TOKENS = 4, 2048
"""There are at least this many slots, and twice as many as the other program has streams. So the
victim never waits for one.
"""
SETTINGS = {"socket-mode": "0666"}
BUSY = """
import sys, time
while True:
    end = time.thread_time() + 0.005 * float(sys.argv[1])
    begin = time.monotonic()
    while time.thread_time() < end: pass
    time.sleep(max(begin + 0.005 - time.monotonic(), 0))
"""
"""A program that keeps a share of one core busy."""


@asynccontextmanager
async def program(name: str, socket: str, seconds: float) -> AsyncIterator[psutil.Process]:
    """Run a program as the attacking user."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.attack.program", name, socket, MODEL.stem, str(seconds)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure(name: str, streams: int, seconds: float, busy: float = 0.0) -> VictimFigures:
    """Start a daemon and the program *name*, and measure a victim beside it.

    In addition, *busy* cores are kept busy, as the attacker's own process keeps them.
    """
    with tempfile.TemporaryDirectory(prefix="inferd-attack-") as folder:
        os.chmod(folder, 0o711)
        slots = max(SLOTS, 2 * streams)
        text = daemon.configuration(slots, slots * SLOT_TOKENS, SETTINGS)
        async with daemon.running(text, Path(folder)) as ours:
            await _load_model(str(ours.socket))
            async with (
                program(name, str(ours.socket), BEFORE_S + seconds + 5) as process,
                keeping_busy(busy),
            ):
                await asyncio.sleep(BEFORE_S)
                memory = asyncio.create_task(_largest_rss_mb(ours.process, seconds))
                before_s = _cpu_s(process)
                figures = await _measure_as_victim(str(ours.socket), seconds)
                used = (_cpu_s(process) - before_s) / seconds
                return replace(figures, daemon_mb=await memory, program_cores=used)


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:4])


@asynccontextmanager
async def keeping_busy(cores: float) -> AsyncIterator[None]:
    """Keep that many cores busy, each with a process that sleeps for the rest of its time."""
    count = math.ceil(cores)
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY, str(cores / count))
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def _largest_rss_mb(process: psutil.Process, seconds: float) -> float:
    """Return the daemon's largest resident memory over the time of a measurement."""
    ends_at_s = time.monotonic() + seconds
    largest = 0.0
    while time.monotonic() < ends_at_s:
        largest = max(largest, rss_mb(process))
        await asyncio.sleep(0.1)
    return largest


async def _load_model(socket: str) -> None:
    async with AsyncClient(socket) as client, client.session(MODEL.stem) as session:
        await session.chat("hello", options=daemon.options(4))


async def _measure_as_victim(socket: str, seconds: float) -> VictimFigures:
    with connecting_as(VICTIM):
        return await Victim(socket, MODEL.stem, seconds).measure()


def median_of(measured: Sequence[VictimFigures]) -> VictimFigures:
    """Return the median of each figure, and all errors."""
    return VictimFigures(
        tokens_per_s=statistics.median(f.tokens_per_s for f in measured),
        gap_worst_s=statistics.median(f.gap_worst_s for f in measured),
        call_p99_ms=statistics.median(f.call_p99_ms for f in measured),
        call_worst_ms=statistics.median(f.call_worst_ms for f in measured),
        daemon_mb=max(f.daemon_mb for f in measured),
        program_cores=statistics.median(f.program_cores for f in measured),
        errors=tuple(sorted({error for f in measured for error in f.errors})),
    )


async def run(arguments: argparse.Namespace, console: Console) -> list[Measurement]:
    """Measure the chosen attacks, each in rounds that alternate with the ordinary program.

    The attacker's own process takes CPU time from the model, which no daemon can prevent. So the
    victim is also measured beside the ordinary program and a process that uses as much CPU time.
    """
    chosen = [ATTACKS[name] for name in arguments.attack if name != ALL]
    if ALL in arguments.attack:
        streams = sum(attack.streams for attack in ATTACKS.values())
        chosen.append(Attack(ALL, "All attacks at once", lambda _: None, streams))
    measurements = []
    for attack in chosen:
        ordinary = f"{ORDINARY}:{attack.streams}"
        beside: list[VictimFigures] = []
        busy: list[VictimFigures] = []
        attacked: list[VictimFigures] = []
        for _ in range(arguments.rounds):
            beside.append(await measure(ordinary, attack.streams, arguments.seconds))
            attacked.append(
                figures := await measure(attack.name, attack.streams, arguments.seconds)
            )
            more = max(figures.program_cores - beside[-1].program_cores, 0.0)
            busy.append(await measure(ordinary, attack.streams, arguments.seconds, more))
        measurement = Measurement(
            attack.name,
            attack.title,
            attack.streams,
            median_of(beside),
            median_of(busy),
            median_of(attacked),
        )
        print_measurement(measurement, attack.pace_least, console)
        measurements.append(measurement)
    return measurements


def main() -> None:
    """Read the command line, measure, and save the results of a full run."""
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the attacks")
    parser.add_argument("--attack", nargs="+", choices=[*ATTACKS, ALL], default=[*ATTACKS, ALL])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a measurement")
    parser.add_argument("--no-report", dest="report", action="store_false")
    arguments = parser.parse_args()
    if arguments.list:
        for attack in ATTACKS.values():
            print(f"{attack.name:20} {attack.title}")
        return
    if os.geteuid() != 0:
        raise SystemExit("`make attack` needs root: it runs programs of several users")
    with alone():
        measurements = asyncio.run(run(arguments, Console()))
    if arguments.report:
        save(machine(), measurements)


if __name__ == "__main__":
    main()
