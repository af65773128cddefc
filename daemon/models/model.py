"""A model as the registry manages it: its state, its worker, and the settings of its name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import anyio

from ...backends.errors import InferdError, WorkerCrashed
from ...backends.params import REQUESTABLE, overflow_beside
from ...backends.tuning_choice import LoadTuning
from ...sessions.worker_client import TaskReader
from ..config.model_settings import ModelConfig
from ..config.settings import Config
from ..media.caches import MediaCaches
from ..residency.residency import Residency
from ..workers.process_client import ProcessClient
from ..workers.recovery import EvictedTurns, Recovery
from ..workers.worker import Worker
from .persisted_settings import PersistedSettings, SwappedName
from .projectors import NO_PROJECTOR

SLOTS_DEFAULT = 4


class PassedFile(NamedTuple):
    """A model's file that a client has passed; an operation on its descriptor may block."""

    fd: int
    size_bytes: int
    identity: tuple[int, ...]
    """Equal for descriptors of one unchanged file."""
    close: Callable[[], None]
    weights_fd: int = -1
    """The descriptor of the weights, if they are in another file."""


class ModelState(StrEnum):
    """The state of a model."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


class DraftModelChoice(NamedTuple):
    """The draft model of a load: the *name* by which it was named, and its *file*."""

    name: str
    file: str


NO_DRAFT_MODEL = DraftModelChoice("", "")


class ManagedModel:
    """A registry entry. Lives on the daemon's event loop, which owns its state.

    The model has at most one worker; a request that arrives during an unload waits until the worker
    has exited. After a swap, the old model is one of the `predecessors` until its turns have ended.

    *settings* returns the configuration in force. *choose_projector* sets `projector`, before
    *start_worker* starts a worker for the model if it is not loaded. *move_tasks* continues tasks
    in the model's worker. *start_soon* runs background work.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        uid: int | None,
        *,
        settings: Callable[[], Config],
        residency_s: float,
        choose_files: Callable[[ManagedModel], Awaitable[None]],
        start_worker: Callable[[ManagedModel], Worker],
        move_tasks: Callable[[ManagedModel, Mapping[int, TaskReader]], None],
        start_soon: Callable[..., None],
        seconds: Callable[[], float],
    ):
        self.name, self.config, self.uid = name, config, uid
        self.configured = config
        """The configuration before any swap."""
        self.swapped_to = ""
        """The target of a swap, a model's name or file; empty for the name's own model."""
        self.leases: set[object] = set()
        self.lease_ended = anyio.Event()
        """Set, and replaced, at the end of each lease."""
        self.worker: Worker | None = None
        self.error: InferdError | None = None
        self.passed_file: PassedFile | None = None
        self.pinned = False
        """A pinned model neither expires nor is evicted."""
        self.load_s = 0.0
        """The duration of the last load."""
        self.fitted: dict[str, int] = {}
        """Parameters below their defaults because memory is short."""
        self.requested: Mapping[str, Any] = {}
        """Parameters set by the client whose call has caused the load."""
        self.kept_tuning: LoadTuning | None = None
        """By which the next load chooses its setting, if its worker replaces one that has died."""
        self.kept_caches: MediaCaches | None = None
        """The embeddings of a worker that has died, for the turns that continue in the next."""
        self.used_at = seconds()
        self.predecessors: dict[str, ManagedModel] = {}
        """Models that had the name before a swap and still have turns, by vocabulary hash."""
        self.recovery = Recovery(name, seconds)
        self.embeds = False
        """A load reserves the memory for embeddings, too."""
        self.never_shrinks = False
        """The model is loaded as configured or not at all."""
        self.turns_held = False
        """A swap holds the name's turns back until another model is loaded."""
        self.replaced = False
        """A swap has unloaded the old model."""
        self.dropped = False
        """The model had a name before a swap, and is unloaded for good."""
        self.swapping = anyio.Semaphore(1, max_value=1)
        """Acquired by a swap until its old model is unloaded."""
        self.changing = anyio.Lock()
        """Held during a swap and while adapters are added or removed."""
        self.load_waiters = 0
        """The number of callers that wait for the load."""
        self.residency = Residency(residency_s)
        self.evicted_turns = EvictedTurns(
            partial(move_tasks, self), start_soon, settings().reader_timeout_s
        )
        self.projector = NO_PROJECTOR
        """The projector of the last load, or of the one that begins."""
        self.draft = NO_DRAFT_MODEL
        """The draft model of that load."""
        self._settings, self._start, self._seconds = settings, start_worker, seconds
        self._choose_files = choose_files
        self._keep_alive_s: float | None = None
        self._progress_listeners: set[Callable[[float], None]] = set()
        self._released = anyio.Event()

    def drop_kept_caches(self) -> None:
        """Free the embeddings that no next worker has taken."""
        caches, self.kept_caches = self.kept_caches, None
        if caches is not None:
            caches.clear()

    @property
    def state(self) -> ModelState:
        """The state, derived from the worker's."""
        worker = self.worker
        if worker is None:
            return ModelState.COLD if self.error is None else ModelState.FAILED
        if worker.error is not None:
            return ModelState.FAILED
        if not worker.loaded.is_set():
            return ModelState.LOADING
        return ModelState.UNLOADING if worker.unloading else ModelState.READY

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the worker's client, loading the model if needed; callers share one load. A load
        that fails in a swap is tried again once the old model is loaded again.

        :raises LoadFailed: the model cannot be loaded.
        """
        while True:
            try:
                return (await self.load(on_progress)).client
            except InferdError:
                if not self.replaced:
                    raise
            await self.released()

    async def load(self, on_progress: Callable[[float], None] | None = None) -> Worker:
        """Return the worker, loading the model if needed.

        :raises LoadFailed: the model cannot be loaded.
        :raises WorkerCrashed: a swap has unloaded the model for good.
        """
        self.used_at = self._seconds()
        if on_progress is not None:
            self._progress_listeners.add(on_progress)
        self.load_waiters += 1
        try:
            while True:
                worker = await self._start_worker()
                await worker.loaded.wait()
                if worker.error is None:
                    return worker
                if worker.error.data.get("cause") != "died":
                    raise worker.error
        finally:
            self.load_waiters -= 1
            if on_progress is not None:
                self._progress_listeners.discard(on_progress)

    async def _start_worker(self) -> Worker:
        """Return the worker. If there is none, start one; before that, wait until an unloading
        worker has exited, and for the delay after deaths.

        :raises WorkerCrashed: a swap has unloaded the model for good, or workers have died for too
            long.
        :raises LoadFailed: the projector or the draft model cannot be used.
        """
        is_chosen = False
        while not self.dropped:
            if self.worker is not None:
                if not self.worker.unloading:
                    return self.worker
                is_chosen = False
                await self.worker.released.wait()
            elif delay_s := self.recovery.restarts.delay_s(self.name):
                is_chosen = False
                await anyio.sleep(delay_s)
            elif not is_chosen:
                is_chosen = True
                await self._choose_files(self)
            else:
                return self._start(self)
        raise WorkerCrashed(f"{self.name!r} was swapped and is unloaded for good")

    def hold_turns(self) -> None:
        """Let no turn begin until `release_turns`."""
        self.turns_held, self._released = True, anyio.Event()
        if self.worker is not None:
            self.worker.client.close_channels()

    def release_turns(self) -> None:
        """Let turns begin again, and wake those that were held back."""
        self.turns_held = self.replaced = False
        self._released.set()

    async def released(self) -> None:
        """Wait until turns may begin."""
        while self.turns_held:
            await self._released.wait()

    def note_requested(self, values: Mapping[str, Any]) -> None:
        """Note the parameters of a call that loads the model, for the next load."""
        if self.worker is None or self.worker.unloading:
            self.requested = {k: v for k, v in values.items() if k in REQUESTABLE and v != ""}
        if values.get("keep-alive") is not None:
            self._keep_alive_s = values["keep-alive"]

    @property
    def settings(self) -> PersistedSettings:
        """The settings made at run time; they survive a restart."""
        changed = self.config != self.configured
        return PersistedSettings(
            swapped=SwappedName(self.configured, self.config, self.swapped_to) if changed else None,
            pinned=self.pinned,
            keep_alive_s=self._keep_alive_s,
        )

    def apply_settings(self, settings: PersistedSettings) -> None:
        """Apply the settings that an earlier daemon has stored."""
        swapped = settings.swapped
        self.config, self.swapped_to = (
            (self.configured, "") if swapped is None else (swapped.now, swapped.to)
        )
        self.pinned, self._keep_alive_s = settings.pinned, settings.keep_alive_s

    @property
    def slots_configured(self) -> int:
        """The configured number of slots; a load may get fewer when memory is short."""
        return int(self.options().get("slots", SLOTS_DEFAULT))

    @property
    def keep_alive_s(self) -> float:
        """Seconds without use until the model is unloaded; if negative, it stays until evicted."""
        if self.pinned:
            return -1.0
        if self.passed_file is not None:
            return 0.0
        if self._keep_alive_s is not None:
            return self._keep_alive_s
        configured = self.options().get("keep-alive")
        return self._settings().keep_alive_s if configured is None else float(configured)

    @property
    def idle_s(self) -> float:
        """Seconds since the last use."""
        return 0.0 if self.busy else max(0.0, self._seconds() - self.used_at)

    @property
    def loaded(self) -> Worker | None:
        """The worker, if it is ready."""
        return self.worker if self.state is ModelState.READY else None

    def evict(self) -> None:
        """Unload the model for another one. Its unread turns continue once they are read."""
        worker = self.loaded
        if worker is not None:
            self.evicted_turns.add_turns(worker.client.withdraw_tasks(), worker.info)
            worker.quit()

    def report_progress(self, fraction: float) -> None:
        """Report the progress of a load to the callers that wait for it."""
        for listener in tuple(self._progress_listeners):
            listener(fraction)

    async def unload(self) -> None:
        """Stop the worker and its encoder, and wait until both have exited."""
        worker = self.worker
        if worker is not None:
            worker.quit()
            await worker.released.wait()

    def options(self) -> dict[str, Any]:
        """Return the configured parameters: the defaults, then the model's own."""
        defaults, own = self._settings().defaults, self.config.options
        return defaults | own | overflow_beside(defaults, own)

    @property
    def busy(self) -> bool:
        """Whether the model is wanted, is leased, or has tasks."""
        return bool(self.leases or self.has_tasks or self.residency.is_wanted)

    @property
    def has_tasks(self) -> bool:
        """Whether the model has tasks, running or waiting for a worker."""
        tasks = self.worker.client.tasks if self.worker is not None else ()
        return bool(tasks or len(self.recovery))

    @property
    def is_only_leased(self) -> bool:
        """Whether the model is leased, and nothing else needs it."""
        return bool(self.leases) and not (self.has_tasks or self.residency.is_wanted)

    def end_lease(self, lease: object) -> None:
        """Remove a lease that has ended."""
        self.leases.discard(lease)
        ended, self.lease_ended = self.lease_ended, anyio.Event()
        ended.set()
        self.used_at = self._seconds()
