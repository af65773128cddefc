"""The registry of models: their names, leases on them, and what all of them share."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import anyio.abc
import structlog

from ...backends import ENGINES
from ...backends.errors import (
    Busy,
    Cancelled,
    LoadFailed,
    ModelNotFound,
    NotFound,
    QuotaExceeded,
    SessionExpired,
)
from ...backends.params import overflow_beside
from ...ipc.server.request_bytes import RequestBytes
from ...scheduler import PRIORITIES, PRIORITY_MAX, Owner
from ...scheduler import messages as m
from ...scheduler.kv.store import scoped
from ...sessions import WorkerClient
from ...sessions.admission.bounds import NO_QUOTA, Quota, check_descriptor_models
from ...sessions.turn.turn import compare_nothing
from ...sessions.worker_client import (
    NO_CEILINGS,
    Comparison,
    NameCeilings,
    Similarity,
    retry_query,
)
from ..components import Components
from ..config.model_settings import ModelConfig
from ..config.settings import Config
from ..residency.machine import MachineMemory
from ..residency.reservations import Reservations
from ..state_files import KV_DIR
from ..workers.process_client import ProcessClient
from ..workers.recovery import fail_readers
from .catalog import Allowed, ModelCatalog, NamedModel
from .file_contents import DeclaredTensorsCache, FileFactsCache
from .kv_index import KvFilePlace, KvIndex
from .loader import Loader, LoadListener
from .model import NO_DRAFT_MODEL, DraftModelChoice, ManagedModel, PassedFile
from .projectors import NO_PROJECTOR, Projectors, Wish, wish_of
from .tuner import Tuner, TuningPace
from .tuning_records import TuningRecords

log = structlog.get_logger()
T = TypeVar("T")
DRAFT_MODEL = "draft-model"
LEASE_END_S_MAX = 1.0
"""Twice the longest time for which a gateway keeps a lease without a request."""
NOBODY = -3
"""No user's id: it sees only the models of all."""
Report = Callable[[Similarity], None]
SentenceComparer = Callable[["Registry", ManagedModel, Comparison, Report], None]
"""Compares a sentence of a model's output, and passes the result to the function."""


class Lease:
    """A lease on a model: a `sessions.ModelSource`. While it lasts, the model does not expire. The
    model may be evicted for another one, and is loaded again when needed.
    """

    def __init__(self, registry: Registry, model: ManagedModel, name: str = ""):
        self.model, self._registry = model, registry
        self.name = name or model.name
        """The name by which the client has loaded the model."""
        self.closed = False
        model.leases.add(self)

    @property
    def base(self) -> str:
        """The model's own name."""
        return self.model.name

    @property
    def is_graph(self) -> bool:
        """Whether the model is a graph, which has no language."""
        return ENGINES[self.model.config.backend].graphs

    @property
    def ceilings(self) -> NameCeilings:
        """The ceilings in force for turns by this name."""
        return self._registry.ceilings_of(self.name)

    def options(self) -> dict[str, Any]:
        """Return the configured parameters: those of the model, then those of the name."""
        return self._registry.options_of(self.name, self.model)

    @property
    def loaded(self) -> ProcessClient | None:
        """The client of the model's worker, if the model is loaded."""
        worker = self.model.loaded
        return None if worker is None else worker.client

    @property
    def held(self) -> bool:
        """Whether a swap holds turns back."""
        return self.model.turns_held

    async def released(self) -> None:
        """Wait until turns may begin."""
        await self.model.released()

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the client of the model's worker, loading the model if needed."""
        return await self.model.ready(on_progress)

    async def query(self, query: Callable[[ProcessClient], Awaitable[T]]) -> T:
        """Return the worker's answer; if the worker dies meanwhile, query another one.

        :raises WorkerCrashed: the query ended the worker, or too many workers have died.
        """
        return await retry_query(self.ready, query)

    def predecessor(self, vocabulary: str) -> ManagedModel | None:
        """Return the model that had the name before a swap and has this vocabulary hash."""
        return self.model.predecessors.get(vocabulary)

    def compare(self, comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        """Compare a sentence of the model's output, as the model is configured."""
        self._registry.compare_sentence(self._registry, self.model, comparison, report)

    def note_requested(self, values: Mapping[str, Any]) -> None:
        """Note the parameters of a call that loads the model; its keep-alive holds from now on."""
        self.model.note_requested(values)
        if values.get("keep-alive") is not None:
            self._registry.catalog.persist_settings(self.model)

    def close(self) -> None:
        """End the lease."""
        self.closed = True
        self.model.end_lease(self)
        self._registry.loader.note_use_ended(self.model)


class DormantLease:
    """The `ModelSource` of a dormant session. *find_client* returns the client of the model's
    worker if the model is loaded.
    """

    held = False
    ceilings = NO_CEILINGS

    def __init__(self, name: str, find_client: Callable[[], WorkerClient | None]):
        self.name, self.base, self._find_client = name, name, find_client

    async def released(self) -> None:
        """Return at once: a dormant session has no turns."""

    @property
    def loaded(self) -> WorkerClient | None:
        """The client of the model's worker, if the model is loaded."""
        return self._find_client()

    def predecessor(self, vocabulary: str) -> None:
        """Return None: a dormant session migrates nothing."""

    async def ready(self) -> WorkerClient:
        """Raise `SessionExpired`: a dormant session computes nothing."""
        raise SessionExpired(f"the session is dormant and does not hold {self.name!r}")

    def compare(self, comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        """Skip the comparison: a dormant session has no output."""
        compare_nothing(comparison, report)


class Registry:
    """All models. Owned by the daemon's event loop.

    Workers run in *group*; *flush* is called after each frame of their reports.
    *open_content* returns a descriptor of a user's image or sound by its hash. *compare_sentence*
    compares sentences of outputs; without it turns get a reason.
    """

    def __init__(
        self,
        config: Config,
        group: anyio.abc.TaskGroup,
        flush: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
        *,
        machine: MachineMemory | None = None,
        components: Components | None = None,
        request_bytes: RequestBytes | None = None,
        open_content: Callable[[int, bytes], int] | None = None,
        tuning_pace: TuningPace | None = None,
        load_listeners: Sequence[LoadListener] = (),
        compare_sentence: SentenceComparer = lambda _, __, *request: compare_nothing(*request),
    ):
        components = components or Components()
        self.seconds, self.compare_sentence = seconds, compare_sentence
        self._group, self._residency_s = group, config.residency_s
        self.catalog = ModelCatalog(config, components, self._new_model)
        self.kv_index = KvIndex(
            config.state_dir / KV_DIR,
            config.kv_disk_bytes,
            file_evicted=self._notify_kv_file_evicted,
            note_state=partial(components.note, "kv-store"),
        )
        self.reservations = Reservations(config.memory_bytes, machine or MachineMemory())
        self.tuner = Tuner(
            TuningRecords(config.state_dir),
            self.catalog.all_workers,
            self.reservations,
            config.cores,
            is_on=lambda: self.config.tuning,
            pace=tuning_pace,
        )
        self.loader = Loader(
            *(self.catalog, self.reservations, self.kv_index, self.tuner),
            *(group, self.start_soon, load_listeners),
            flush=flush,
            request_bytes=request_bytes or RequestBytes(),
            open_content=open_content or _no_content,
            seconds=seconds,
        )
        self.file_facts = FileFactsCache()
        self.declared_tensors = DeclaredTensorsCache()
        self.projectors = Projectors()
        self.catalog.scan()

    def _new_model(self, name: str, config: ModelConfig, uid: int | None) -> ManagedModel:
        return ManagedModel(
            *(name, config, uid),
            settings=lambda: self.config,
            residency_s=self._residency_s,
            choose_files=self._choose_files,
            start_worker=self.loader.start_worker,
            move_tasks=self.loader.move_tasks,
            start_soon=self.start_soon,
            seconds=self.seconds,
        )

    async def _choose_files(self, model: ManagedModel) -> None:
        """Set the projector and the draft model of a model's next load, as its configuration is
        then.

        :raises LoadFailed: the configured file cannot be used, or there is no such draft model.
        """
        wish, choice = None, NO_PROJECTOR
        self.catalog.refresh_model(model)
        while wish != self.projector_wish(model, model.requested):
            wish = self.projector_wish(model, model.requested)
            choice = await self.projectors.choose(wish)
            self.catalog.refresh_model(model)
        if (refusal := choice.refusal) is not None:
            log.error("model.failed", model=model.name, cause=refusal.message, seconds=0.0)
            model.error = LoadFailed(refusal.message, hint=refusal.hint, data=refusal.data)
            raise model.error
        if choice.note:
            log.info("model.projector_left_out", model=model.name, reason=choice.note)
        try:
            draft = self.draft_model_of(model, model.requested)
        except LoadFailed as exc:
            log.error("model.failed", model=model.name, cause=exc.message, seconds=0.0)
            model.error = exc
            raise
        model.projector, model.draft = choice, draft

    def projector_wish(
        self,
        model: ManagedModel,
        requested: Mapping[str, Any] | None = None,
        config: ModelConfig | None = None,
    ) -> Wish:
        """Return the wish for the projector of a model's next load, by a call with *requested*
        parameters; or of a load with another *config*.
        """
        config, folder = config or model.config, self.config.models_dir
        options = self.config.defaults | config.options
        return wish_of(model.name, config.file, config.backend, options, folder, requested)

    def draft_model_of(
        self, model: ManagedModel, requested: Mapping[str, Any] | None = None
    ) -> DraftModelChoice:
        """Return the draft model of a model's next load, by a call with *requested* parameters.

        :raises LoadFailed: there is no model of this name.
        """
        options = model.options()
        text = str(options.get(DRAFT_MODEL, (requested or {}).get(DRAFT_MODEL, "")))
        if not text or model.config.file is None or ENGINES[model.config.backend].graphs:
            return NO_DRAFT_MODEL
        if DRAFT_MODEL in options and os.path.isabs(text):
            return DraftModelChoice(text, text)
        try:  # a client names no other files than models
            named = self.catalog.get(text, NOBODY)
        except ModelNotFound as exc:
            raise LoadFailed(
                f"the draft model of {model.name!r}: {exc.message}", hint=exc.hint, data=exc.data
            ) from None
        file = self.catalog.configuration_of(named).file
        if file is None:
            raise LoadFailed(
                f"the draft model of {model.name!r}: {text!r} has no file",
                hint="name a GGUF model by draft-model, or leave it out",
            )
        return DraftModelChoice(text, str(file))

    async def find_projector(self, model: ManagedModel) -> Path | None:
        """Return the projector of a model without any swap, or None.

        :raises LoadFailed: the configured file cannot be used.
        """
        config = self.catalog.configuration_of(model)
        choice = await self.projectors.choose(self.projector_wish(model, config=config))
        if (refusal := choice.refusal) is not None:
            raise LoadFailed(refusal.message, hint=refusal.hint, data=refusal.data)
        return Path(choice.file) if choice.file else None

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.catalog.config

    def reconfigure(self, config: Config) -> list[str]:
        """Apply another configuration, and unload the changed models that are not in use. Return
        the names of all changed models; those in use keep the old one until their next load.
        """
        outdated = self.catalog.reconfigure(config)
        self.tuner.note_change()
        for model in outdated:
            if not model.busy and model.worker is not None:
                model.worker.quit()
        self.loader.note_idle_change()
        return sorted(model.name for model in outdated)

    # Leases.

    def lease(self, name: str, uid: int, allowed: Allowed = None) -> Lease:
        """Return a lease on the model *name*, which is one of the *allowed* names."""
        self.catalog.check_open()
        named = self.catalog.find(name, uid, allowed)
        self.catalog.check_configured(named.model)
        return Lease(self, named.model, named.name)

    def options_of(self, name: str, model: ManagedModel) -> dict[str, Any]:
        """Return the configured parameters of *model* by one of its names."""
        options, derived = model.options(), self.config.names.get(name)
        if derived is None or name == model.name:
            return options
        own = derived.parameters
        return options | own | overflow_beside(options, own)

    def ceilings_of(self, name: str) -> NameCeilings:
        """Return the ceilings of turns by *name*."""
        derived = self.config.names.get(name)
        if derived is None:
            return NO_CEILINGS
        highest = derived.priority_max
        return NameCeilings(
            setting=f"models.{name}",
            n_predict_max=derived.n_predict_max,
            reasoning_max=derived.reasoning_max or {},
            priority_max=PRIORITY_MAX if highest is None else PRIORITIES[highest],
        )

    def lease_descriptor(
        self,
        name: str,
        file: PassedFile,
        uid: int,
        quota: Quota = NO_QUOTA,
        backend: str = "llama",
    ) -> Lease:
        """Return a lease on *file*, a model that only *uid* sees. The user's leases on one file
        share its model. The registry closes the file when the model is unloaded. *backend* runs
        the model.

        :raises QuotaExceeded: the user has too many models from descriptors.
        """
        own = {
            m.passed_file.identity: m
            for m in self.catalog.known()
            if m.uid == uid
            and m.passed_file is not None
            and m.leases
            and m.config.backend == backend
        }
        model = own.get(file.identity)
        if model is not None:
            file.close()
            return Lease(self, model)
        try:
            check_descriptor_models(quota, len(own), self.config.descriptor_models_user_max)
        except QuotaExceeded:
            file.close()
            raise
        config = ModelConfig(backend=cast(Any, backend))
        model = self.catalog.add_model(name, config, uid)
        model.passed_file = file
        return Lease(self, model)

    # Workers.

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run *work* in the daemon's task group; an unexpected failure ends only that work."""
        self._group.start_soon(_guarded, work, *arguments)

    # KV files.

    def _notify_kv_file_evicted(self, place: KvFilePlace) -> None:
        for worker in self.catalog.ready_workers():
            if worker.info.fingerprint == place.fingerprint:
                worker.client.send_command(m.KvFileEvicted(place.name))

    async def delete_session_files(self, owner: Owner, session: str) -> None:
        """Delete the KV files of a session whose states the workers have deleted.

        :raises BackendError: a file cannot be deleted.
        """
        for worker in self.catalog.all_workers():
            if worker.unloading:
                await worker.exited.wait()  # it may write until then
        shared = self.config.kv_share == "all"
        await self.kv_index.delete_session_files(*scoped(owner.user, session, shared=shared))

    # Settings.

    async def unload_model(self, named: NamedModel, *, force: bool) -> None:
        """Unload a model for an operator, who has given one of its names.

        Leases without work may end soon: a gateway keeps that of a graph for a moment after each
        request, so that the next one takes one call. Their end is awaited for `LEASE_END_S_MAX`.

        :raises Busy: the model is in use, and *force* is not given.
        """
        name, model = named
        if not force:
            with anyio.move_on_after(LEASE_END_S_MAX):
                while model.is_only_leased:
                    await model.lease_ended.wait()
        if model.busy and not force:
            raise Busy(
                f"{name!r} is in use; leases: {len(model.leases)}",
                hint="wait until its clients have finished, or unload it with force",
                data={"leases": len(model.leases), "retry_after_s": 5.0},
            )
        error = Cancelled(
            f"an operator unloaded {name!r}",
            hint="send the next turn to load the model again: the history is kept",
            data={"by": "operator"},
        )
        fail_readers(model.recovery.release_tasks(), error)
        if model.worker is not None:
            client = model.worker.client
            # This also fails turns that begin before the worker has exited.
            client.successor = partial(fail_readers, error=error)
            fail_readers(client.withdraw_tasks(), error)
        await model.unload()

    def pin_model(self, model: ManagedModel, *, pinned: bool) -> None:
        """Pin a model, so that it stays in memory once it is loaded, or unpin it."""
        model.pinned = pinned
        if not pinned:
            model.used_at = self.seconds()
        self.catalog.persist_settings(model)
        self.loader.note_idle_change()

    async def close(self) -> None:
        """Unload all models."""
        self.catalog.closing = True
        async with anyio.create_task_group() as group:
            for model in self.catalog.known():
                group.start_soon(model.unload)


def _no_content(user: int, sha256: bytes) -> int:
    raise NotFound(f"there is no content {sha256.hex()}")


async def _guarded(work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    try:
        await work(*arguments)
    except Exception:  # the daemon continues
        log.exception("background.failed", work=work.__qualname__)
