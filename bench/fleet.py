"""The cost of a fleet: an entry with one node beside the plain socket, three nodes beside one.

`python -m bench.fleet` runs daemons with paced echo models, relays and an entry, and
prints a table. It takes two minutes, and needs an otherwise idle machine.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from inferd import AsyncClient
from inferd.testing import RunningDaemon, running_daemon

STEP_MS = 20
SLOTS = 4
CONFIG = f"""
[models.fast]
backend = "echo"
slots = 16
[models.paced]
backend = "echo"
slots = 16
[models.paced.echo]
step-ms = {STEP_MS}
[models.narrow]
backend = "echo"
slots = {SLOTS}
[models.narrow.echo]
step-ms = {STEP_MS}
"""
TURNS = 200
STREAMS = 16
LONG_TURNS = 12
"""Turns of each stream on three nodes. There are many, as slots are idle while the last ones end.
"""
TEXT = "a text of forty letters for the streams"


def inferd(*arguments: str) -> subprocess.Popen[str]:
    """Start a command of inferd."""
    return subprocess.Popen(
        [sys.executable, "-m", "inferd", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def until_line(process: subprocess.Popen[str], text: str) -> str:
    """Return the line on a process's standard error that has *text*."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise RuntimeError(f"{process.args!r} has ended")


@contextmanager
def fleet_of(daemons: dict[str, RunningDaemon]) -> Iterator[str]:
    """Run a fleet of *daemons*, and yield the path of its socket."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = str(folder / "keys")
        inferd("fleet", "init", *daemons, "--certificates", keys).communicate()
        config = f'certificates = "keys"\nsocket = "{folder}/s"\nstate-dir = "state"\n'
        for name, daemon in daemons.items():
            options = ("--listen", "127.0.0.1:0", "--certificates", keys)
            node = inferd("fleet", "node", name, *options, "--socket", daemon.socket)
            stack.callback(node.communicate)
            stack.callback(node.kill)
            address = until_line(node, "serves entries on").split()[-1]
            config += f'[nodes.{name}]\naddress = "{address}"\n'
        (folder / "fleet.toml").write_text(config)
        entry = inferd("fleet", "serve", "--config", str(folder / "fleet.toml"))
        stack.callback(entry.communicate)
        stack.callback(entry.kill)
        until_line(entry, "listens on")
        yield f"{folder}/s"


async def first_token_ms(path: str) -> float:
    """Return the median time to the first token of a turn on an open session."""
    times = []
    async with AsyncClient(path) as client, client.session("fast") as session:
        for _ in range(TURNS):
            begin = time.perf_counter()
            async with session.stream("hi") as stream:
                async for _ in stream:
                    times.append(1000 * (time.perf_counter() - begin))
                    break
    return statistics.median(times)


async def tokens_s(path: str, model: str, streams: int, turns: int = 3) -> float:
    """Return the tokens per second of *streams* at once, each with a session and several turns."""
    count = 0

    async def run_stream(client: AsyncClient) -> None:
        nonlocal count
        for _ in range(turns):
            async with client.session(model) as session:
                reply = await session.chat(TEXT)
                count += int(reply.metadata["output_tokens"])

    async with AsyncClient(path) as client, asyncio.TaskGroup() as group:
        begin = time.perf_counter()
        for _ in range(streams):
            group.create_task(run_stream(client))
    return count / (time.perf_counter() - begin)


async def load_everywhere(daemons: dict[str, RunningDaemon]) -> None:
    """Load all models on all nodes."""
    for daemon in daemons.values():
        async with AsyncClient(daemon.socket) as client:
            for model in ("fast", "paced", "narrow"):
                await client.unload(await client.load_by_name(model), keep=True)


def main() -> None:
    """Print the table."""
    with ExitStack() as stack:
        daemons = {name: stack.enter_context(running_daemon(CONFIG)) for name in "abc"}
        asyncio.run(load_everywhere(daemons))
        one = {"a": daemons["a"]}
        direct = daemons["a"].socket
        with fleet_of(one) as socket:
            for _ in range(2):
                plain, through = (asyncio.run(first_token_ms(s)) for s in (direct, socket))
                print(f"first token, ms: {plain:.2f} plain, {through:.2f} through a fleet")
                rates = [asyncio.run(tokens_s(s, "paced", STREAMS)) for s in (direct, socket)]
                print(
                    f"tokens/s, {STREAMS} streams: {rates[0]:.0f} plain, {rates[1]:.0f} through"
                    f" a fleet: {rates[1] / rates[0]:.3f}"
                )
        with fleet_of(daemons) as socket:
            streams = 6 * SLOTS
            rates = [
                asyncio.run(tokens_s(s, "narrow", streams, LONG_TURNS)) for s in (direct, socket)
            ]
            print(
                f"tokens/s, {streams} streams: {rates[0]:.0f} on one node, {rates[1]:.0f}"
                f" on three: {rates[1] / rates[0]:.2f}"
            )


if __name__ == "__main__":
    main()
