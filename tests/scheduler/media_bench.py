"""An engine whose requests for embeddings a test answers, with its batches."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence

import msgspec

from inferd.backends import Chunk
from inferd.backends.echo.options import EchoOptions
from inferd.backends.media import MediaContent, MediaItem, is_entry
from inferd.scheduler import messages as m
from tests.scheduler.doubles import Bench

SIZE = 20
BATCH_SIZE = 24
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def image(name: str, size: int = SIZE) -> MediaItem:
    content = MediaContent(hashlib.sha256(name.encode()).digest())
    return MediaItem.of_content(content, "projector", "build", index=0, size=size)


def memory(size: int, seals: int = SEALS) -> int:
    """Return the descriptor of sealed memory."""
    fd = os.memfd_create("embeddings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class MediaBench(Bench):
    """Requests for embeddings are answered in the next iteration, unless *held* is set. `wanted`
    has all of them.
    """

    def __init__(self, *, held: bool = False, options: EchoOptions | None = None, **more: object):
        options = options or EchoOptions(media=True)
        super().__init__(**{"batch_size": BATCH_SIZE, "options": options} | more)  # type: ignore[arg-type]
        self.held = held
        self.wanted: list[tuple[int, MediaItem]] = []
        self.batches: list[list[Chunk]] = []
        self._items: dict[bytes, MediaItem] = {}
        self._answers: list[m.MediaReady] = []
        step = self.model.step

        def recorded(chunks: Sequence[Chunk]) -> None:
            self.batches.append([*chunks])
            step(chunks)

        self.model.step = recorded  # type: ignore[method-assign]

    def spec_of(self, number: int, *parts: str | MediaItem, **fields: object) -> m.TaskSpec:
        """Return a task whose prompt has texts and images."""
        spec = self.spec(number, "", **fields)
        begin, *end = m.unpack_tokens(spec.tokens)
        tokens = [begin]
        for part in parts:
            tokens += part.entries() if isinstance(part, MediaItem) else part.encode()
        media = tuple(part for part in parts if isinstance(part, MediaItem))
        self._items |= {item.digest: item for item in media}
        return msgspec.structs.replace(spec, tokens=m.pack_tokens([*tokens, *end]), media=media)

    def submit_parts(self, number: int, *parts: str | MediaItem, **fields: object) -> m.Submit:
        return m.Submit(self.spec_of(number, *parts, **fields))

    def ready(self, item: MediaItem, *, causal: bool = True, scope: int = 1) -> m.MediaReady:
        """Return an answer with embeddings. By default, all tasks have user 1."""
        size = self.model.info.media_format.bytes_of(item.size)
        return m.MediaReady(item.digest, causal, scope, memory(size))

    def note(self, report: m.Report) -> None:
        super().note(report)
        if isinstance(report, m.MediaWanted):
            task = self.engine.tasks.find_task(report.task_id)
            found = [self._items[digest] for digest in report.digests]
            self.wanted += [(report.task_id, item) for item in found]
            if not self.held and task is not None:
                self._answers += [self.ready(item, scope=task.scope) for item in found]

    def iterate(self, *commands: m.Command) -> list[m.Report]:
        answers, self._answers = self._answers, []
        return super().iterate(*answers, *commands)

    def run(self, *commands: m.Command, iterations_max: int = 5000) -> None:
        super().run(*commands, iterations_max=iterations_max)
        while self._answers:
            super().run(iterations_max=iterations_max)

    @property
    def item_batches(self) -> list[Chunk]:
        """The chunks of images, each of which was a batch."""
        return [batch[0] for batch in self.batches if is_entry(batch[0].tokens[0])]

    def state(self, number: int) -> str:
        """Return the state of a task in the queue as clients see it."""
        entries = self.engine.tasks.view_queue().entries()
        [found] = [entry.state for entry in entries if entry.task_id == number]
        return found
