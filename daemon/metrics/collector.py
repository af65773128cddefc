"""Collection of the metrics from the daemon's own state at the time of a scrape.

A scrape queries no worker, reads no directory and touches no timer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.lowlevel

from ... import __version__
from ...backends import ENGINES
from ...backends.library import LLAMA_BUILD_NUMBER, LLAMA_COMMIT
from ...backends.model_spec import device_of
from ...scheduler import PRIORITIES
from ...scheduler.record import (
    DRAFTERS,
    PAGE_COUNTERS,
    TENSOR_GAUGES,
    Histogram,
    StepKind,
    WaitReason,
    histograms_of,
)
from ...sessions.table import ACTIVE, SessionState
from ..jobs.jobs import JOB_STATES, REQUEST_OUTCOMES
from ..models.model import ManagedModel, ModelState
from ..models.registry import Lease
from ..models.swap import HIDDEN_UID
from .families import FAMILIES

if TYPE_CHECKING:
    from ..core import Daemon


class ModelWait(StrEnum):
    """The reason for which a turn waits for its model."""

    LOAD = "load"
    MEMORY = "memory"
    """Its load waits until other models are evicted."""
    RESIDENCY = "residency"
    """It is loaded, and requests of another model come first."""


WAIT_REASONS = (*(reason.value for reason in WaitReason), *(wait.value for wait in ModelWait))


def reasons_in_engine(model: ManagedModel, count: int) -> Iterator[tuple[str, int]]:
    """Yield the reasons for which *count* turns of *model* wait, with their numbers. Turns that
    began to wait since the engine last published its metrics count as waiting for a slot.
    """
    worker = model.loaded
    if worker is None:
        yield ModelWait.LOAD.value, count
        return
    yield from split_by_reason(count, worker.metrics_page.read_gauges())


def split_by_reason(count: int, gauges: Mapping[str, float]) -> Iterator[tuple[str, int]]:
    """Yield how many of *count* turns wait for each reason in an engine's *gauges*. The others
    count as waiting for a slot.
    """
    for reason in WaitReason:
        if reason is not WaitReason.SLOT:
            number = min(count, int(gauges[f"waiting_{reason}"]))
            yield reason.value, number
            count -= number
    yield WaitReason.SLOT.value, count


def model_wait(daemon: Daemon, model: ManagedModel) -> ModelWait:
    """Return why requests wait for *model*."""
    if model.loaded is not None:
        return ModelWait.RESIDENCY
    worker = model.worker
    waits = worker is not None and daemon.registry.loader.waits_for_memory(worker)
    return ModelWait.MEMORY if waits else ModelWait.LOAD


def finishing_turns(daemon: Daemon) -> Counter[ManagedModel]:
    """Return by model the number of turns that end before it is unloaded or the daemon stops: those
    of the old models of swaps, or all while the daemon drains.
    """
    found: Counter[ManagedModel] = Counter()
    for model in daemon.registry.catalog.known():
        for old in (model,) if daemon.draining else model.predecessors.values():
            tasks = () if old.worker is None else old.worker.client.tasks
            found[model] += len(tasks) + len(old.recovery)
    return +found


SLICE_S = 0.001
"""The time after which other work of the event loop runs before the next family."""
T = TypeVar("T")
Labels = tuple[str, ...]
Samples = Mapping[Labels, float | Histogram]
Read = Iterator[tuple[str, Samples]]
OPEN_STATES = [
    state for state in SessionState if state not in (SessionState.DORMANT, SessionState.CLOSED)
]


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield *items*; between them other work of the event loop, such as streams, continues."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() >= began + SLICE_S:
            await anyio.lowlevel.checkpoint()
            began = time.monotonic()


async def metric_values(daemon: Daemon) -> dict[str, list[dict[str, Any]]]:
    """Return inferd's families except histograms, each as a list of its labels with `value`."""
    found: dict[str, list[dict[str, Any]]] = {}
    async for name, samples in sliced(families(daemon)):
        family = FAMILIES[name]
        if family.kind != "histogram":
            found[name] = [
                {**dict(zip(family.labels, labels, strict=True)), "value": value}
                for labels, value in samples.items()
            ]
    return found


def families(daemon: Daemon) -> Read:
    """Add up the engines' counters, and yield inferd's families."""
    daemon.counters.read_workers(daemon.registry.catalog.known())
    for read in _READERS:
        yield from read(daemon)


def _one(value: float) -> Samples:
    return {(): value}


# The readers of the state, one for each section of the table.


def _turns(daemon: Daemon) -> Read:
    name_of = daemon.counters.name_of
    loaded = {name_of(m) for m in daemon.registry.catalog.known() if m.loaded is not None}
    states: dict[str, Counter[Labels]] = {
        state: Counter({(name, p): 0 for name in loaded for p in PRIORITIES}) for state in ACTIVE
    }
    reasons: Counter[Labels] = Counter({(n, r): 0 for n in loaded for r in WAIT_REASONS})
    waiting: Counter[ManagedModel] = Counter()
    for session in daemon.all_sessions():
        turn, source = session.turn, session.model
        if session.active and turn is not None:
            name = daemon.counters.name_of_source(source)
            states[session.state][name, turn.spec.priority.label] += 1
            if session.state != SessionState.RUNNING and isinstance(source, Lease):
                waiting[source.model] += 1
    for model, count in waiting.items():
        for reason, number in reasons_in_engine(model, count):
            reasons[name_of(model), reason] += number
    for model, request in daemon.registry.loader.waiting_requests:
        if request.is_turn:
            name = name_of(model)
            states[SessionState.WAITING][name, request.priority.label] += 1
            reasons[name, model_wait(daemon, model).value] += 1
    finishing: Counter[Labels] = Counter({(name,): 0 for name in loaded})
    for model, count in finishing_turns(daemon).items():
        finishing[(name_of(model),)] += count
    yield "num_requests_running", states[SessionState.RUNNING]
    yield "num_requests_waiting", states[SessionState.WAITING]
    yield "num_requests_waiting_by_reason", reasons
    yield "num_requests_parked", states[SessionState.PARKED]
    yield "num_requests_finishing", finishing
    yield "request_recoveries", _one(daemon.registry.catalog.recovered)
    yield "retry_after_ratio", {(): daemon.ledger.accuracy.ratios}


def _counters(daemon: Daemon) -> Read:
    yield from daemon.counters.counts.items()
    yield from daemon.counters.histograms.items()


COUNTER_OF_FAMILY = {
    "generation_tokens": "generated",
    "generation_tokens_forced": "forced",
    "prompt_tokens_cached": "cached",
    "prefix_cache_queries": "prefix_queries",
    "num_preemptions": "parks",
    "context_shifts": "shifts",
    "kv_restores": "restores",
    "kv_fetches": "fetches",
    "kv_full_steps": "kv_full",
    "steps_over_target": "over_target",
    "tuning_slices": "tuning_slices",
}
"""The engine's counters by the family that reports them."""
TIERS = ("slot", "memory", "disk")


def _engines(daemon: Daemon) -> Read:
    engines = daemon.counters.engines
    counts = {n: dict(zip(PAGE_COUNTERS, cells, strict=False)) for n, cells in engines.items()}
    for family, key in COUNTER_OF_FAMILY.items():
        yield family, {(name,): found[key] for name, found in counts.items()}
    prompts: Samples = {
        (name,): found["prompt"] + found["cached"] for name, found in counts.items()
    }
    yield "prompt_tokens", prompts
    yield (
        "prefix_cache_hits",
        {(n, tier): found[f"reused_{tier}"] for n, found in counts.items() for tier in TIERS},
    )
    for family, key in (("draft", "drafted"), ("accepted", "accepted")):
        yield (
            f"spec_decode_num_{family}_tokens",
            {(n, d): found[f"{key}_{d}"] for n, found in counts.items() for d in DRAFTERS},
        )
    yield "spec_decode_tokens", {(n,): found["draft_step_tokens"] for n, found in counts.items()}
    for family, key in (("seconds", "draft_step_us"), ("plain_seconds", "draft_plain_us")):
        yield f"spec_decode_{family}", {(n,): found[key] / 1e6 for n, found in counts.items()}
    steps = {name: histograms_of(cells) for name, cells in engines.items()}
    yield "step_seconds", {(n, kind): h[f"{kind}_s"] for n, h in steps.items() for kind in StepKind}
    yield "iteration_tokens", {(name,): h["tokens_per_step"] for name, h in steps.items()}
    yield "iteration_sequences", {(name,): h["sequences_per_step"] for name, h in steps.items()}
    yield "step_target_seconds", _one(daemon.config.step_ms_target / 1000)
    graphs = {n: found for n, found in counts.items() if found["compute_runs"]}
    yield (
        "computations",
        {
            (name, outcome): found[key]
            for name, found in graphs.items()
            for outcome, key in (("ok", "computed"), ("failed", "compute_failed"))
        },
    )
    yield "computation_runs", {(name,): found["compute_runs"] for name, found in graphs.items()}
    yield "computation_seconds", {(n,): found["compute_us"] / 1e6 for n, found in graphs.items()}
    yield "computation_inputs", {(name,): steps[name]["inputs_per_run"] for name in graphs}
    yield "computation_queue_time_seconds", {(name,): steps[name]["queue_s"] for name in graphs}


def _loaded(daemon: Daemon) -> Read:
    """Read the loaded models; the values of models that share a label are added."""
    slots: Counter[Labels] = Counter()
    cells: Counter[Labels] = Counter()
    used: Counter[Labels] = Counter()
    silent: dict[Labels, float] = {}
    memory: Counter[Labels] = Counter()
    checkpoints: Counter[Labels] = Counter()
    checkpoint_bytes: Counter[Labels] = Counter()
    media_waiting: Counter[Labels] = Counter()
    media_bytes: Counter[Labels] = Counter()
    graphs: dict[Labels, float] = {}
    computations: dict[str, Counter[Labels]] = {gauge: Counter() for gauge in TENSOR_GAUGES}
    kv: Counter[Labels] = Counter({("", "disk"): daemon.registry.kv_index.bytes})
    for model in daemon.registry.catalog.known():
        worker = model.loaded
        if worker is None:
            continue
        name, info = daemon.counters.name_of(model), worker.info
        gauges = worker.metrics_page.read_gauges()
        slots[(name,)] += info.slots
        cells[(name,)] += info.slots * info.ctx_size
        used[(name,)] += int(gauges["slot_tokens"])
        silent[(name,)] = max(silent.get((name,), 0.0), worker.silent_s)
        kv[name, "memory"] += int(gauges["kv_bytes"])
        checkpoints[(name,)] += int(gauges["kv_checkpoints"])
        checkpoint_bytes[(name,)] += int(gauges["kv_checkpoint_bytes"])
        if ENGINES[worker.spec.backend].graphs:
            graphs[name, worker.spec.backend, device_of(worker.spec)] = 1
            for gauge, counts in computations.items():
                counts[(name,)] += int(gauges[gauge])
        if (encoder := worker.client.encoder) is not None:
            media_waiting[(name,)] += encoder.waiting
            media_bytes[(name,)] += encoder.caches.size_bytes
        for part, size in _parts(daemon, model):
            memory[name, part] += size
            if part == "context":
                kv[name, "slots"] += size
    yield "slots", slots
    yield "kv_cache_usage_perc", {key: used[key] / size for key, size in cells.items() if size}
    yield "worker_unresponsive_seconds", silent
    yield "model_memory_bytes", memory
    yield "graph_info", graphs
    yield from computations.items()
    yield "media_requests_waiting", media_waiting
    yield "media_cache_bytes", media_bytes
    yield "kv_bytes", kv
    yield "kv_checkpoints", checkpoints
    yield "kv_checkpoint_bytes", checkpoint_bytes
    config = daemon.config
    bounds: dict[Labels, float] = {("memory",): config.kv_ram_bytes}
    yield "kv_bytes_max", bounds | {("disk",): config.kv_disk_bytes}
    yield "kv_disk_files", _one(len(daemon.registry.kv_index))


def _parts(daemon: Daemon, model: ManagedModel) -> Iterator[tuple[str, int]]:
    need = daemon.registry.reservations.of_worker(model.worker)
    if need is not None:
        yield from (("weights", need.weights), ("context", need.context))
        yield from (("compute", need.compute), ("process", need.process))
        for part in ("projector", "draft"):
            yield from [(part, size)] if (size := getattr(need, part)) else []
        yield from need.devices.items()


def _held_tensors(daemon: Daemon) -> Read:
    counts: Counter[Labels] = Counter()
    sizes: Counter[Labels] = Counter()
    for model in daemon.registry.catalog.known():
        if (worker := model.loaded) is not None and ENGINES[worker.spec.backend].graphs:
            counts[(daemon.counters.name_of(model),)] += 0
            sizes[(daemon.counters.name_of(model),)] += 0
    for kept in daemon.kept_tensors.all_tensors():
        counts[(daemon.counters.name_of_source(kept.lease),)] += 1
        sizes[(daemon.counters.name_of_source(kept.lease),)] += kept.size_bytes
    yield "kept_tensors", counts
    yield "kept_tensor_bytes", sizes
    yield "kept_tensor_bytes_max", _one(daemon.kept_tensors.held.limits.bytes_max)
    held = daemon.buffers.held
    yield "buffers", _one(held.count)
    yield "buffer_bytes", _one(held.total_bytes)
    yield "buffer_bytes_max", _one(held.limits.bytes_max)


def _models(daemon: Daemon) -> Read:
    states: Counter[Labels] = Counter({(state.value,): 0 for state in ModelState})
    catalog = daemon.registry.catalog
    models = (model for model in catalog.known() if model.uid != HIDDEN_UID)
    states.update((model.state.value,) for model in models if catalog.is_listed(model))
    yield "models", states


def _sessions(daemon: Daemon) -> Read:
    sessions = daemon.sessions
    states: Counter[Labels] = Counter({(state.value,): 0 for state in OPEN_STATES})
    states.update((session.state.value,) for session in sessions.live.with_place())
    yield "sessions", states
    yield "sessions_max", _one(sessions.live.sessions_max)
    yield "sessions_dormant", _one(len(sessions.dormant))
    yield "sessions_dormant_bytes", _one(sessions.dormant.bytes)
    yield "session_media", _one(daemon.media_store.count)
    yield "session_media_bytes", _one(daemon.media_store.total_bytes)
    yield "sessions_expired", _one(sessions.expired)
    yield "sessions_refused", _one(sessions.live.refused)
    yield "sessions_yielded", _one(sessions.dormant.yielded)
    yield "session_yields", _one(sessions.places.yields)
    yield "sessions_waiting", _one(len(sessions.places))
    yield "session_forks", _one(sessions.forked)
    totals = daemon.usage.totals.items()
    yield "usage_compute_seconds", {(name,): found.compute_us / 1e6 for name, found in totals}
    yield "usage_refused", {(name,): found.refused for name, found in totals}
    yield "usage_unwritten_rows", _one(daemon.usage.unwritten)
    yield "journal_lag_seconds", _one(daemon.journal.lag_s)


def _jobs(daemon: Daemon) -> Read:
    states: Counter[Labels] = Counter({(state,): 0 for state in JOB_STATES})
    requests: Counter[Labels] = Counter({("waiting",): 0, ("running",): 0})
    for job in daemon.jobs.jobs(None):
        states[(job.row.state,)] += 1
        if not job.ended:
            requests[("running",)] += job.running
            requests[("waiting",)] += max(0, job.left - job.running)
    yield "jobs", states
    yield "job_requests", requests
    ended = daemon.jobs.requests_ended
    yield "job_requests_ended", {(outcome,): ended[outcome] for outcome in REQUEST_OUTCOMES}
    yield "job_bytes", _one(daemon.jobs.bytes_used)
    yield "job_bytes_max", _one(daemon.jobs.limits.bytes_max)


def _daemon(daemon: Daemon) -> Read:
    config, memory = daemon.config, daemon.memory.status
    yield "build_info", {(__version__, str(LLAMA_BUILD_NUMBER), LLAMA_COMMIT): 1}
    yield "draining", _one(daemon.draining)
    since = daemon.draining_since
    yield "draining_seconds", _one(0.0 if since is None else time.monotonic() - since)
    yield "component_up", {(p["component"],): p["up"] for p in daemon.components.describe()}
    yield "connections", _one(len(daemon.server.places.holders))
    yield "connections_delegated", _one(daemon.connections.access.delegated_connections)
    yield "connections_max", _one(config.connections_max)
    yield "request_bytes", _one(daemon.request_bytes.total)
    yield "request_bytes_max", _one(config.request_bytes_max)
    yield "connection_labels", _one(daemon.connections.labels)
    yield "cores", _one(config.cores)
    free = memory["free_bytes"]
    yield "memory_free_bytes", {} if free is None else _one(free)
    yield "memory_low", _one(bool(memory["low"]))
    yield "memory_low_events", _one(memory["low_events"] or 0)


_READERS: tuple[Callable[[Daemon], Read], ...] = (
    *(_turns, _counters, _engines, _loaded, _held_tensors),
    *(_models, _sessions, _jobs, _daemon),
)
