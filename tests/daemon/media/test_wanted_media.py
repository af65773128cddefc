"""Answers to a worker's requests for embeddings."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from inferd.backends import SamplingParams
from inferd.backends.errors import error_from_wire
from inferd.backends.media import MediaItem
from inferd.daemon.media.wanted_media import WantedMedia
from inferd.daemon.workers.process import start_spawner
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from inferd.sessions.worker_client import TaskClient

from .encoders import Gate, Scene, encoding

pytestmark = [pytest.mark.asyncio, pytest.mark.process]


@pytest.fixture(autouse=True)
def spawner() -> None:
    start_spawner()  # its descriptors stay open


class Reader:
    """The reader of a task with media."""

    begun = True

    def __init__(self, task_id: int, items: tuple[MediaItem, ...], user: int = 1):
        self.spec = m.TaskSpec(
            id=task_id,
            owner=Owner(user),
            tokens=b"",
            sampling=SamplingParams(),
            media=items,
        )
        self.encoded: list[tuple[int, float]] = []

    def media_encoded(self, items: int, seconds: float) -> None:
        self.encoded.append((items, seconds))

    def report(self, report: m.Report) -> None:
        raise AssertionError(report)

    def continue_on(self, client: TaskClient) -> m.TaskSpec | None:
        return self.spec

    def unread_for(self, seconds: float) -> bool:
        return False


class Worker:
    """The commands that were sent to a worker, with the content of their descriptors."""

    def __init__(self) -> None:
        self.sent: list[tuple[m.Command, bytes]] = []
        self.changes, self.changes_before_sent = 0, 0
        self._changed = anyio.Event()

    def send(self, command: m.Command, descriptor: int = -1) -> None:
        content = b""
        if descriptor >= 0:
            content = os.pread(descriptor, 1 << 20, 0)
            os.close(descriptor)
        self.sent.append((command, content))
        self.changes_before_sent = self.changes

    def change(self) -> None:
        self.changes += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._changed.wait()


@asynccontextmanager
async def wanting(scene: Scene) -> AsyncIterator[tuple[WantedMedia, Worker]]:
    worker = Worker()
    wanted = WantedMedia(worker.send, worker.change)
    wanted.encoder = scene.encoder
    async with encoding(scene):
        yield wanted, worker
    assert len(wanted) == 0


async def test_embeddings_are_sent_to_the_worker_and_counted_for_their_task() -> None:
    scene = Scene({"media_tiles": 2})
    async with wanting(scene) as (wanted, worker):
        items = await scene.read_items(b"x" * 64)
        one, other = Reader(1, items), Reader(2, items)
        wanted.want(one, [item.digest for item in items], "m")
        assert wanted.is_awaited_by(1) and not wanted.is_awaited_by(2)
        await worker.until(lambda: not wanted.is_awaited_by(1))
        assert worker.sent == [(m.MediaReady(item.digest, True, 1), bytes(32)) for item in items]
        assert worker.changes_before_sent == worker.changes, "it has its threads for them"
        assert [count for count, _ in one.encoded] == [1, 1]
        assert one.encoded[0][1] > 0 and one.encoded[1][1] == 0, "they were encoded together"

        wanted.want(other, [items[0].digest], "m")
        await worker.until(lambda: not wanted.is_awaited_by(2))
        assert len(worker.sent) == 3 and not other.encoded, "it was cached"


async def test_errors_are_sent_to_the_tasks_of_the_user_alone() -> None:
    scene = Scene({"media_abort_on": "bad"})
    async with wanting(scene) as (wanted, worker):
        items = await scene.read_items(b"bad", user=7)
        wanted.want(Reader(1, items, user=7), [items[0].digest], "m")
        await worker.until(lambda: not wanted.is_awaited_by(1))
        [(failed, _)] = worker.sent
        assert isinstance(failed, m.MediaFailed) and failed.scope == 7
        assert failed.digest == items[0].digest
        assert error_from_wire(failed.error).data["cause"] == "input"


async def test_a_model_without_a_projector_says_how_to_get_one() -> None:
    worker = Worker()
    wanted = WantedMedia(worker.send, worker.change)
    item = MediaItem(b"d" * 32, 1)
    wanted.want(Reader(1, (item,)), [item.digest], "llava")
    [(failed, _)] = worker.sent
    assert isinstance(failed, m.MediaFailed) and failed.error["name"] == "UnsupportedOperation"
    assert "mmproj" in failed.error["hint"] and not wanted.is_awaited_by(1)


async def test_a_digest_that_the_task_does_not_have_is_an_error() -> None:
    scene = Scene({})
    async with wanting(scene) as (wanted, worker):
        wanted.want(Reader(1, ()), [b"unknown"], "m")
        [(failed, _)] = worker.sent
        assert isinstance(failed, m.MediaFailed) and failed.digest == b"unknown"


async def test_a_task_that_ends_withdraws_its_requests(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    scene = Scene({"media_gate": str(gate.path)})
    async with wanting(scene) as (wanted, worker):
        items = await scene.read_items(b"x")
        for number in (1, 2):
            wanted.want(Reader(number, items), [items[0].digest], "m")
        await gate.wait_reached()
        assert len(wanted) == 2
        wanted.want(Reader(1, items), [items[0].digest], "m")
        assert len(wanted) == 2, "it waits already"
        wanted.end_task(1)
        assert not wanted.is_awaited_by(1) and wanted.is_awaited_by(2)
        gate.open()
        await worker.until(lambda: not wanted.is_awaited_by(2))
        assert len(worker.sent) == 1


async def test_requests_of_a_closed_encoder_are_dropped() -> None:
    scene = Scene({})
    async with wanting(scene) as (wanted, worker):
        items = await scene.read_items(b"x")
        scene.encoder.close()
        wanted.want(Reader(1, items), [items[0].digest], "m")
        assert not worker.sent and not wanted.is_awaited_by(1)


async def test_messages_survive_the_wire() -> None:
    decode = msgspec.msgpack.Decoder(list[m.Command]).decode
    sent: list[m.Command] = [m.MediaReady(b"d", False, 5), m.MediaReady(b"e")]
    assert decode(msgspec.msgpack.encode(sent)) == sent
