"""Loads of models, and the admission of requests to the models that are in memory.

A request waits in its model's `Residency` until `advance` admits it. The way of a load:

1. A request waits for a model that is not loaded: `start_worker` queues a worker for a place in the
   `LoadQueue`, so that few models are loaded at once.
2. The worker starts and reports the memory that the model needs, unless an earlier load of the same
   files has reported it. `plan.decide_load` decides: the load proceeds, waits for other models'
   memory, takes a smaller shape, or is refused.
3. A load that waits gives its place up. It is decided on again whenever `advance` runs: after each
   change, and at intervals. It gets its memory only together with another place, so that no paused
   load holds memory. Loads are served in the order of their models' requests.
4. Once the model is loaded, its waiting requests are admitted. A request that waits for another
   model's memory closes the model to later requests, until the model may be evicted.
5. The worker exits: its memory is free, and `advance` decides again on all waiting loads.

Everything lives on the daemon's event loop. A decision and the reservation or admission that
records it happen in one step of the loop: at an `await` between them, two loads could get the same
bytes, or the model of a request that was just admitted could be evicted. So all these methods are
synchronous, which a test checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any, assert_never

import anyio
import anyio.abc
import msgspec
import structlog
from msgspec.structs import asdict

from ...backends import MemoryNeed, ModelSpec, Shape
from ...backends.errors import (
    Cancelled,
    InferdError,
    ModelNotFound,
    OutOfMemory,
    error_from_wire,
    load_cancelled,
)
from ...backends.media_process import ProjectorFacts
from ...backends.tuning_choice import ModelTuning
from ...ipc.server.request_bytes import RequestBytes
from ...scheduler import Priority
from ...scheduler import messages as m
from ...scheduler.build import EXIT_OTHER_BUILD
from ...sessions.worker_client import TaskReader
from ..media.encoder import EncoderChange, EncodingEnded, MediaEncoder
from ..media.settings import MediaSettings, has_encoder
from ..residency.load_queue import LoadQueue
from ..residency.machine import OomKills, address_space_limit
from ..residency.plan import (
    DeviceShortage,
    EvictionCandidate,
    LoadAct,
    MemoryForLoad,
    choose_victims,
    decide_load,
    device_refusal,
    find_device_shortage,
    growth_refusal,
    memory_refusal,
    reduced_parameters,
    smaller_shape,
    smallest_shape,
    with_address_space,
    with_sizes,
)
from ..residency.reservations import Reservations, bytes_on
from ..residency.residency import ResidencyRequest
from ..workers.cores import Cores, CoreUser
from ..workers.process import SpawnedProcess, describe_exit, other_build
from ..workers.process_client import (
    ProcessClient,
    ProcessExited,
    TasksOrphaned,
    TurnSetAside,
    WorkerChange,
    WorkerEvent,
)
from ..workers.worker import Worker
from .catalog import ModelCatalog
from .kv_index import KvIndex
from .model import ManagedModel
from .model_files import Signature, signature_of, size_bytes
from .projectors import MeasuredProjectors, ProjectorChoice, encoder_bytes
from .specs import (
    EstimateCache,
    FailedLoads,
    conditions_of,
    engine_settings,
    files_of_load,
    spec_of,
    with_adapters,
    with_encoder,
    without_adapters,
)
from .tuner import Tuner

ADVANCE_S = 0.05
"""The interval of `advance` while a load waits for models that are in use."""

log = structlog.get_logger()


class LoadListener:
    """The receiver of events about loads and workers; subclasses handle those that they need."""

    def loads_changed(self) -> None:
        """Note that a load has begun or ended."""

    def load_ended(self, model: ManagedModel, seconds: float | None) -> None:
        """Note that a load has ended; *seconds* is its duration, or None if it has failed."""

    def worker_exited(self, model: ManagedModel, worker: Worker) -> None:
        """Note that a worker has exited."""

    def encoder_died(self, model: ManagedModel) -> None:
        """Note that an encoder process has died."""

    def encoding_ended(self, model: ManagedModel, ended: EncodingEnded) -> None:
        """Note that a request for embeddings has ended."""


class Load:
    """A worker with its model, from its start to its exit. A swap gives it another *model*.
    *signature* identifies the model's files; *new_worker* returns the worker.
    """

    report: m.MemoryEstimate
    """The last estimate, for the shape that is decided on."""
    first_shape: Shape
    floor: Shape

    def __init__(
        self, model: ManagedModel, signature: Signature, new_worker: Callable[[Load], Worker]
    ):
        self.model, self.signature = model, signature
        self.projector = model.projector
        self.worker = new_worker(self)
        self.encoder: MediaEncoder | None = None
        """Of a model that reads images or sounds; it runs while the model is loaded."""
        self.is_known_load_decided = False
        """Whether it was decided on by an estimate of an earlier load."""
        self.shrinks = 0
        """How many times it is to shrink, because the kernel killed workers in larger shapes."""
        self.is_waiting = False
        """Whether it waits for other models' memory."""
        self.is_outdated = False
        """Whether a worker has exited since the report, so that devices may have more free."""

    def begin_decision(self, report: m.MemoryEstimate) -> None:
        """Note the first estimate; the load is undecided from now on."""
        model = self.model
        self.first_shape = report.shape
        self.floor = smallest_shape(
            report.shape, model.options(), model.requested, never_shrinks=model.never_shrinks
        )
        self.shrinks, self.is_waiting, self.is_outdated = model.recovery.shrinks, False, False


def setting_fields(tuning: ModelTuning | None) -> dict[str, object]:
    """Return the fields of a log event about a load's setting."""
    if tuning is None:
        return {}
    chosen = tuning.chosen
    return asdict(chosen.setting) | {"setting_by": chosen.source, "reason": chosen.reason}


def uses_other_setting(
    tuning: ModelTuning, model: ManagedModel, entries: Iterable[ManagedModel]
) -> bool:
    """Return whether another of *entries* computes the file of *model* with the kind of attention
    that *tuning* has not chosen.
    """
    other = "off" if tuning.chosen.setting.flash_attn else "on"
    for entry in entries:
        if entry is model or entry.config.file is None or entry.config.file != model.config.file:
            continue
        loaded = entry.loaded
        if loaded is not None and loaded.info.fingerprint == tuning.other_fingerprint:
            return True
        if entry.options().get("flash-attn", "auto") == other:
            return True
    return False


class Loader:
    """Loads, evicts and unloads the models of *catalog*, and admits requests to them; see the
    module's docstring.

    Workers run in *group*, and *start_soon* runs other work in it. *flush* is called after each
    frame of the workers' reports. *open_content* returns a descriptor of a user's image or sound.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        reservations: Reservations,
        kv_index: KvIndex,
        tuner: Tuner,
        group: anyio.abc.TaskGroup,
        start_soon: Callable[..., None],
        listeners: Sequence[LoadListener],
        *,
        flush: Callable[[], None],
        request_bytes: RequestBytes,
        open_content: Callable[[int, bytes], int],
        seconds: Callable[[], float],
    ):
        config = catalog.config
        self.reservations, self.listeners = reservations, list(listeners)
        self.residency_s = config.residency_s
        """The `Residency.residency_s` of all models."""
        self.cores = Cores(config.cores, self._core_users, strict=config.priority_strict)
        self.estimates = EstimateCache()
        self.measured_projectors = MeasuredProjectors()
        self.oom_kills = OomKills()
        self._catalog, self._kv_index, self._tuner = catalog, kv_index, tuner
        self._group, self._start_soon, self._seconds = group, start_soon, seconds
        self._flush, self._request_bytes = flush, request_bytes
        self._open_content = open_content
        self._kv_dir = str(kv_index.directory) if config.kv_disk_bytes else ""
        self._queue = LoadQueue(catalog.serves_others, seconds)
        self._failures = FailedLoads(config.load_retry_s, seconds)
        self._loads: dict[Worker, Load] = {}
        self._undecided: dict[Worker, Load] = {}
        """The loads whose memory was estimated, until they proceed or end."""
        self._keeps_advancing = False
        self._idle_changed = anyio.Event()

    # Requests.

    @asynccontextmanager
    async def admit(
        self,
        model: ManagedModel,
        request: ResidencyRequest,
        on_progress: Callable[[float], None] | None = None,
    ) -> AsyncIterator[None]:
        """Wait until *model* is loaded and *request* is admitted. The model stays loaded in the
        `with` block.

        :raises LoadFailed: the model cannot be loaded.
        :raises Timeout: one of the request's timeouts has passed.
        """
        try:
            # An `await` between the check and the admission would let the model be unloaded.
            if not self.admit_at_once(model, request):
                await self._wait_admitted(model, request, on_progress)
                request.admitted_at = self._seconds()
            yield
        finally:
            self.end_request(model, request)

    @contextmanager
    def try_admit(self, model: ManagedModel, request: ResidencyRequest) -> Iterator[bool]:
        """Admit *request* to a loaded model if it need not wait; yield whether it was admitted."""
        try:
            if self.has_waiting_loads:
                model.residency.queue_request(request, ())
                self.advance()
            else:
                model.residency.admit_request(request)
            yield request in model.residency.admitted
        finally:
            self.end_request(model, request)

    async def _wait_admitted(
        self,
        model: ManagedModel,
        request: ResidencyRequest,
        on_progress: Callable[[float], None] | None,
    ) -> None:
        waiting = model.residency.waiting
        others = [other.residency for other in self._catalog.known()]
        model.residency.queue_request(request, others)
        if model.loaded is not None:
            self.advance()
        if request not in waiting:
            return
        request.on_wait_begins()
        request.has_waited = True
        with request.limit_wait():
            while request in waiting:
                await model.released()
                await model.ready(on_progress)
                self.advance()
                if request in waiting:
                    await request.wait_woken()

    def admit_at_once(self, model: ManagedModel, request: ResidencyRequest) -> bool:
        """Admit *request* to a model that is loaded while no load waits, and return True; else
        return False. `end_request` ends it.
        """
        return model.loaded is not None and self.admit_to_loaded(model, request)

    def admit_to_loaded(self, model: ManagedModel, request: ResidencyRequest) -> bool:
        """As `admit_at_once`, for a model that is known to be loaded."""
        if self.has_waiting_loads:
            return False
        model.residency.admit_request(request)
        request.admitted_at = self._seconds()
        return True

    def end_request(self, model: ManagedModel, request: ResidencyRequest) -> None:
        """End a request, whether it was admitted or not."""
        now = model.used_at = self._seconds()
        model.residency.end_request(request, now)
        if self.has_waiting_loads:
            self.advance()

    @property
    def waiting_requests(self) -> list[tuple[ManagedModel, ResidencyRequest]]:
        """The waiting requests in order, with their models."""
        now = self._seconds()
        found = [
            (model, request)
            for model in self._catalog.known()
            for request in model.residency.waiting
        ]
        return sorted(found, key=lambda pair: pair[1].order_key(now, self.residency_s))

    def refuse_requests(self, error: InferdError, subject: Any = None) -> bool:
        """Refuse the waiting requests for *subject* (None: all); return whether any waited."""
        found = [r for _, r in self.waiting_requests if subject is None or r.subject is subject]
        for request in found:
            request.refuse(error)
        return bool(found)

    def advance(self) -> None:
        """Admit all admissible requests, and decide again on the waiting loads."""
        now = self._seconds()
        blocked, to_evict = self._next_request(now)
        for model in self._catalog.known():
            if model.residency.waiting and model.loaded is not None:
                # No `await` until the loads are decided on, which may evict models not in use.
                other = blocked if model.name in to_evict else None
                for request in model.residency.admit_waiting(other, now):
                    request.wake()
        for load in self._waiting_loads(now):
            if not load.is_waiting or load.worker.unloading:
                continue
            if load.is_outdated:
                load.is_outdated = False
                # Devices may have more free memory.
                load.worker.client.send_command(m.EstimateMemory(load.report.shape))
            else:
                self._decide(load)
        if self.has_waiting_loads and not self._keeps_advancing:
            self._keeps_advancing = True
            self._start_soon(self._keep_advancing)

    async def _keep_advancing(self) -> None:
        """Advance while a load waits, as no event reports absent readers or ended residencies."""
        try:
            while self.has_waiting_loads:
                await anyio.sleep(ADVANCE_S)
                for _, request in self.waiting_requests:
                    request.on_wait_continues()
                self.advance()
        finally:
            self._keeps_advancing = False

    def _next_request(self, now: float) -> tuple[ResidencyRequest | None, set[str]]:
        """Return the next request to get memory, and the names of the models to evict for it."""
        for load in self._waiting_loads(now):
            first = load.model.residency.first_request(now)
            if first is not None:
                victims = self._memory_for(load, now).victims()
                return first, {victim.name for victim in victims or ()}
        return None, set()

    # Workers.

    def start_worker(self, model: ManagedModel) -> Worker:
        """Start a worker for a model that is not loaded.

        :raises InferdError: the daemon shuts down, or the last load failed recently and would fail
            again.
        """
        self._catalog.check_open()
        if not self._catalog.has_model(model):
            raise ModelNotFound(f"the model {model.name!r} has been removed")
        self._catalog.refresh_model(model)
        config = self._catalog.config
        spec = spec_of(model, config, self._tuner)
        self._failures.check_load(model.name, *conditions_of(model, spec))
        signature = signature_of(files_of_load(model, spec))
        load = Load(
            model,
            signature,
            lambda load: Worker(
                spec,
                partial(self._handle_event, load),
                flush=self._flush,
                request_bytes=self._request_bytes,
                reserve_embedding_memory=partial(self._reserve_embedding_memory, load),
                settings=engine_settings(config)
                | {"careful_s": model.recovery.careful_s, "probes": model.recovery.probes},
                kv_dir=self._kv_dir,
                hang_s=config.worker_hang_timeout_s,
                known_estimates=self.estimates.estimates_of(without_adapters(spec), signature),
            ),
        )
        worker, model.kept_tuning = load.worker, None
        worker.client.encoder = load.encoder = self._new_encoder(load)
        self._loads[worker] = load
        self._bind_worker(model, worker)
        model.worker, model.error, model.fitted = worker, None, {}
        self.oom_kills.note_kills()
        self.cores.assign_cores()
        request = model.residency.first_request(self._seconds())
        priority = Priority.NORMAL if request is None else request.priority
        self._queue.request_place(worker, priority, None if request is None else request.user)
        self._group.start_soon(self._run_worker, load)
        self._notify_loads_changed()
        self._decide_known_load(load)
        return worker

    def exchange_models(self, one: ManagedModel, other: ManagedModel) -> Worker | None:
        """Exchange the workers and configurations of two models, of which *other* is loaded. Return
        the previous worker of *one* if that was loaded. Names, leases and handles stay.
        """
        before = one.loaded
        one.evicted_turns.fail_swapped(one.name)
        one.worker, other.worker = other.worker, one.worker
        one.config, other.config = other.config, one.config
        one.fitted, other.fitted = other.fitted, one.fitted
        one.load_s, other.load_s = other.load_s, one.load_s
        one.error, other.error = other.error, one.error
        one.projector, other.projector = other.projector, one.projector
        one.draft, other.draft = other.draft, one.draft
        for model in (one, other):
            if model.worker is not None:
                self._bind_worker(model, model.worker)
        return before

    def _bind_worker(self, model: ManagedModel, worker: Worker) -> None:
        self._loads[worker].model = model
        worker.bind_model(model.name, model.recovery.quarantine)
        if worker.client.encoder is not None:
            worker.client.encoder.bind_model(model.name, model.recovery.media_quarantine)

    def _idle_threads(self) -> int:
        """Return the cores that are free, or 0 while a model computes or is being loaded."""
        is_idle = all(user.claim is None for user in self._core_users())
        return self.cores.available if is_idle else 0

    def _core_users(self) -> Iterator[CoreUser]:
        """Yield the processes that compute: workers and their encoders."""
        for worker in self._catalog.all_workers():
            yield worker
            if worker.client.encoder is not None:
                yield worker.client.encoder

    async def _run_worker(self, load: Load) -> None:
        worker, started = load.worker, self._seconds()
        log.info(
            "model.loading",
            model=load.model.name,
            file=worker.spec.path,
            estimate_cached=bool(worker.known_estimates),
        )
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._wait_loaded, load.model, worker, started)
                group.start_soon(self._run_encoder, load)
                await self._queue.wait_for_place(worker)
                self._decide_known_load(load)
                try:
                    await worker.run()
                finally:
                    if load.encoder is not None:
                        load.encoder.close()
        except Exception:  # any failure ends this worker alone
            log.exception("worker.failed", model=load.model.name, pid=worker.pid)
        except BaseException:  # the daemon ends; an unload that is not cancelled waits for it
            worker.released.set()
            raise
        finally:
            if worker.remains is None:
                self._queue.leave(worker)
            else:
                self._group.start_soon(self._wait_for_remains, worker, worker.remains)
        self._note_worker_exited(load)

    def _new_encoder(self, load: Load) -> MediaEncoder | None:
        """Return the encoder of a model that reads images or sounds; it does not run yet."""
        spec, config, recovery = load.worker.spec, self._catalog.config, load.model.recovery
        if not has_encoder(spec):
            return None
        signature = signature_of([Path(spec.mmproj)])
        caches, load.model.kept_caches = load.model.kept_caches, None
        return MediaEncoder(
            spec,
            MediaSettings.of_config(config),
            known=self.measured_projectors.facts_of(spec.mmproj),
            caches=caches,
            idle_threads=self._idle_threads,
            note_opened=partial(self._note_projector_opened, load, signature),
            open_content=self._open_content,
            quarantine=recovery.media_quarantine,
            shared=config.kv_share == "all",
            hang_s=config.worker_hang_timeout_s,
            emit=partial(self._handle_event, load),
            claim_oom_kill=self.oom_kills.claim_kill,
            strict=config.priority_strict,
            seconds=self._seconds,
        )

    async def _run_encoder(self, load: Load) -> None:
        """Run the encoder of a model from the end of its load on, until the encoder is closed."""
        await load.worker.loaded.wait()
        if load.encoder is not None and not load.worker.unloading:
            await load.encoder.run()

    def _note_projector_opened(
        self, load: Load, signature: Signature, facts: ProjectorFacts
    ) -> None:
        """Store the memory that an encoder process has measured, and reserve so much."""
        worker = load.worker
        if not worker.spec.mmproj:
            return  # the echo model measures nothing
        self.measured_projectors.note_facts(worker.spec.mmproj, signature, facts)
        need = self.reservations.of_worker(worker)
        if need is not None:
            size = with_encoder(need, self.encoder_bytes(worker.spec, load.projector)).projector
            self.reservations.set_projector(worker, size)

    async def _wait_for_remains(self, worker: Worker, process: SpawnedProcess) -> None:
        """Wait for a process that could not be ended."""
        try:
            await process.wait_exited()
        except Exception:  # it must not end the daemon
            log.exception("worker.failed", model=worker.spec.name, pid=worker.pid)
        finally:
            self._queue.leave(worker)

    async def _wait_loaded(self, model: ManagedModel, worker: Worker, started: float) -> None:
        """Wait for the end of a load, and record its result in *model*."""
        if await worker.end_stalled_load(waits=lambda: self.waits_for_memory(worker)):
            self._queue.note_stuck(worker)
        else:
            self._queue.leave(worker)
        self._notify_loads_changed()
        took = round(self._seconds() - started, 3)
        error = worker.error
        model.error = None if isinstance(error, Cancelled) else error
        if isinstance(error, Cancelled):
            log.info("model.load_cancelled", model=model.name, seconds=took)
            return
        if error is None:
            model.load_s = took
            model.recovery.note_loaded()
            model.residency.loaded_at = self._seconds()
            self.reservations.note_loaded(worker)
            self._failures.forget_load(model.name)
            facts = setting_fields(worker.tuning)
            log.info("model.loaded", model=model.name, pid=worker.pid, seconds=took, **facts)
            self._delete_states_of_other_setting(model, worker)
        else:
            # Without a process the file is not to blame. A descriptor's name is not loaded again.
            if worker.pid and worker.spec.fd < 0:
                self._failures.note_load(model.name, *conditions_of(model, worker.spec), error)
            log.error("model.failed", model=model.name, cause=error.message, seconds=took)
        for listener in self.listeners:
            listener.load_ended(model, took if error is None else None)

    def _delete_states_of_other_setting(self, model: ManagedModel, worker: Worker) -> None:
        """Delete the KV files that a model wrote with another setting than the measured one, unless
        another entry still uses it.
        """
        tuning = worker.tuning
        if tuning is None or tuning.chosen.source != "measured":
            return
        if uses_other_setting(tuning, model, self._catalog.known()):
            return
        files, size = self._kv_index.delete_fingerprint(tuning.other_fingerprint)
        if files:
            log.info("kv.other_setting_deleted", model=model.name, files=files, bytes=size)

    def _notify_loads_changed(self) -> None:
        self._tuner.note_change()
        for listener in self.listeners:
            listener.loads_changed()

    def _note_worker_exited(self, load: Load) -> None:
        """Free the memory of a worker that has exited, and let the requests that wait for its model
        load it again.
        """
        model, worker = load.model, load.worker
        del self._loads[worker]
        if model.worker is worker:
            model.worker = None
        log.info("model.unloaded", model=model.name, pid=worker.pid)
        for listener in self.listeners:
            listener.worker_exited(model, worker)
        self.reservations.release(worker)
        worker.released.set()
        self._end_decision(load)
        for other in self._undecided.values():
            other.is_outdated = bool(other.report.devices)
        self._tuner.note_exited(worker)
        for request in model.residency.waiting:
            request.wake()
        self.advance()
        self.note_use_ended(model)

    # Events of workers.

    def _handle_event(self, load: Load, event: WorkerEvent) -> None:
        worker = load.worker
        match event:
            case WorkerChange.WORK:
                self.cores.assign_cores()
                self._queue.grant_places()  # loads may have waited for turns of other users
                self._tuner.note_change()
            case EncoderChange.WORK:
                self.cores.assign_cores()
            case EncoderChange.DIED:
                for listener in self.listeners:
                    listener.encoder_died(load.model)
            case EncodingEnded():
                for listener in self.listeners:
                    listener.encoding_ended(load.model, event)
            case WorkerChange.QUIT_ORDERED:
                if load.encoder is not None:
                    load.encoder.close()
                self._queue.end_wait(worker)
            case WorkerChange.EMBEDDING_CONTEXT_CREATED:
                self.reservations.note_loaded(worker)
            case m.Progress(fraction):
                load.model.report_progress(fraction)
            case m.MemoryEstimate():
                spec = without_adapters(worker.spec)
                self.estimates.store_estimate(spec, load.signature, event)
                self._note_estimate(load, event)
            case m.ModelNotLoaded(error):
                worker.error = worker.error or self._failed_load(load, error_from_wire(error))
            case m.Measured():
                self._tuner.note_result(worker, event)
            case m.KvFileLost(name, cause):
                self._kv_index.remove_file(worker.info.fingerprint, name, cause)
            case m.KvFileWritten():
                written = msgspec.structs.astuple(event)
                self._kv_index.add_file(worker.info.fingerprint, *written)
            case TurnSetAside(reader, info):
                load.model.evicted_turns.add_turns({reader.spec.id: reader}, info)
            case TasksOrphaned(readers, death):
                load.model.recovery.add_orphans(readers, death)
                self._resume_tasks(load.model)
            case ProcessExited(code):
                self._judge_exit(load, code)
            case _:
                assert_never(event)

    def _judge_exit(self, load: Load, code: int | None) -> None:
        """Set the error of a load whose process has exited, and note a death, after which the
        model's next start keeps the setting, because the states on disk fit only that.
        """
        model, worker, client = load.model, load.worker, load.worker.client
        is_loaded = client.model_info is not None
        if not is_loaded and code == EXIT_OTHER_BUILD:
            worker.error = worker.error or other_build(worker.spec.name)
        elif not client.quitting and worker.error is None:
            death = client.death = replace(
                worker.evidence_of_death(code),
                was_oom_killed=code == -SIGKILL and self.oom_kills.claim_kill(),
                files_changed=signature_of(files_of_load(model, worker.spec)) != load.signature,
            )
            model.kept_tuning = worker.spec.tuning if is_loaded else None
            if load.encoder is not None and client.tasks:
                load.encoder.keeps_caches = True
                model.kept_caches = load.encoder.caches
            model.recovery.note_death(death, needed=bool(client.tasks) or not is_loaded)
            if not is_loaded:
                error = model.recovery.load_error(death, describe_exit(code))
                worker.error = self._failed_load(load, error)
        elif not is_loaded:
            worker.error = worker.error or load_cancelled(worker.spec.name)

    def _failed_load(self, load: Load, error: InferdError) -> InferdError:
        """Return the *error* of a load with the sizes that are known."""
        need, free = self.reservations.sizes_of_load(load.worker)
        needed = size_bytes(load.model.config.file) if need is None else need.total
        error = with_address_space(error, needed, address_space_limit())
        if need is None:
            return error
        spec, fitted = load.worker.spec, load.model.fitted
        slots = fitted.get("slots", spec.slots)
        return with_sizes(error, need, slots, fitted.get("ctx-size", spec.ctx_size), free)

    # Tasks without a worker.

    def move_tasks(self, model: ManagedModel, readers: Mapping[int, TaskReader]) -> None:
        """Continue the tasks of another worker in the worker of *model*."""
        if readers:
            model.recovery.move_tasks(readers)
            self._resume_tasks(model)

    def _resume_tasks(self, model: ManagedModel) -> None:
        self._start_soon(self._resume, model)

    async def _resume(self, model: ManagedModel) -> None:
        try:
            await model.recovery.resume_tasks(partial(self._load_for_tasks, model))
        finally:
            model.drop_kept_caches()  # a new worker has taken them, or no turn needs them

    async def _load_for_tasks(self, model: ManagedModel) -> ProcessClient:
        """Load the model for turns that lost their worker, at their requests' highest priority."""
        admitted = (request.priority for request in model.residency.admitted)
        priority = max(admitted, default=Priority.NORMAL)
        async with self.admit(model, ResidencyRequest(priority, self._seconds())):
            return await model.ready()

    # The decision on a load.

    def waits_for_memory(self, worker: Worker) -> bool:
        """Return whether the load of *worker* waits for other models' memory."""
        load = self._undecided.get(worker)
        return load is not None and load.is_waiting

    @property
    def has_waiting_loads(self) -> bool:
        """Whether a load waits for other models' memory."""
        undecided = self._undecided
        return bool(undecided) and any(load.is_waiting for load in undecided.values())

    def _waiting_loads(self, now: float) -> list[Load]:
        """Return the waiting loads in the order in which they are served. A load whose user has
        just loaded models is left out: it may not begin yet, and delays no other.
        """
        waiting = (
            load
            for load in self._undecided.values()
            if load.is_waiting and not self._queue.is_paused(load.worker)
        )
        return sorted(waiting, key=lambda load: load.model.residency.rank(now))

    def _loads_ahead(self, load: Load, now: float) -> list[Load]:
        """Return the waiting loads that precede *load*."""
        waiting = self._waiting_loads(now)
        if load in waiting:
            return waiting[: waiting.index(load)]
        rank = load.model.residency.rank(now)
        return [other for other in waiting if other.model.residency.rank(now) <= rank]

    def _decide_known_load(self, load: Load) -> None:
        """Decide on a load by a stored estimate, once the load has a place and before its process
        runs, so that it reserves memory before later loads.
        """
        known = load.worker.known_estimates
        if known and not load.is_known_load_decided and self._queue.has_place(load.worker):
            load.is_known_load_decided = True
            self._note_estimate(load, known[0])

    def _note_estimate(self, load: Load, estimate: m.MemoryEstimate) -> None:
        """Decide on a load by an estimate of its memory."""
        worker = load.worker
        if load.model.embeds:
            worker.client.embeds = True
            need = estimate.need.with_embedding()
            estimate = msgspec.structs.replace(estimate, need=need)
        if not worker.unloading:
            estimate = with_adapters(estimate, worker.spec)
            need = with_encoder(estimate.need, self.encoder_bytes(worker.spec, load.projector))
            estimate = msgspec.structs.replace(estimate, need=need)
            if worker not in self._undecided:
                load.begin_decision(estimate)
                self._undecided[worker] = load
            load.report = estimate
            self._decide(load)
        self.advance()

    def encoder_bytes(self, spec: ModelSpec, choice: ProjectorChoice) -> int:
        """Return the memory of the encoder process of *spec*; see `projectors.encoder_bytes`."""
        facts = self.measured_projectors.facts_of(spec.mmproj)
        return encoder_bytes(spec, choice, facts, self._catalog.config.media_cache_bytes)

    def _decide(self, load: Load) -> None:
        """Decide on a load by its last estimate: it proceeds, shrinks, waits, or is refused."""
        model, worker, now = load.model, load.worker, self._seconds()
        memory = self._memory_for(load, now)
        must_shrink, load.shrinks = load.shrinks > 0, max(0, load.shrinks - 1)
        decision = decide_load(
            memory,
            load.report.shape,
            load.floor,
            must_shrink=must_shrink,
            has_waiters=model.load_waiters > 0,
            is_wanted=model.residency.is_wanted,
            embeds=worker.client.embeds,
        )
        # No `await` since the free bytes were read, or two loads could get them.
        match decision.act:
            case LoadAct.PROCEED:
                if self._queue.claim_place(worker):
                    self._proceed(load)
                else:
                    load.is_waiting = True
            case LoadAct.GIVE_UP:
                self._end_decision(load)
                worker.quit()
            case LoadAct.WAIT:
                if not load.is_waiting:
                    load.is_waiting = True
                    log.info("model.waiting", model=model.name, bytes=memory.need)
                self._queue.suspend(worker)
                self._evict(decision.victims, for_model=model.name)
            case LoadAct.SHRINK:
                assert decision.shape is not None, "a smaller shape was found"
                load.is_waiting = False
                worker.client.send_command(m.EstimateMemory(decision.shape))
            case LoadAct.LEAVE_OUT_EMBEDDINGS:
                model.embeds = worker.client.embeds = load.is_waiting = False
                worker.has_no_room_for_embeddings = True
                worker.client.send_command(m.EstimateMemory(load.first_shape))
            case LoadAct.REFUSE:
                self._refuse(load, memory.shortage, memory.obtainable)

    def _proceed(self, load: Load) -> None:
        model, shape = load.model, load.report.shape
        self.reservations.reserve(load.worker, load.report.need)
        self._end_decision(load)
        model.residency.begin_residency(self._seconds(), shape.slots)
        model.fitted = reduced_parameters(load.first_shape, shape)
        if model.fitted:
            log.info("model.fitted", model=model.name, **model.fitted)
        load.worker.client.send_command(m.Proceed())

    def _refuse(self, load: Load, shortage: DeviceShortage | None, free: int) -> None:
        self._end_decision(load)
        name, need, shape = load.model.name, load.report.need, load.report.shape
        if shortage is not None:
            error = device_refusal(name, shape, shortage)
        else:
            pinned = [
                # A model loaded by descriptor belongs to its user; others must not see its name.
                (m.name if m.uid is None else "a model loaded from another descriptor", held.total)
                for m in self._catalog.known()
                if m.pinned and (held := self.reservations.of_worker(m.worker)) is not None
            ]
            error = memory_refusal(
                name,
                need,
                shape,
                load.floor,
                free=free,
                pinned=pinned,
                limit=self.reservations.limit,
                machine_free=self.reservations.machine_free_bytes(),
            )
        load.worker.refuse_load(error)

    def _end_decision(self, load: Load) -> None:
        """Forget a load that is decided, or whose worker has exited."""
        self._undecided.pop(load.worker, None)
        load.is_waiting = False

    def _memory_for(self, load: Load, now: float) -> MemoryForLoad:
        """Return the memory that a load needs and can have now."""
        held, need = self.reservations, load.report.need
        free, unloading = held.free_bytes(), held.unloading_bytes()
        ahead = self._loads_ahead(load, now)
        ahead_bytes = sum(other.report.need.total for other in ahead)
        candidates = self._candidates(load, now)
        evictable = sum(candidate.need for candidate in candidates)
        missing = need.total - (free + unloading - ahead_bytes)
        reserved: Counter[str] = held.loading_on_devices()
        for other in ahead:
            reserved.update(other.report.need.devices)
        shortage = find_device_shortage(need, load.report.devices, reserved)
        if shortage is not None:
            device = shortage.device.name
            candidates = self._candidates(load, now, device)
            missing = shortage.missing - held.unloading_bytes(device)
        return MemoryForLoad(
            need=need.total,
            free=free,
            ahead=ahead_bytes,
            obtainable=free + unloading + evictable + self._loading_bytes(load),
            shortage=shortage,
            missing=missing,
            candidates=candidates,
        )

    def _loading_bytes(self, load: Load) -> int:
        """Return the bytes of models that are being loaded, as these may be evicted after they have
        served a request.
        """
        if not load.model.residency.is_wanted:
            return 0
        return sum(
            need.total
            for model in self._catalog.known()
            if (need := self.reservations.of_worker(model.worker)) is not None
            and model.worker is not None
            and model.loaded is None
            and not (model.worker.unloading or model.pinned)
        )

    # Evictions.

    def evict_idle(self) -> EvictionCandidate | None:
        """Evict the first idle model in the order of eviction and return it, or None if no model
        may be evicted. Pinned models and models with tasks stay; a lease alone does not protect a
        model.
        """
        victims = choose_victims(self._idle_models(), 1)
        if not victims:
            return None
        self._evict(victims[:1], cause="pressure")
        return victims[0]

    def evictable_bytes(self) -> int:
        """Return the bytes that a load could have beside the free ones: those of idle models, and
        of workers that are unloading.
        """
        unloading = self.reservations.unloading_bytes()
        return unloading + sum(idle.need for idle in self._idle_models())

    def _candidates(self, load: Load, now: float, device: str = "") -> list[EvictionCandidate]:
        """Return the models that may be evicted for a load, now or later, with their bytes of the
        host or of *device*. A load without requests (of a swap) may evict only unused models.
        """
        wanted, request = load.model.residency.is_wanted, load.model.residency.first_request(now)
        found = []
        for model, need in self._evictable():
            engaged = model.residency.is_engaged
            evictable_now = model.residency.may_be_evicted(request, now)
            if wanted or (evictable_now and not model.busy):
                just_used = not (engaged or evictable_now)
                found.append(_candidate(model, bytes_on(need, device), now, engaged, just_used))
        return found

    def _idle_models(self) -> list[EvictionCandidate]:
        """Return the models that may be evicted at once and have no tasks. A leased model may be
        among them, as it is loaded again when it is needed.
        """
        now = self._seconds()
        return [
            _candidate(model, need.total, now)
            for model, need in self._evictable()
            if model.residency.may_be_evicted(None, now) and not model.has_tasks
        ]

    def _evictable(self) -> Iterator[tuple[ManagedModel, MemoryNeed]]:
        """Yield the models that are loaded and not pinned, with their reservations."""
        for model in self._catalog.known():
            need = self.reservations.of_worker(model.worker)
            if need is not None and model.loaded is not None and not model.pinned:
                yield model, need

    def _evict(self, victims: Sequence[EvictionCandidate], **reason: str) -> None:
        names = {victim.name for victim in victims}
        for model in self._catalog.known():
            if model.name in names and model.worker is not None:
                log.info("model.evicted", model=model.name, **reason)
                model.evict()

    # Memory for embeddings.

    async def _reserve_embedding_memory(self, load: Load) -> None:
        """Reserve memory for the embeddings of a loaded worker; idle models are evicted for it if
        needed. If that is not enough, the model is loaded again in a smaller shape, in which they
        fit.

        :raises OutOfMemory: too little is free.
        """
        worker = load.worker
        while not worker.client.embeds:
            model = load.model
            if model.worker is not worker or worker.unloading:
                return
            try:
                unloading = self._reserve_embedding(model, worker)
            except OutOfMemory:
                if not _may_load_smaller(model, worker):
                    raise
                model.embeds = True  # the load counts them
                await model.unload()
                if not (await model.load()).client.embeds:
                    raise
                return
            for leaving in unloading:
                await leaving.released.wait()
            load.model.embeds = worker.client.embeds

    def _reserve_embedding(self, model: ManagedModel, worker: Worker) -> list[Worker]:
        """Reserve the memory of a loaded worker's embedding context. If idle models are evicted for
        it, return the workers that must exit before the next call.

        :raises OutOfMemory: it does not fit even without the models that may be evicted.
        """
        need, free = self.reservations.of_worker(worker), self.reservations.free_bytes()
        extra = need.embedding if need is not None else 0
        if need is None or extra <= free:
            # No `await` up to here since the free bytes were read, or two workers could get them.
            self.reservations.add_embedding(worker)
            worker.client.embeds = True
            return []
        free += self.reservations.unloading_bytes()
        others = [idle for idle in self._idle_models() if idle.name != model.name]
        victims = choose_victims(others, extra - free)
        if victims is None:
            obtainable = free + sum(idle.need for idle in others)
            limit = self.reservations.limit
            raise growth_refusal(model.name, extra, obtainable, " for embeddings", limit=limit)
        self._evict(victims, for_model=model.name)
        return self.reservations.unloading_workers()

    # Unused models.

    def note_use_ended(self, model: ManagedModel) -> None:
        """Note that a lease on a model has ended, or that its worker has exited."""
        if model.worker is None:
            self._catalog.close_descriptor(model)
        self.note_idle_change()

    def note_idle_change(self) -> None:
        """Check again soon for unused models, because a model's use or settings have changed."""
        self._idle_changed.set()

    async def unload_unused(self) -> None:
        """Unload models that have not been used for their `keep_alive_s`, forever and without
        polling.
        """
        while True:
            now = self._seconds()
            wait_s = float("inf")
            for model in self._catalog.known():
                worker, keep_alive_s = model.worker, model.keep_alive_s
                if worker is None or model.busy or keep_alive_s < 0:
                    continue
                left_s = model.used_at + keep_alive_s - now
                if left_s > 0:
                    wait_s = min(wait_s, left_s)
                elif not worker.unloading:
                    worker.quit()
            self._idle_changed = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._idle_changed.wait()


def _candidate(
    model: ManagedModel, size: int, now: float, engaged: bool = False, just_used: bool = False
) -> EvictionCandidate:
    idle_s, loaded_at = max(0.0, now - model.used_at), model.residency.loaded_at
    return EvictionCandidate(model.name, size, model.load_s, idle_s, engaged, just_used, loaded_at)


def _may_load_smaller(model: ManagedModel, worker: Worker) -> bool:
    """Return whether a model may be loaded in a smaller shape for embeddings: not while it computes
    for others, and not again if that has failed.
    """
    if model.has_tasks or model.pinned or worker.has_no_room_for_embeddings:
        return False
    info = worker.info
    shape = Shape(info.slots, info.ctx_size, info.batch_size, info.n_gpu_layers)
    floor = smallest_shape(
        shape, model.options(), model.requested, never_shrinks=model.never_shrinks
    )
    return smaller_shape(shape, floor) is not None
