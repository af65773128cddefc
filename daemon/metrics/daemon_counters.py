"""Counters of the daemon's events, and engine counters summed over all workers of a model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import add, sub
from weakref import WeakKeyDictionary

from ...backends.errors import (
    BackendError,
    Busy,
    Cancelled,
    InferdError,
    Outcome,
    OutOfMemory,
    QuotaExceeded,
    SessionBusy,
    ShuttingDown,
)
from ...scheduler.record import DRAFTERS, PAGE_COUNTERS, Histogram
from ...sessions import ModelSource, Turn
from ..media.encoder import EncodingEnded
from ..models.draft_gains import DraftGain
from ..models.loader import LoadListener
from ..models.model import ManagedModel
from ..models.registry import Lease
from ..models.swap import HIDDEN_UID
from ..workers.worker import Worker
from .families import FAMILIES

MODEL_LABELS_MAX = 256
"""The number of model names that have their own label; all others share `OTHERS`."""
OTHERS = "others"
PRIVATE = "descriptor"
"""The label of all models that were loaded by descriptor, whose names only their users see."""
SWAP_MARK = " (swap)"
QUEUE_BOUNDS = (
    *("tasks-waiting-max", "tasks-waiting-user-max"),
    *("prompt-tokens-waiting-max", "prompt-tokens-waiting-user-max"),
    *("sessions-waiting-max", "sessions-waiting-user-max"),
    *("request-bytes-max", "request-bytes-user-max"),
)
BOUNDS = {"sessions_max": "sessions-max", "connections_max": "connections-max"}
"""The setting that caused a refusal, by the key in the data of `Busy` that implies it. Used only if
the data has no `bound`.
"""
REASONS = {ShuttingDown: "draining", QuotaExceeded: "quota", OutOfMemory: "memory"}
REJECTION_REASONS = (*QUEUE_BOUNDS, *BOUNDS.values(), *REASONS.values(), "other")
DAEMON_COUNTERS = (
    *("request_outcomes", "request_success", "request_errors", "call_errors"),
    "admission_rejections",
    *("model_load_failures", "model_unloads", "worker_restarts"),
    *("media_encodings", "encoder_restarts"),
)
"""Families of event counters."""
DAEMON_HISTOGRAMS = (
    *("request_queue_time_seconds", "time_to_first_token_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("model_load_seconds", "model_swap_seconds", "session_wait_seconds"),
    "media_encode_seconds",
)
"""Families of histograms."""


class _TurnRequest:
    """A request that may begin turns."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.has_begun = False


_current_request: ContextVar[_TurnRequest | None] = ContextVar("turn_request", default=None)


def label_of(model: ManagedModel) -> str:
    """Return the `model_name` label; the predecessor in a swap counts under the swapped name."""
    if model.uid == HIDDEN_UID:
        return model.name.removesuffix(SWAP_MARK)
    return model.name if model.uid is None else PRIVATE


def reason_of(error: InferdError) -> str | None:
    """Return the reason of a refusal, one of `REJECTION_REASONS`; None for other errors."""
    for kind, reason in REASONS.items():
        if isinstance(error, kind):
            return reason
    if not isinstance(error, Busy) or isinstance(error, SessionBusy):
        return None
    named = (setting for key, setting in BOUNDS.items() if key in error.data)
    bound = error.data.get("bound") or next(named, "other")
    return bound if bound in REJECTION_REASONS else "other"


def _error_of(cause: BaseException) -> InferdError:
    """Return the error to count for a request that *cause* ended."""
    if isinstance(cause, InferdError):
        return cause
    is_bug = isinstance(cause, Exception)
    return BackendError(repr(cause)) if is_bug else Cancelled("the request was cancelled")


def _empty(family: str) -> Histogram:
    return Histogram(FAMILIES[family].bounds)


class DaemonCounters(LoadListener):
    """Event counters and histograms, owned by the daemon's event loop."""

    def __init__(self) -> None:
        self.histograms: dict[str, dict[tuple[str, ...], Histogram]] = {
            name: {} for name in DAEMON_HISTOGRAMS
        }
        self.counts: dict[str, Counter[tuple[str, ...]]] = {n: Counter() for n in DAEMON_COUNTERS}
        self.engines: dict[str, tuple[float, ...]] = {}
        """The engine counters of each model, summed over all its workers so far."""
        self._seen: dict[Worker, tuple[float, ...]] = {}
        self._names: set[str] = set()
        self._requested_at: WeakKeyDictionary[Turn, float] = WeakKeyDictionary()
        """For each turn under way, the time of its request."""
        for reason in REJECTION_REASONS:
            self.counts["admission_rejections"][(reason,)] = 0

    def name_of(self, model: ManagedModel) -> str:
        """Return the label of a model."""
        return self.bounded_name(label_of(model))

    def name_of_source(self, source: ModelSource) -> str:
        """Return the label of a session's model."""
        return self.name_of(source.model) if isinstance(source, Lease) else PRIVATE

    def bounded_name(self, name: str) -> str:
        """Return *name*, or `OTHERS` past `MODEL_LABELS_MAX` names."""
        if name not in self._names:
            if len(self._names) >= MODEL_LABELS_MAX:
                return OTHERS
            self._names.add(name)
            for outcome in Outcome:
                self.counts["request_outcomes"][name, outcome.value] += 0
            for family in ("model_load_failures", "model_unloads", "worker_restarts"):
                self.counts[family][(name,)] += 0
            self.histograms["model_load_seconds"][name,] = _empty("model_load_seconds")
        return name

    def observe(self, family: str, labels: tuple[str, ...], value: float) -> None:
        """Add a value to a histogram."""
        self.histograms[family].setdefault(labels, _empty(family)).observe(value)

    @contextmanager
    def counted_request(self, model: ManagedModel | None) -> Iterator[None]:
        """If the block raises before a turn has begun, count the request as an error of *model*,
        which is None if the request is not for a turn.
        """
        request = _TurnRequest()
        token = _current_request.set(request)
        try:
            yield
        except BaseException as exc:
            if model is not None and not request.has_begun:
                self.count_error(model, _error_of(exc))
            raise
        finally:
            _current_request.reset(token)

    def turn_began(self, model: ModelSource, turn: Turn, *, chat: bool) -> None:
        """Record that the current request has begun a turn, which is counted when it ends."""
        request = _current_request.get()
        if request is not None:
            request.has_begun = True
            self._requested_at[turn] = request.at

    def turn_ended(self, source: ModelSource, turn: Turn) -> None:
        """Count a turn that has ended."""
        name = self.name_of_source(source)
        ended = time.monotonic()
        labels = (name, turn.spec.priority.label)
        queued, first = turn.queued_at, turn.first_token_at
        requested = self._requested_at.pop(turn, queued)
        if turn.started_at is not None:
            self.observe("request_queue_time_seconds", labels, turn.started_at - queued)
        if first is not None:
            self.observe("time_to_first_token_seconds", labels, first - queued)
        if turn.stats is None:
            self._count_error(name, turn.error or InferdError("the turn has no result"))
            return
        self.counts["request_outcomes"][name, Outcome.OK.value] += 1
        self.counts["request_success"][name, turn.stats.stop_reason] += 1
        self.observe("e2e_request_latency_seconds", labels, ended - requested)
        gaps = len(turn.tokens) - 1
        if first is not None and gaps > 0 and not (turn.spec.pull or turn.resumed):
            self.observe("request_time_per_output_token_seconds", (name,), (ended - first) / gaps)

    def count_error(self, model: ManagedModel, error: InferdError) -> None:
        """Count a request for a turn that has ended with an error before its turn began."""
        self._count_error(self.name_of(model), error)

    def _count_error(self, name: str, error: InferdError) -> None:
        self.counts["request_outcomes"][name, error.outcome.value] += 1
        self.counts["request_errors"][name, error.name] += 1

    def call_refused(self, call: str, error: InferdError) -> None:
        """Count a call, or a connection, that was answered with an error."""
        if error.outcome is Outcome.OK:
            return  # the normal end of a turn with tokens on demand
        self.counts["call_errors"][call, error.name, error.outcome.value] += 1
        reason = reason_of(error)
        if reason is not None:
            self.counts["admission_rejections"][(reason,)] += 1

    def load_ended(self, model: ManagedModel, seconds: float | None) -> None:
        """Count a load, which has failed if *seconds* is None."""
        name = self.name_of(model)
        if seconds is None:
            self.counts["model_load_failures"][(name,)] += 1
        else:
            self.observe("model_load_seconds", (name,), seconds)

    def place_waited(self, seconds: float) -> None:
        """Count a request that has got the place of a session after a wait."""
        self.observe("session_wait_seconds", (), seconds)

    def swap_ended(self, mode: str, seconds: float) -> None:
        """Count a completed swap."""
        self.observe("model_swap_seconds", (mode,), seconds)

    def worker_exited(self, model: ManagedModel, worker: Worker) -> None:
        """Count a worker that has exited, and add up its engine's counters."""
        family = "worker_restarts" if worker.died else "model_unloads"
        self.counts[family][(self.name_of(model),)] += 1
        self.add_engine_counters(model, worker)
        del self._seen[worker]

    def encoder_died(self, model: ManagedModel) -> None:
        """Count an encoder process that has died."""
        self.counts["encoder_restarts"][(self.name_of(model),)] += 1

    def encoding_ended(self, model: ManagedModel, ended: EncodingEnded) -> None:
        """Count a request for embeddings."""
        name = self.name_of(model)
        self.counts["media_encodings"][name, ended.result.value] += 1
        if ended.seconds:
            self.observe("media_encode_seconds", (name,), ended.seconds)

    def read_workers(self, models: Iterable[ManagedModel]) -> None:
        """Add the growth of the engine counters of all workers of *models*."""
        for model in models:
            if model.worker is not None:
                self.add_engine_counters(model, model.worker)

    def draft_gains(self) -> dict[str, DraftGain]:
        """Return what drafts have brought each model, by the counters that were read last."""
        gains: dict[str, DraftGain] = {}
        for name, cells in self.engines.items():
            found = dict(zip(PAGE_COUNTERS, map(int, cells), strict=False))
            drafted, accepted = (
                sum(found[f"{key}_{drafter}"] for drafter in DRAFTERS)
                for key in ("drafted", "accepted")
            )
            steps = (found[f"draft_{key}"] for key in ("step_tokens", "step_us", "plain_us"))
            gains[name] = DraftGain(drafted, accepted, *steps)
        return gains

    def add_engine_counters(self, model: ManagedModel, worker: Worker) -> None:
        """Add to the model's sums the growth of the worker's counters since the previous call."""
        name, now = self.name_of(model), worker.metrics_page.read_counters()
        before = self._seen.get(worker, (0.0,) * len(now))
        so_far: Sequence[float] = self.engines.get(name, (0.0,) * len(now))
        self.engines[name] = tuple(map(add, so_far, map(sub, now, before)))
        self._seen[worker] = now
