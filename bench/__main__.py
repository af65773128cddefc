"""`python -m bench`: measure every side, show the table, write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from rich.console import Console

from tools.build_engine import CACHE_DIR, PACKAGE, ROOT, pinned_version

from . import daemon, decode, llama_server, report
from .clients import bare_run, llama_server_run
from .resting import idle_cpu_percent, rss_mb
from .scenario import STREAMS, Job, Stream

ROUNDS = 5
FIRST = Job(streams=1, round=0, serial=0, n_predict=8)
"""Wakes a server up before its idling is measured."""
SIDES = ("llama-server", "inferd stream", "inferd pull", "bare")
IDLE_CPU_PERCENT_MAX = 0.5
"""A side that uses more while it idles would disturb the others' runs."""


async def start_llama_server(
    stack: AsyncExitStack, facts: dict[str, Any], wanted: Sequence[str]
) -> dict[str, decode.Side]:
    """Start llama-server if it is wanted; return its side."""
    if "llama-server" not in wanted:
        return {}
    port, process = await stack.enter_async_context(llama_server.running(llama_server.binary()))

    async def side(job: Job) -> list[Stream]:
        return await llama_server_run(port, job)

    await side(FIRST)
    idle = await idle_cpu_percent([process])
    assert idle <= IDLE_CPU_PERCENT_MAX, f"an idle llama-server uses {idle:.1f} % of a core"
    facts["llama-server, idle: CPU % of a core"] = f"{idle:.1f}"
    facts["llama-server with the model: RSS, MB"] = f"{rss_mb(process):.0f}"
    return {"llama-server": side}


async def start_inferd(
    stack: AsyncExitStack, facts: dict[str, Any], wanted: Sequence[str]
) -> dict[str, decode.Side]:
    """Start a daemon if it is wanted; return its sides."""
    clients = {"inferd stream": daemon.StreamClient, "inferd pull": daemon.PullClient}
    if not set(clients) & set(wanted):
        return {}
    socket, process = await stack.enter_async_context(daemon.running())
    facts["inferd, no model loaded: RSS, MB"] = f"{rss_mb(process):.0f}"

    def side_of(kind: type[daemon.StreamClient]) -> decode.Side:
        async def side(job: Job) -> list[Stream]:
            return await daemon.run(socket, kind, job)

        return side

    sides = {name: side_of(kind) for name, kind in clients.items() if name in wanted}
    await daemon.keep_loaded(stack, socket)
    await next(iter(sides.values()))(FIRST)
    processes = [process, *process.children(recursive=True)]
    assert len(processes) > 1, "no worker"
    idle = await idle_cpu_percent(processes)
    facts["inferd with one idle worker: CPU % of a core"] = f"{idle:.1f}"
    facts["inferd, daemon with one worker: RSS, MB"] = f"{rss_mb(process):.0f}"
    facts["inferd, worker with the model: RSS, MB"] = f"{sum(map(rss_mb, processes[1:])):.0f}"
    return sides


async def bench(arguments: argparse.Namespace, console: Console) -> None:
    """Start what serves, compare, show and save."""
    facts: dict[str, Any] = {**decode.machine(), PACKAGE: pinned_version()}
    async with AsyncExitStack() as stack:
        sides = await start_llama_server(stack, facts, arguments.sides)
        sides |= await start_inferd(stack, facts, arguments.sides)
        if "bare" in arguments.sides:
            sides["bare"] = bare_run
        await decode.warm_up(sides, arguments.streams)
        runs = await decode.compare(sides, arguments.streams, arguments.rounds, console)
    console.print(decode.table(runs))
    saved = decode.save(runs, facts)
    console.print(f"raw figures: {saved.relative_to(ROOT)}")
    if arguments.report:
        report.write(saved)


@contextmanager
def alone() -> Iterator[None]:
    """Hold the machine's bench lock: two benches at once would both measure each other."""
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    with (CACHE_DIR / "bench.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another bench is running; waiting for its end", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Read the command line and run the bench."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--no-report", dest="report", action="store_false")
    arguments = parser.parse_args()
    with alone():
        asyncio.run(bench(arguments, Console()))


if __name__ == "__main__":
    main()
