"""inferd's side of the bench: a daemon with the bench's configuration, and its clients."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from inferd import AsyncClient
from inferd.backends.errors import EndOfSequence

from .clients import ask_together
from .scenario import CTX_SIZE, MODEL, SLOTS, THREADS, Job, Stream, check_cached

START_S_MAX = 30
CONFIGURATION = f"""\
[daemon]
models-dir = "{MODEL.parent}"
cores = {THREADS}
keep-alive-s = -1

[defaults]
slots = {SLOTS}
ctx-size = {CTX_SIZE}
"""


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Path, psutil.Process]]:
    """Run a daemon; yields its socket and process."""
    with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
        home = Path(folder)
        (home / "config.toml").write_text(CONFIGURATION)
        env = {**os.environ, "INFERD_SOCKET": str(home / "inferd.sock")}
        env |= {"INFERD_CONFIG": str(home / "config.toml"), "INFERD_STATE_DIR": str(home)}
        with (home / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inferd", "serve"), env=env, stdout=log, stderr=log
            )
        try:
            async with asyncio.timeout(START_S_MAX):
                await _up(process, home)
            yield home / "inferd.sock", psutil.Process(process.pid)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _up(process: asyncio.subprocess.Process, home: Path) -> None:
    while not (home / "inferd.sock").exists():
        if process.returncode is not None:
            raise SystemExit(f"inferd did not come up:\n{(home / 'log').read_text()}")
        await asyncio.sleep(0.05)


class StreamClient:
    """Streams over a connection of its own: the daemon pushes. Opening the session is timed too."""

    def __init__(self, client: AsyncClient):
        self.client = client

    async def ask(self, text: str, n_predict: int) -> Stream:
        """Send the prompt, read its answer to the end."""
        asked_s = time.perf_counter()
        async with self.client.session(MODEL.stem, raw=True, options=options(n_predict)) as session:
            arrivals = [time.perf_counter() async for _ in session.stream(text)]
            tokens = int(session.metadata["output_tokens"])
            check_cached(session.metadata["cached_tokens"])
        return Stream(asked_s, tuple(arrivals), tokens)


class PullClient(StreamClient):
    """Asks for every token with `compute_single`, as wasi-nn guests do."""

    async def ask(self, text: str, n_predict: int) -> Stream:
        """Set the input, then compute a token a call until the turn ends."""
        asked_s = time.perf_counter()
        arrivals: list[float] = []
        async with self.client.session(MODEL.stem, raw=True, options=options(n_predict)) as session:
            await self.client.set_input(session.context, 0, text)
            with suppress(EndOfSequence):
                while True:
                    await self.client.compute_single(session.context)
                    arrivals.append(time.perf_counter())
            metadata = json.loads(await self.client.get_output(session.context, 1))
            check_cached(metadata["cached_tokens"])
        return Stream(asked_s, tuple(arrivals), len(arrivals))


def options(n_predict: int) -> dict[str, Any]:
    """Return what every turn of the bench asks for."""
    return {"temp": 0, "n-predict": n_predict, "ignore-eos": True}


async def keep_loaded(stack: AsyncExitStack, socket: Path) -> None:
    """Load the model and hold a lease until *stack* closes: no run is to pay for a load."""
    client = await stack.enter_async_context(AsyncClient(socket))
    await client.load_by_name(MODEL.stem)


async def run(socket: Path, kind: type[StreamClient], job: Job) -> list[Stream]:
    """Run the scenario on the daemon, a connection a stream."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(socket)) for _ in range(job.streams)]
        return await ask_together([kind(client) for client in clients], job)
