"""A model as the registry manages it: its state, its worker, and the settings of its name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import anyio
import msgspec

from ...backends import MemoryNeed
from ...backends.errors import InferdError, WorkerCrashed
from ...scheduler.priority import Priority
from ...sessions.turns.sentence_checks import Comparison, Similarity
from ...sessions.worker_client import TaskReader
from ..config.model_settings import ModelConfig
from ..config.settings import Config
from ..residency.gate import GateRequest, ResidencyGate
from ..residency.model_files import size_bytes
from ..workers.evicted_turns import EvictedTurns
from ..workers.process_client import ProcessClient
from ..workers.recovery import Recovery
from ..workers.worker import Worker
from .adapter_specs import describe_adapters
from .persisted import PersistedSettings, SwappedName

WANTED = ("ctx-size", "n-gpu-layers", "main-gpu", "tensor-split")
"""Parameters that a call which loads a model may set, where the configuration does not."""
SLOTS_DEFAULT = 4


class ModelState(StrEnum):
    """The state of a model."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


class ModelHost(Protocol):
    """The part of the registry that a model uses."""

    gate: ResidencyGate[ManagedModel]
    seconds: Callable[[], float]

    @property
    def config(self) -> Config:
        """The configuration in force."""

    def start_worker(self, model: ManagedModel, wanted: Mapping[str, Any]) -> Worker:
        """Start a worker for a model that is not loaded."""

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run *work* in the daemon's task group."""

    def move_tasks(self, model: ManagedModel, readers: Mapping[int, TaskReader]) -> None:
        """Let tasks go on in the worker of *model*."""

    def persist_settings(self, model: ManagedModel) -> None:
        """Store what was set for a model at run time."""

    def note_lease_ended(self, model: ManagedModel) -> None:
        """Note that a client uses a model no more."""

    def reserved_for(self, worker: Worker | None) -> MemoryNeed | None:
        """Return the memory that is reserved for a worker."""

    def compare(
        self, model: ManagedModel, comparison: Comparison, tell: Callable[[Similarity], None]
    ) -> None:
        """Compare a sentence of a model's output."""


class ManagedModel:
    """A registry entry. Lives on the daemon's event loop, which owns its state.

    At most one worker runs it at a time: a request that comes while one is unloaded waits until
    that has exited. After a swap, the old model is a model of its own until its turns have ended,
    among `predecessors`.
    """

    def __init__(self, registry: ModelHost, name: str, config: ModelConfig, uid: int | None = None):
        self.name, self.config, self.uid = name, config, uid
        self.configured = config
        """What it was before any swap."""
        self.leases: set[object] = set()
        self.worker: Worker | None = None
        self.error: InferdError | None = None
        self.fd = -1
        self.pinned = False
        """It neither expires nor is evicted."""
        self.load_s = 0.0
        """Seconds that its last load took."""
        self.fitted: dict[str, int] = {}
        """Parameters that are smaller than their defaults, for want of memory."""
        self.used_at = registry.seconds()
        self._keep_alive_s: float | None = None
        self._registry = registry
        self._progress_listeners: set[Callable[[float], None]] = set()
        self._wanted: dict[str, Any] = {}
        self.predecessors: dict[str, ManagedModel] = {}
        """Models that had the name before a swap and have turns yet, by their vocabulary."""
        self.recovery = Recovery(name, self._reload, registry.seconds)
        self.embeds = False
        """It makes embeddings: a load reserves the memory for them."""
        self.never_shrinks = False
        """It is loaded as configured, not smaller for want of memory."""
        self.turns_held = False
        """A swap holds the name's turns back until another model is loaded."""
        self.replaced = False
        """A swap has unloaded the old model; no request waits for its turn any more."""
        self.dropped = False
        """It had a name before a swap, and is unloaded for good."""
        self._released = anyio.Event()
        self.changing = anyio.Lock()
        """Held during a change of what the name means: a swap, an added or removed adapter."""
        self.load_waiters = 0
        """How many wait for its load."""
        self.residency = registry.gate.new_residency()
        self.evicted_turns = EvictedTurns(
            partial(registry.move_tasks, self),
            registry.start_soon,
            registry.config.reader_timeout_s,
        )

    @property
    def state(self) -> ModelState:
        """The state, which follows from the worker."""
        worker = self.worker
        if worker is None:
            return ModelState.COLD if self.error is None else ModelState.FAILED
        if worker.error is not None:
            return ModelState.FAILED
        if not worker.loaded.is_set():
            return ModelState.LOADING
        return ModelState.UNLOADING if worker.unloading else ModelState.READY

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the worker's client, loading the model if it is cold; callers share one load.
        A load that fails in a swap is tried again once the old model is back.

        :raises LoadFailed: it cannot be loaded.
        """
        while True:
            try:
                return (await self.load(on_progress)).client
            except InferdError:
                if not self.replaced:
                    raise
            await self.released()

    async def load(self, on_progress: Callable[[float], None] | None = None) -> Worker:
        """Return the worker, loading the model if it is cold.

        :raises LoadFailed: it cannot be loaded.
        :raises WorkerCrashed: it was swapped, and is unloaded for good.
        """
        self.used_at = self._registry.seconds()
        while self.worker is not None and self.worker.unloading and not self.dropped:
            await self.worker.exited.wait()
        if self.dropped:
            raise WorkerCrashed(f"the worker of {self.name!r} has left, for good")
        if on_progress is not None:
            self._progress_listeners.add(on_progress)
        self.load_waiters += 1
        try:
            worker = self.worker or self._registry.start_worker(self, self._wanted)
            await worker.loaded.wait()
        finally:
            self.load_waiters -= 1
            self._progress_listeners.discard(on_progress) if on_progress is not None else None
        if worker.error is not None:
            raise worker.error
        return worker

    def hold_turns(self) -> None:
        """Hold turns back."""
        self.turns_held, self._released = True, anyio.Event()

    def release_turns(self) -> None:
        """Let turns begin again."""
        self.turns_held = self.replaced = False
        self._released.set()

    async def released(self) -> None:
        """Wait until turns may begin."""
        while self.turns_held:
            await self._released.wait()

    def note_wanted(self, values: Mapping[str, Any]) -> None:
        """Note model-level values that a client asked for, for the next load."""
        if self.worker is None or self.worker.unloading:
            self._wanted = {k: v for k, v in values.items() if k in WANTED}
        if values.get("keep-alive") is not None:
            self._keep_alive_s = values["keep-alive"]
            self._registry.persist_settings(self)

    @property
    def settings(self) -> PersistedSettings:
        """The settings made at run time, which hold over a restart."""
        changed = self.config != self.configured
        return PersistedSettings(
            swapped=SwappedName(self.configured, self.config) if changed else None,
            pinned=self.pinned,
            keep_alive_s=self._keep_alive_s,
        )

    def apply_settings(self, settings: PersistedSettings) -> None:
        """Take over the settings that an earlier daemon has stored."""
        self.config = self.configured if settings.swapped is None else settings.swapped.now
        self.pinned, self._keep_alive_s = settings.pinned, settings.keep_alive_s

    @property
    def slots_configured(self) -> int:
        """The slots that a load asks for; where memory is short it may get fewer."""
        return int(self.options().get("slots", SLOTS_DEFAULT))

    @property
    def wanted_ctx_size(self) -> int:
        """The `ctx-size` that the client which had it loaded asked for; 0: none."""
        return int(self._wanted.get("ctx-size", 0))

    @property
    def wanted_gpu_layers(self) -> int:
        """The `n-gpu-layers` that this client asked for; -1: as many as fit."""
        return int(self._wanted.get("n-gpu-layers", -1))

    @property
    def keep_alive_s(self) -> float:
        """How long it stays loaded without being used; negative: until memory is short."""
        if self.pinned:
            return -1.0
        if self.fd >= 0:
            return 0.0
        if self._keep_alive_s is not None:
            return self._keep_alive_s
        configured = self.options().get("keep-alive")
        return self._registry.config.keep_alive_s if configured is None else float(configured)

    @property
    def idle_s(self) -> float:
        """How long it has not been used."""
        return 0.0 if self.busy else max(0.0, self._registry.seconds() - self.used_at)

    @property
    def loaded(self) -> Worker | None:
        """Its worker, if it is ready."""
        return self.worker if self.state is ModelState.READY else None

    async def _reload(self) -> ProcessClient:
        """Return a worker's client for turns that lost theirs, with their requests' priority."""
        admitted = (request.priority for request in self.residency.admitted)
        priority = max(admitted, default=Priority.NORMAL)
        request = GateRequest(self._registry.seconds(), priority)
        async with self._registry.gate.admit(self, request):
            return await self.ready()

    def evict(self) -> None:
        """Unload the model for another one; turns that nobody reads wait until they are read."""
        worker = self.loaded
        if worker is not None:
            self.evicted_turns.add_turns(worker.client.withdraw_tasks(), worker.info)
            worker.quit()

    def report_progress(self, fraction: float) -> None:
        """Report how far the load is to all that wait for it."""
        for listener in tuple(self._progress_listeners):
            listener(fraction)

    async def unload(self) -> None:
        """Let the worker quit, and wait until it has exited."""
        worker = self.worker
        if worker is not None:
            worker.quit()
            await worker.exited.wait()

    def options(self) -> dict[str, Any]:
        """Return the configured parameters: the defaults, then the model's own."""
        return self._registry.config.defaults | self.config.options

    def describe(self) -> dict[str, Any]:
        """Return its description in `models`."""
        worker = self.worker
        info = worker.info if self.state is ModelState.READY and worker is not None else None
        file = self.config.file
        return {
            "name": self.name,
            "state": self.state.value,
            "backend": self.config.backend,
            "file": str(file) if file is not None else "",
            "size_bytes": size_bytes(file, self.fd),
            "leases": len(self.leases),
            "tasks": (len(worker.client.tasks) if worker is not None else 0)
            + len(self.evicted_turns),
            "pid": worker.pid if worker is not None else 0,
            "progress": worker.progress if worker is not None else 0.0,
            "idle_s": self.idle_s,
            "expires_s": self._expires_s(),
            "keep_alive_s": self.keep_alive_s,
            "pinned": self.pinned,
            "memory": _memory(self._registry.reserved_for(worker)),
            "adapters": describe_adapters(self.config, self.loaded),
            "error": self.error.to_wire() if self.error is not None else None,
            "info": msgspec.structs.asdict(info) if info is not None else None,
        }

    def _expires_s(self) -> float | None:
        """Return the seconds until an idle model is unloaded; None: it will not be."""
        if self.worker is None or self.busy or self.keep_alive_s < 0:
            return None
        return max(0.0, self.used_at + self.keep_alive_s - self._registry.seconds())

    @property
    def busy(self) -> bool:
        """Whether a client holds a lease or a task runs."""
        return bool(self.leases or self.has_tasks or self.residency.is_wanted)

    @property
    def has_tasks(self) -> bool:
        """Whether it has tasks."""
        tasks = self.worker.client.tasks if self.worker is not None else ()
        return bool(tasks or len(self.recovery))

    # Leases.

    def add_lease(self, lease: object) -> None:
        """Count a lease; the model does not expire before it ends."""
        self.leases.add(lease)

    def end_lease(self, lease: object) -> None:
        """Note that a lease has ended."""
        self.leases.discard(lease)
        self.used_at = self._registry.seconds()
        self._registry.note_lease_ended(self)

    def compare(self, comparison: Comparison, tell: Callable[[Similarity], None]) -> None:
        """Compare a sentence of the model's output, as is configured for the model."""
        self._registry.compare(self, comparison, tell)


def _memory(need: MemoryNeed | None) -> dict[str, int] | None:
    if need is None:
        return None
    return msgspec.structs.asdict(need) | {"total": need.total}
