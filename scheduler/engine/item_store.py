"""The embeddings of images and sounds that tasks need, in memory that the encoder has sealed.

Tasks get embeddings in their order, as many as fit. Those that no task needs are freed at once: the
daemon keeps some, and sends them again.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Sequence

from ...backends import ModelInfo
from ...backends.batch import FLOAT_BYTES, MediaInput
from ...backends.errors import BackendError, InferdError, TooLarge
from ...backends.media import MediaItem
from ...backends.shared_memory import sealed_bytes
from .. import messages as m
from ..kv.slots import StateSearch
from ..kv.store import SCOPE_ALL
from ..task import Task, TaskState

ItemKey = tuple[int, bytes]
"""The scope of the tasks that an item may serve, as that of their KV states, and its digest."""
ITEMS_MAX = 256
"""Items in memory or requested: each has a descriptor and a mapping."""


class ItemStore:
    """Owned by the engine. At most *bytes_max*, of `ITEMS_MAX` items, are in memory or requested,
    unless one item alone is larger.
    """

    def __init__(self, info: ModelInfo, search: StateSearch, bytes_max: int):
        self._format, self._search, self._bytes_max = info.media_format, search, bytes_max
        self._ready: dict[ItemKey, MediaInput] = {}
        self._requested: dict[ItemKey, dict[int, MediaItem]] = {}
        """By item, the tasks that wait for an answer, with their item."""
        self._covered: dict[int, tuple[int, int]] = {}
        """By waiting task, the number of tokens for which a state is known, and `changes` of the
        search at that time.
        """

    def __len__(self) -> int:
        """Return the number of items in memory."""
        return len(self._ready)

    @property
    def size_bytes(self) -> int:
        """The bytes of the items in memory."""
        return sum(self._format.bytes_of(one.size) for one in self._ready.values())

    def plan_items(self, tasks: Sequence[Task], running: Task | None = None) -> list[m.MediaWanted]:
        """Give *tasks*, in their order, the embeddings that they need, and free all others. Return
        the requests for those that are missing.

        The next image of *running*, which has a slot, precedes all. So there is always a task that
        can go on, also if no state can be saved to free a slot for the first one.
        """
        wanted, chosen, total = list[m.MediaWanted](), set[ItemKey](), 0
        if running is not None:
            for _, item in running.media_needed()[:1]:
                chosen.add((running.scope, item.digest))
                total += self._format.bytes_of(item.size)
        for task in tasks:
            task.embeddings, missing = {}, list[MediaItem]()
            full = total >= self._bytes_max or len(chosen) >= ITEMS_MAX
            if full and task is not running:
                continue
            self._find_covered(task)
            for begin, item in task.media_needed():
                key = task.scope, item.digest
                if key not in chosen:
                    size = self._format.bytes_of(item.size)
                    over = total + size > self._bytes_max or len(chosen) >= ITEMS_MAX
                    if chosen and over:
                        break
                    chosen.add(key)
                    total += size
                if key in self._ready:
                    task.embeddings[begin] = self._ready[key]
                elif task.spec.id not in self._requested.get(key, {}):
                    self._requested.setdefault(key, {})[task.spec.id] = item
                    missing.append(item)
            if missing:
                wanted.append(m.MediaWanted(task.spec.id, [item.digest for item in missing]))
        for key in [*self._ready]:
            if key not in chosen:
                del self._ready[key]
        return wanted

    def _find_covered(self, task: Task) -> None:
        """Find how many tokens of a task that has not started have a KV state."""
        if task.state is not TaskState.WAITING or task.ignores_cache:
            return
        changes, known = self._search.changes, self._covered.get(task.spec.id)
        if known is None or known[1] != changes:
            keep = self._search.find_source(task.origin, array("i", task.tokens)).keep
            known = self._covered[task.spec.id] = keep, changes
        task.covered = known[0]

    def add_item(self, report: m.MediaReady) -> tuple[list[int], InferdError | None]:
        """Keep the embeddings of an answer, whose descriptor is closed, if a task waits for them.
        Return the tasks that fail, and their error.
        """
        key = report.scope, report.digest
        waiting = self._requested.pop(key, {})
        try:
            item = next(iter(waiting.values()), None)
            if item is not None and key not in self._ready:
                self._ready[key] = self._map(report, item)
        except InferdError as exc:
            return [*waiting], exc
        finally:
            if report.fd >= 0:
                os.close(report.fd)
        return [], None

    def fail_item(self, scope: int, digest: bytes) -> list[int]:
        """Return the tasks that wait for an item of which there will be no embeddings."""
        found = [k for k in self._requested if k[1] == digest and scope in (k[0], SCOPE_ALL)]
        return [number for key in found for number in self._requested.pop(key)]

    def forget_task(self, task: Task) -> None:
        """Forget a task that has ended. Answers that only it waits for are dropped."""
        self._covered.pop(task.spec.id, None)
        for key in [*self._requested] if task.media else ():
            waiting = self._requested[key]
            waiting.pop(task.spec.id, None)
            if not waiting:
                del self._requested[key]

    def _map(self, report: m.MediaReady, item: MediaItem) -> MediaInput:
        """Return the embeddings behind the descriptor of *report*.

        :raises BackendError: they have another size than the item, or can still be changed.
        :raises TooLarge: one step cannot compute the item.
        """
        wanted, size = self._format, item.size
        if not report.causal and size > wanted.size_max:
            raise TooLarge(
                f"an image has {size} tokens, which see each other; a step computes at most"
                f" {wanted.size_max}",
                hint="send a smaller one, lower image-tokens-max, or raise batch-size",
                data={"tokens": size, "tokens_max": wanted.size_max},
            )
        bytes_wanted, found = wanted.bytes_of(size), sealed_bytes(report.fd)
        if found != bytes_wanted:
            raise BackendError(
                f"the embeddings of {size} tokens are {found} bytes of sealed memory instead of"
                f" {bytes_wanted}",
                hint="load the model again",
            )
        try:
            mapped = mmap.mmap(report.fd, found, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        except OSError as exc:
            raise BackendError(f"cannot map the embeddings of an image: {exc.strerror}") from None
        view, rows = memoryview(mapped), size * wanted.width * FLOAT_BYTES
        return MediaInput(
            embeddings=view[:rows],
            size=size,
            positions=item.positions or size,
            places=view[rows:] if wanted.mrope else None,
            causal=report.causal,
        )
