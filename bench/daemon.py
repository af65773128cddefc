"""inferd's side of the bench: a daemon with a scenario's configuration, and its clients."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from inferd import AsyncClient, AsyncSession, InferdError, Infill
from inferd.backends.errors import EndOfSequence
from inferd.daemon.state_files import TUNING_FILE
from tools.build_engine import ROOT

from .clients import MEDIA_MARKER, Request
from .machine import MODEL, THREADS
from .streams import Stream

START_S_MAX = 30
TUNING_RECORDS = ROOT / "bench" / "out" / TUNING_FILE
"""The records of `own_setting.measure`, with which daemons begin."""
ECHO_BATCH_SIZE = 8192
"""With the default of 512, a step would hold the prompts of only a few of many streams."""


def configuration(slots: int, ctx_size: int, settings: Mapping[str, Any] | None = None) -> str:
    """Return a configuration file's text, with *settings* in [daemon]. By default the daemon does
    not measure models while it is idle, when another side runs.
    """
    table = {"models-dir": str(MODEL.parent), "cores": THREADS, "keep-alive-s": -1}
    table["tuning"] = False
    lines = ["[daemon]", *_lines(table | dict(settings or {})), ""]
    return "\n".join([*lines, "[defaults]", *_lines({"slots": slots, "ctx-size": ctx_size}), ""])


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


def echo_configuration(
    models: Sequence[str],
    slots: int,
    step_ms: float = 0.0,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a configuration file with *models* that repeat their input."""
    lines = ["[daemon]", *_lines({"keep-alive-s": -1} | dict(settings or {})), ""]
    for name in models:
        model = {"backend": "echo", "slots": slots, "batch-size": ECHO_BATCH_SIZE}
        lines += [f"[models.{name}]", *_lines(model), ""]
        lines += [f"[models.{name}.echo]", *_lines({"step_ms": step_ms}), ""]
    return "\n".join(lines)


class StreamClient:
    """A client that streams over its own connection. The first turn's time includes opening the
    session.
    """

    def __init__(self, client: AsyncClient, session_id: str | None = None, model: str = MODEL.stem):
        self.client = client
        self.session = client.session(model, session_id=session_id, raw=True)
        self.last_answer = ""
        self._open = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._open:
            await self.session.__aexit__(None, None, None)

    async def open_session(self) -> AsyncSession:
        """Return the session, which the first request opens."""
        if not self._open:
            await self.session.__aenter__()
            self._open = True
        return self.session

    async def send_request(self, request: Request) -> Stream:
        """Send the text and read its answer to the end."""
        requested_s = time.perf_counter()
        arrivals: list[float] = []
        pieces: list[str] = []
        try:
            session = await self.open_session()
            turn_options = options(request.tokens, request.schema, request.speculation)
            prompt: str | Infill | None = request.text
            if request.suffix is not None:
                prompt = Infill(prefix=request.text, suffix=request.suffix)
            if request.image is not None:
                await self.client.set_input(session.context, 0, image_prompt(request))
                prompt = None
            stream = session.stream(prompt, options=turn_options, priority=request.priority)
            async for piece in stream:
                arrivals.append(time.perf_counter())
                pieces.append(piece)
        except InferdError as exc:
            return stream_of(request, requested_s, arrivals, {}, str(exc) or exc.name)
        self.last_answer = "".join(pieces)
        return stream_of(request, requested_s, arrivals, session.metadata)


class PullClient(StreamClient):
    """A client that requests every token with `compute_single`, as wasi-nn guests do.

    It supports one turn only.
    """

    async def send_request(self, request: Request) -> Stream:
        """Set the input, then compute one token per call until the turn ends."""
        requested_s = time.perf_counter()
        arrivals: list[float] = []
        session = await self.open_session()
        await session.set_options(options(request.tokens, request.schema, request.speculation))
        await self.client.set_input(session.context, 0, request.text)
        with suppress(EndOfSequence):
            while True:
                await self.client.compute_single(session.context)
                arrivals.append(time.perf_counter())
        metadata = json.loads(await self.client.get_output(session.context, 1))
        return stream_of(request, requested_s, arrivals, metadata)


def image_prompt(request: Request) -> bytes:
    """Return a request's text with its image, as wasi-nn's guests write it."""
    assert request.image is not None
    tag = b'<img src="data:image/png;base64,%b">' % base64.b64encode(request.image)
    return request.text.encode().replace(MEDIA_MARKER.encode(), tag)


def stream_of(
    request: Request,
    requested_s: float,
    arrivals: list[float],
    metadata: Mapping[str, Any],
    error: str = "",
) -> Stream:
    """Return the record of a turn with the *metadata* that the daemon returned."""
    return Stream(
        requested_s=requested_s,
        arrivals_s=tuple(arrivals),
        tokens=int(metadata.get("output_tokens", 0)),
        tokens_requested=request.tokens,
        label=request.label,
        priority=request.priority,
        waited_s=metadata.get("queue_ms", 0) / 1000,
        input_tokens=int(metadata.get("input_tokens", 0)),
        cached_tokens=int(metadata.get("cached_tokens", 0)),
        parks=int(metadata.get("parks", 0)),
        encode_s=metadata.get("encode_s", 0.0),
        error=error,
    )


def options(
    n_predict: int, schema: Mapping[str, Any] | None = None, speculation: str | None = None
) -> dict[str, Any]:
    """Return the options of a turn of the bench. With a *schema* the answer ends where it is
    complete, so the end of generation is not ignored.
    """
    common: dict[str, Any] = {"temp": 0, "n-predict": n_predict}
    if speculation is not None:
        common["speculation"] = speculation
    return common | ({"ignore-eos": True} if schema is None else {"json-schema": schema})


@dataclass(frozen=True)
class Inferd:
    """A running daemon."""

    socket: Path
    process: psutil.Process

    @asynccontextmanager
    async def client(
        self,
        slot: int = -1,
        kind: type[StreamClient] = StreamClient,
        session_id: str | None = None,
        model: str = MODEL.stem,
    ) -> AsyncIterator[StreamClient]:
        """Connect a program; the daemon leases slots itself."""
        async with AsyncClient(self.socket) as client, kind(client, session_id, model) as program:
            yield program

    async def keep_loaded(self, stack: AsyncExitStack, model: str = MODEL.stem) -> None:
        """Load the model and hold a lease until *stack* closes, so that no run pays for a load."""
        client = await stack.enter_async_context(AsyncClient(self.socket))
        await client.load_by_name(model)


@asynccontextmanager
async def running(
    text: str, home: Path | None = None, records: Path | None = None
) -> AsyncIterator[Inferd]:
    """Run a daemon with the configuration *text*, and with its state in *home* if given. It begins
    with the measured settings in the file *records*, by default `TUNING_RECORDS`.
    """
    records = records or TUNING_RECORDS
    with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
        home = home or Path(folder)
        (home / "config.toml").write_text(text)
        if records.exists() and not (home / TUNING_FILE).exists():
            shutil.copy(records, home / TUNING_FILE)
        env = {**os.environ, "INFERD_SOCKET": str(home / "inferd.sock")}
        env |= {"INFERD_CONFIG": str(home / "config.toml"), "INFERD_STATE_DIR": str(home)}
        env |= {"INFERD_METRICS": str(home / "metrics.sock")}
        with (home / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inferd", "serve"), env=env, stdout=log, stderr=log
            )
        try:
            async with asyncio.timeout(START_S_MAX):
                await _up(process, home)
            yield Inferd(home / "inferd.sock", psutil.Process(process.pid))
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _up(process: asyncio.subprocess.Process, home: Path) -> None:
    while not _listens(home / "inferd.sock"):
        if process.returncode is not None:
            raise SystemExit(f"inferd did not start:\n{(home / 'log').read_text()}")
        await asyncio.sleep(0.05)


def _listens(path: Path) -> bool:
    """Return whether a connection succeeds; the file exists a moment earlier."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0
