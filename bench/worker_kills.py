"""A kill of the worker every 2 s beside 16 streams and 4 pull readers (`-m bench.worker_kills`).

Each reader reads one turn after another until the time is over. The line that is printed has the
whole turns and the errors, of which none is expected.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from contextlib import suppress

import anyio
import psutil

from bench.daemon import options
from bench.machine import MODEL
from inferd import AsyncClient, InferdError
from inferd.testing import RunningDaemon, running_daemon

STREAMS, PULLS = 16, 4
KILL_S = 2.0
TOKENS = 60
ECHO = 'keep-alive = -1\nbackend = "echo"\nslots = 20\n'
STORY = "Once upon a time there was a king who had three sons. " * 3


class Readers:
    """The readers of one daemon; `whole` counts their turns."""

    def __init__(self, daemon: RunningDaemon, seconds: float, *, is_echo: bool):
        self.whole = [0] * (STREAMS + PULLS)
        self.errors: list[str] = []
        self.kills = 0
        self._daemon, self._is_echo = daemon, is_echo
        self._ends_at_s = time.monotonic() + seconds

    async def run(self) -> None:
        """Read and kill until the time is over, and all turns have ended."""
        async with AsyncClient(self._daemon.socket) as client, anyio.create_task_group() as group:
            group.start_soon(self._kill_workers)
            for number in range(len(self.whole)):
                group.start_soon(self._read_turns, client, number)

    async def _kill_workers(self) -> None:
        while time.monotonic() < self._ends_at_s:
            await anyio.sleep(KILL_S)
            for worker in psutil.Process(self._daemon.pid).children():
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
                    self.kills += 1

    async def _read_turns(self, client: AsyncClient, number: int) -> None:
        while time.monotonic() < self._ends_at_s:
            try:
                self.whole[number] += await self._read_turn(client, number)
            except InferdError as exc:
                self.errors.append(exc.name)
                await anyio.sleep(0.2)

    async def _read_turn(self, client: AsyncClient, number: int) -> bool:
        """Read a turn; return whether it was whole."""
        text = f"{number} {STORY}"
        async with client.session("killed", raw=True) as session:
            await session.set_options(options(TOKENS))
            turn = session.stream(text) if number < STREAMS else session.pull(text)
            pieces = [piece async for piece in turn]
            if self._is_echo:
                return "".join(pieces) == text[:TOKENS]
            return bool(session.metadata["output_tokens"] == TOKENS)


def main() -> None:
    """Run it and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--echo", action="store_true", help="the echo model, which loads at once")
    arguments = parser.parse_args()
    echo = f"[models.killed]\n{ECHO}[models.killed.echo]\nstep_ms = 20\n"
    real = f'[models.killed]\nfile = "{MODEL}"\nslots = {STREAMS + PULLS}\nctx-size = 512\n'
    config = echo if arguments.echo else real
    with running_daemon(config) as daemon:
        readers = Readers(daemon, arguments.seconds, is_echo=arguments.echo)
        anyio.run(readers.run)
        deaths, refused = daemon.log.count("worker.died"), daemon.log.count("task.quarantined")
    print(
        f"{readers.kills} kills, {deaths} of loaded workers: {sum(readers.whole)} turns whole, at"
        f" least {min(readers.whole)} of each reader; {refused} tasks quarantined, errors:"
        f" {dict(Counter(readers.errors)) or 'none'}"
    )


if __name__ == "__main__":
    main()
