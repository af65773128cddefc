"""The memory in which the daemon reads a worker's present activity and the engine's metrics.

A message with the activity would come too late: llama.cpp aborts the process in the middle of a
step. And a reader of the metrics must not wait for a worker that computes a step or is stopped. The
engine's `MetricsPublisher` therefore writes the page of metrics at intervals and before it rests.
The memory outlives the process.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

_HEAD = struct.Struct("=dIII")
_IDS_MAX = 509
ACTIVITY_BYTES = 4096
_TEXT_THREAD = ACTIVITY_BYTES - 1
"""The place of the byte with the number of threads beside the engine's that use the model."""
RECORD_BYTES = 2 * ACTIVITY_BYTES
"""The first page holds the activity, the second one the metrics (`MetricsPage`)."""


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
    *beside_text* means that a thread tokenizes a text or computes tensors meanwhile, so a crash has
    two possible causes. Of activities at the same time, *at* is the begin of the oldest, which the
    first *oldest* ids belong to; None: all of them.
    """

    kind: ActivityKind
    ids: tuple[int, ...]
    at: float
    beside_text: bool = False
    oldest: int | None = None


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
        self._threads_busy = 0
        self.record_activity(ActivityKind.IDLE)

    def record_activity(
        self,
        kind: ActivityKind,
        ids: Sequence[int] = (),
        *,
        oldest: int | None = None,
        at: float | None = None,
    ) -> None:
        """Record the activity that begins now, or began *at* this time; see `Activity`."""
        if ids:
            ids = ids[:_IDS_MAX]
            struct.pack_into(f"={len(ids)}Q", self._page, _HEAD.size, *ids)
        began_at = time.monotonic() if at is None else at
        first = len(ids) if oldest is None else oldest
        _HEAD.pack_into(self._page, 0, began_at, kind, len(ids), first)

    def read_activity(self) -> Activity:
        """Return the latest activity."""
        at, kind, count, oldest = _HEAD.unpack_from(self._page, 0)
        ids = struct.unpack_from(f"={min(count, _IDS_MAX)}Q", self._page, _HEAD.size)
        return Activity(ActivityKind(kind), ids, at, bool(self._page[_TEXT_THREAD]), oldest)

    @property
    def began_at(self) -> float:
        """When the latest activity began; see `Activity.at`."""
        return float(_HEAD.unpack_from(self._page, 0)[0])

    def record_text_thread(self, *, busy: bool) -> None:
        """Record that a thread which works on texts or tensors begins or ends its work."""
        self._threads_busy += 1 if busy else -1
        self._page[_TEXT_THREAD] = self._threads_busy


WRITTEN_S = 0.25
"""The greatest age of the page while steps are computed."""


class StepKind(StrEnum):
    """The kind of a step: decoding tasks, prompts, or both."""

    DECODE = "decode"
    MIXED = "mixed"
    PREFILL = "prefill"


class WaitReason(StrEnum):
    """The reason for which a task has no slot."""

    SLOT = "slot"
    PREFIX = "prefix"
    """A running task computes a prefix that both share."""
    CELLS = "cells"
    """The KV cache was full."""
    DISK = "disk"
    """Its KV state is being read."""
    GRAMMAR = "grammar"
    """Its grammar is being compiled."""
    ENCODING = "encoding"
    """The embeddings of its next image or sound are being computed."""
    READER = "reader"
    """Its reader takes or requests no tokens."""
    OPERATOR = "operator"
    """It was parked by hand."""


STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
COMPUTE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""The buckets of times of graphs, which compute some in a tenth of a millisecond."""
POWERS_OF_TWO = tuple(float(1 << n) for n in range(12))

DRAFTERS = ("ngram", "draft", "mtp")
"""The drafters whose drafts are counted, by the names that the parameter `speculation` has."""

ENGINE_COUNTS = (
    *("batch_tokens", "generated", "forced", "prompt", "cached", "prefix_queries"),
    *("parks", "shifts", "kv_full", "tuning_slices"),
    *(f"{count}_{drafter}" for count in ("drafted", "accepted") for drafter in DRAFTERS),
    *("draft_step_tokens", "draft_step_us", "draft_plain_us"),
)
"""Counters that the engine itself counts, in `MetricsPublisher.counts`. The last ones are of steps
with drafts: the tokens that their streams got, the time that they took, and the time that as many
tokens would have taken without drafts, as predicted.
"""
TENSOR_COUNTS = ("computed", "compute_failed", "compute_runs", "compute_us")
"""Counters of the engine of a graph: inputs that were computed, and that failed; computations of
one or several inputs, and their time.
"""
TENSOR_GAUGES = ("computations_waiting", "computations_running")
PAGE_COUNTERS = (
    *ENGINE_COUNTS,
    *TENSOR_COUNTS,
    *("reused_slot", "reused_memory", "reused_disk", "restores", "fetches", "over_target"),
)
"""Values that only grow, in the order of the page. Other parts of the engine own those behind
`TENSOR_COUNTS`; `MetricsPublisher` reads these when it publishes.
"""
PAGE_GAUGES = (
    *("kv_bytes", "kv_entries", "kv_checkpoints", "kv_checkpoint_bytes", "slot_tokens"),
    *(f"waiting_{reason}" for reason in WaitReason),
    *TENSOR_GAUGES,
)
PAGE_HISTOGRAMS = {f"{kind}_s": STEP_S for kind in StepKind} | {
    "tokens_per_step": POWERS_OF_TWO,
    "sequences_per_step": POWERS_OF_TWO,
    "queue_s": COMPUTE_S,
    "inputs_per_run": POWERS_OF_TWO,
}
"""The upper bounds of each histogram's buckets. One more bucket counts larger values."""

_CELLS = len(PAGE_COUNTERS) + sum(len(bounds) + 2 for bounds in PAGE_HISTOGRAMS.values())
# Native and therefore aligned: one store writes a cell, so that no reader sees half of it.
_PAGE = struct.Struct(f"{_CELLS + len(PAGE_GAUGES)}d")
assert ACTIVITY_BYTES + _PAGE.size <= RECORD_BYTES


class Histogram:
    """Counts of values by bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts: list[float] = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class MetricsPage:
    """The second page of a worker's record, with its counters, histograms and gauges. The engine
    writes it, the daemon reads it. Without a descriptor, as in tests, its memory is private.
    """

    def __init__(self, fd: int = -1, target_s: float = math.inf):
        self.target_s = target_s
        """The longest desired duration of a step with decoding tasks."""
        self.over_target = 0
        """The number of steps with decoding tasks that took longer than `target_s`."""
        self._page = mmap.mmap(fd, RECORD_BYTES)
        self.due_at = -math.inf
        """The time at which a changed page is to be written again."""
        self._changed, self._changes = True, 0
        self._steps = {kind: Histogram(STEP_S) for kind in StepKind}
        self._tokens, self._sequences = Histogram(POWERS_OF_TWO), Histogram(POWERS_OF_TWO)
        self._queue, self._inputs = Histogram(COMPUTE_S), Histogram(POWERS_OF_TWO)

    def count_step(self, kind: StepKind, tokens: int, sequences: int, seconds: float) -> None:
        self._changed = True
        if seconds > self.target_s and kind is not StepKind.PREFILL:
            self.over_target += 1
        self._steps[kind].observe(seconds)
        self._tokens.observe(tokens)
        self._sequences.observe(sequences)

    def count_run(self, queue_s: Sequence[float]) -> None:
        """Count a computation that begins for one or more inputs, which have waited *queue_s*."""
        self._changed = True
        self._inputs.observe(len(queue_s))
        for seconds in queue_s:
            self._queue.observe(seconds)

    def due_in(self, now: float, changes: int) -> float | None:
        """Return the seconds until a write is due, or None without a step or new *changes* since
        the last one.
        """
        if not self._changed and changes == self._changes:
            return None
        return self.due_at - now

    def write_page(self, now: float, changes: int, values: Mapping[str, float]) -> None:
        """Write the counters and gauges in *values*, and the histograms."""
        self.due_at, self._changed, self._changes = now + WRITTEN_S, False, changes
        cells = [values[name] for name in PAGE_COUNTERS]
        histograms = self._tokens, self._sequences, self._queue, self._inputs
        for histogram in (*self._steps.values(), *histograms):
            cells += (*histogram.counts, histogram.sum)
        cells += [values[name] for name in PAGE_GAUGES]
        _PAGE.pack_into(self._page, ACTIVITY_BYTES, *cells)

    def read_counters(self) -> tuple[float, ...]:
        """Return the values that only grow: the counters, then the cells of the histograms."""
        return _PAGE.unpack_from(self._page, ACTIVITY_BYTES)[:_CELLS]

    def read_gauges(self) -> dict[str, float]:
        return dict(
            zip(PAGE_GAUGES, _PAGE.unpack_from(self._page, ACTIVITY_BYTES)[_CELLS:], strict=True)
        )


def histograms_of(cells: Sequence[float]) -> dict[str, Histogram]:
    """Return the histograms in the result of `read_counters`, or in a sum of several."""
    found, start = {}, len(PAGE_COUNTERS)
    for name, bounds in PAGE_HISTOGRAMS.items():
        end = start + len(bounds) + 1
        histogram = found[name] = Histogram(bounds)
        histogram.counts, histogram.sum = list(cells[start:end]), cells[end]
        start = end + 1
    return found
