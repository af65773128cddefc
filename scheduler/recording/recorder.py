"""The present activity of a worker, in memory that the daemon reads if it exits or hangs.

A message would come too late: llama.cpp aborts the process in the middle of a step.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_HEAD = struct.Struct("=dII")
_IDS_MAX = 509
ACTIVITY_BYTES = 4096
_TEXT_THREAD = ACTIVITY_BYTES - 1
"""The place of the byte that is set while the text thread works."""
RECORD_BYTES = 2 * ACTIVITY_BYTES
"""The first page holds the activity, the second one the metrics (`engine_metrics.MetricsPage`)."""


class ActivityKind(IntEnum):
    """The activities that can end or hang a process."""

    IDLE = 0
    STEP = 1
    """Decoding a batch; the ids are those of the tasks."""
    SAMPLE = 2
    """Sampling for one task, or checking its grammar and its text; the id is that of the task."""
    PROMPT = 3
    """Tokenizing, or rendering a chat; the id is that of the request."""
    OTHER = 4


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity that began at *at* (seconds of CLOCK_MONOTONIC, which all processes share).
    *beside_text* means that a thread tokenizes a text meanwhile, so a crash has two possible
    causes.
    """

    kind: ActivityKind
    ids: tuple[int, ...]
    at: float
    beside_text: bool = False


def create_record() -> int:
    """Return the descriptor of a new record: two pages of shared memory."""
    fd = os.memfd_create("inferd-record", os.MFD_CLOEXEC)
    os.truncate(fd, RECORD_BYTES)
    return fd


class Recorder:
    """The first page of a worker's record, with its activity. The worker writes it (2 µs a step),
    the daemon reads it. Without a descriptor its memory is private.
    """

    def __init__(self, fd: int = -1):
        self._page = mmap.mmap(fd, ACTIVITY_BYTES)
        self.record_activity(ActivityKind.IDLE)

    def record_activity(self, kind: ActivityKind, ids: Sequence[int] = ()) -> None:
        """Record the activity that begins now."""
        if ids:
            ids = ids[:_IDS_MAX]
            struct.pack_into(f"={len(ids)}Q", self._page, _HEAD.size, *ids)
        _HEAD.pack_into(self._page, 0, time.monotonic(), kind, len(ids))

    def read_activity(self) -> Activity:
        """Return the latest activity."""
        at, kind, count = _HEAD.unpack_from(self._page, 0)
        ids = struct.unpack_from(f"={min(count, _IDS_MAX)}Q", self._page, _HEAD.size)
        return Activity(ActivityKind(kind), ids, at, bool(self._page[_TEXT_THREAD]))

    def record_text_thread(self, *, busy: bool) -> None:
        """Record whether the text thread works."""
        self._page[_TEXT_THREAD] = busy
