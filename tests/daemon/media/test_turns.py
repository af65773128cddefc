"""Turns with images on a daemon, while its processes work, crash and are killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from inferd import AsyncClient, Image, UnsupportedOperation, WorkerCrashed
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.pictures import png
from tests.waiting import wait_until

from .encoders import Gate

pytestmark = pytest.mark.asyncio
BAD = b"crash the decoder"


def image(text: bytes = b"") -> Image:
    return Image(png(8, 8, (1, 2, 3), text=text))


@asynccontextmanager
async def seeing(**options: object) -> AsyncIterator[tuple[RunningDaemon, AsyncClient]]:
    """Yield a daemon with a model that reads images, and a client."""
    config = echo_model("seer", media=True, slots=4, **options) + echo_model("blind")
    async with running_daemon(config) as daemon, AsyncClient(daemon.socket) as client:
        yield daemon, client


def pids_in(daemon: RunningDaemon, event: str) -> list[int]:
    """Return the processes of the log's lines about an event, in order."""
    lines = [line for line in daemon.log.splitlines() if event in line]
    return [int(found[1]) for line in lines if (found := re.search(r"pid=(\d+)", line))]


async def wait_logged(daemon: RunningDaemon, event: str) -> None:
    """Wait until the log has an event."""
    await anyio.to_thread.run_sync(wait_until, lambda: event in daemon.log)


async def test_the_metadata_of_a_turn_counts_what_was_encoded_for_it() -> None:
    async with seeing() as (_, client):
        async with client.session("seer") as session:
            await session.chat(["What is this?", image()])
            first = session.metadata
            assert (
                first["media_tokens"] > 0 and first["media_cached"] == 0 and first["encode_s"] > 0
            )
        async with client.session("seer") as session:
            await session.chat(["And this?", image()])
            second = session.metadata
            assert second["media_tokens"] == first["media_tokens"]
            assert second["media_cached"] == 1 and second["encode_s"] == 0


async def test_a_model_without_a_projector_says_how_to_get_one() -> None:
    async with seeing() as (_, client), client.session("blind") as session:
        with pytest.raises(UnsupportedOperation) as refused:
            await session.chat(["What is this?", image()])
        assert "mmproj" in refused.value.hint and refused.value.data["item"] == 0


async def test_turns_of_others_continue_while_an_image_is_encoded(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    async with (
        seeing(media_gate=str(gate.path)) as (_, client),
        client.session("seer") as one,
        client.session("seer") as other,
    ):

        async def chat() -> None:
            await one.chat(["What is this?", image()])

        async with anyio.create_task_group() as group:
            group.start_soon(chat)
            await gate.wait_reached()
            assert await other.chat("hello") == "hello"
            gate.open()
        assert one.metadata["media_cached"] == 0


@pytest.mark.parametrize("killed", ["encoder", "worker"])
async def test_a_turn_survives_the_death_of_a_process_while_its_image_is_encoded(
    killed: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    async with seeing(media_gate=str(gate.path)) as (daemon, client):
        async with client.session("seer") as session:
            answers = []

            async def chat() -> None:
                answers.append(await session.chat(["Look", image()]))

            async with anyio.create_task_group() as group:
                group.start_soon(chat)
                await gate.wait_reached()
                started, ended = {
                    "encoder": ("encoder.started", "encoder.died"),
                    "worker": ("model.loaded", "model.unloaded"),
                }[killed]
                [pid] = pids_in(daemon, started)
                os.kill(pid, signal.SIGKILL)
                await wait_logged(daemon, ended)  # or the first process passes the gate
                gate.open()
                await gate.wait_reached()
                gate.open()
            assert len(answers) == 1
            history = await session.history()
            assert [message["role"] for message in history.messages] == ["user", "assistant"]
        assert len(pids_in(daemon, "encoder.started")) == 2


async def test_an_image_that_crashes_the_encoder_is_refused_and_the_session_goes_on() -> None:
    async with seeing(media_abort_on=BAD.decode()) as (daemon, client):
        async with client.session("seer") as session:
            for _ in range(2):
                with pytest.raises(WorkerCrashed) as crashed:
                    await session.chat(["Look", image(BAD)])
                assert crashed.value.data["cause"] == "input"
            assert await session.chat("hello") == "hello"
            await session.chat(["Look", image()])
        assert daemon.log.count("encoder.died") == 1 and "worker.died" not in daemon.log
        assert daemon.log.count("media.quarantined") == 1


async def test_sixteen_sessions_about_one_image_encode_it_once() -> None:
    async with seeing() as (_, client):
        counts = list[int]()

        async def chat(number: int) -> None:
            async with client.session("seer") as session:
                await session.chat([image(), f"Question {number}"])
                counts.append(session.metadata["media_cached"])

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(chat, number)
        assert sorted(counts) == [0, *[1] * 15]


async def test_the_next_worker_gets_the_embeddings_that_its_predecessor_had() -> None:
    async with seeing(step_ms=2) as (daemon, client), client.session("seer") as session:
        text, pieces = "a long text to repeat, " * 20, list[str]()
        async for piece in session.stream([image(), text]):
            pieces.append(piece)
            if len(pieces) == 5:
                [pid] = pids_in(daemon, "model.loaded")
                os.kill(pid, signal.SIGKILL)
        assert "".join(pieces).endswith(text) and daemon.log.count("worker.died") == 1
        metrics = await client.metrics()
        assert counted(metrics, "media_encodings_total", result="encoded") == 1


def counted(metrics: str, name: str, **labels: str) -> float:
    """Return the value of a family's sample with these labels; 0 if there is none."""
    for line in metrics.splitlines():
        pairs = [f'{label}="{value}"' for label, value in labels.items()]
        if line.startswith(f"inferd_{name}{{") and all(pair in line for pair in pairs):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


async def test_metrics_count_encodings_and_deaths() -> None:
    async with seeing(media_abort_on=BAD.decode()) as (_, client):
        async with client.session("seer") as session:
            for _ in range(2):
                await session.chat(["Look", image()])
            with pytest.raises(WorkerCrashed):
                await session.chat(["Look", image(BAD)])
        metrics = await client.metrics()
        assert counted(metrics, "media_encodings_total", result="encoded") == 1
        assert counted(metrics, "media_encodings_total", result="failed") == 1
        assert counted(metrics, "media_encode_seconds_count") == 1
        assert counted(metrics, "encoder_restarts_total") == 1
        assert counted(metrics, "media_cache_bytes") > 0
        assert counted(metrics, "media_requests_waiting") == 0
