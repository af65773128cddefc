"""Encoders of echo models for tests, with a store of contents in memory."""

from __future__ import annotations

import hashlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread

from inferd.backends import ModelSpec
from inferd.backends.errors import NotFound
from inferd.backends.media import MediaContent, MediaItem, MediaKind
from inferd.daemon.media.encoder import EncoderChange, EncoderEvent, EncodingEnded, MediaEncoder
from inferd.daemon.media.encoder_queue import EncoderBounds
from inferd.daemon.media.settings import MediaSettings
from inferd.daemon.workers.deaths import ENCODER_PROCESS, Quarantine
from inferd.scheduler.owner import Owner, Priority, Requester

__all__ = ("Gate", "Scene", "encoding", "open_files")

SECONDS_MAX = 60.0


def open_files() -> dict[str, str]:
    """Return this process's open files, by descriptor."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            found[link.name] = os.readlink(link)
    return found


class Gate:
    """A FIFO at which an echo model's encodings wait."""

    def __init__(self, path: Path):
        os.mkfifo(path)
        self.path = path
        self._writer = -1

    async def wait_reached(self) -> None:
        """Wait until an encoding is at the gate."""
        self._writer = await anyio.to_thread.run_sync(os.open, self.path, os.O_WRONLY)

    def open(self) -> None:
        """Let the encoding pass that has reached the gate."""
        os.close(self._writer)


class Scene:
    """An encoder, its contents by user, and its events."""

    def __init__(
        self,
        options: Mapping[str, object],
        *,
        shared: bool = False,
        cache_bytes: int = 1 << 20,
        pixels_max: int = 1 << 20,
        bounds: EncoderBounds | None = None,
        hang_s: float = SECONDS_MAX,
        spec: ModelSpec | None = None,
        idle_threads: Callable[[], int] = lambda: 0,
    ):
        self.contents: dict[tuple[int, bytes], bytes] = {}
        self.events: list[EncoderEvent] = []
        self.on_event: Callable[[EncoderEvent], None] = lambda _: None
        self.quarantine = Quarantine(process=ENCODER_PROCESS)
        self._changed = anyio.Event()
        own = ModelSpec(name="m", backend="echo", threads=2, options={"media": True, **options})
        self.encoder = MediaEncoder(
            spec or own,
            MediaSettings(
                bytes_max=1 << 20,
                pixels_max=pixels_max,
                seconds_max=60,
                cache_bytes=cache_bytes,
                cores=2,
            ),
            open_content=self.open_content,
            quarantine=self.quarantine,
            shared=shared,
            hang_s=hang_s,
            emit=self._emit,
            bounds=bounds,
            idle_threads=idle_threads,
        )

    def _emit(self, event: EncoderEvent) -> None:
        self.events.append(event)
        self.on_event(event)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for events until *condition* returns a true value."""
        while not condition():
            await self._changed.wait()

    def kill(self) -> int:
        """Kill the process, which exists; return its id."""
        pid = self.encoder.pid
        assert pid, "a process runs"
        os.kill(pid, signal.SIGKILL)
        return pid

    def add(
        self, data: bytes, user: int = 1, kind: MediaKind = "image", tokens_max: int = 0
    ) -> MediaContent:
        """Add a content of a user."""
        sha256 = hashlib.sha256(data).digest()
        self.contents[user, sha256] = data
        return MediaContent(sha256, kind, tokens_max)

    def open_content(self, user: int, sha256: bytes) -> int:
        """Return a descriptor of a content, as the media store does."""
        if (user, sha256) not in self.contents:
            raise NotFound("there is no such content")
        descriptor = os.memfd_create("content", os.MFD_CLOEXEC)
        os.pwrite(descriptor, self.contents[user, sha256], 0)
        return descriptor

    async def read_items(self, data: bytes, user: int = 1) -> tuple[MediaItem, ...]:
        """Add and read a content; return its items."""
        [found] = await self.encoder.read(requester(user), [self.add(data, user)])
        return found.items

    async def encode(self, data: bytes, user: int = 1, by: object = None) -> tuple[bytes, bool]:
        """Read and encode a content; return its first item's embeddings, and whether they were
        cached.
        """
        item = (await self.read_items(data, user))[0]
        found = await self.encoder.embeddings(requester(user), item, by)
        try:
            return os.pread(found.fd, 1 << 20, 0), found.cached
        finally:
            os.close(found.fd)

    @property
    def results(self) -> Counter[str]:
        """The requests for embeddings that have ended, by result."""
        return Counter(e.result.value for e in self.events if isinstance(e, EncodingEnded))

    @property
    def deaths(self) -> int:
        """The processes that have died."""
        return self.events.count(EncoderChange.DIED)

    def has_died(self, deaths: int) -> bool:
        """Return whether so many processes have died."""
        return self.deaths == deaths


def requester(user: int, priority: Priority = Priority.NORMAL) -> Requester:
    """Return the requester of a user."""
    return Requester(Owner(user), priority)


@asynccontextmanager
async def encoding(scene: Scene) -> AsyncIterator[Scene]:
    """Run a scene's encoder; at the end no file is open that was not before."""
    before = open_files()
    with anyio.fail_after(SECONDS_MAX):
        async with anyio.create_task_group() as group:
            await group.start(scene.encoder.run)
            yield scene
            scene.encoder.close()
        assert not scene.encoder.waiting and not scene.encoder.pid
        assert not open_files().items() - before.items()
