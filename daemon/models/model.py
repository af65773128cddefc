"""A model as the registry knows it, its state, and the leases that clients hold on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec

from ...backends import MemoryNeed
from ...backends.errors import InferdError, WorkerCrashed
from ...scheduler.priority import Priority
from ...sessions.turns.sentence_checks import Comparison, Similarity
from ...sessions.worker_client import ask_again
from ..config.model_settings import ModelConfig
from ..residency.gate import Caller
from ..residency.model_files import size_bytes
from ..workers.evicted_turns import EvictedTurns
from ..workers.process_client import ProcessClient
from ..workers.recovery import Recovery
from ..workers.worker import Worker
from .model_adapters import describe_adapters
from .persisted import Kept, Taken

if TYPE_CHECKING:
    from .registry import Registry

__all__ = ("Lease", "Model", "ModelState")

T = TypeVar("T")
WANTED = ("ctx-size", "n-gpu-layers", "main-gpu", "tensor-split")
"""What a call that loads a model may ask for, where the configuration names none."""
SLOTS_DEFAULT = 4


class ModelState(StrEnum):
    """Where a model is."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"
    FAILED = "failed"


class Model:
    """A registry entry. Lives on the daemon's event loop, which owns its state.

    At most one worker runs it at a time: who asks while one leaves, waits until it has left. What a
    swap takes the name from is a model of its own until its turns have ended, among `formers`.
    """

    def __init__(self, registry: Registry, name: str, config: ModelConfig, uid: int | None = None):
        self.name, self.config, self.uid = name, config, uid
        self.configured = config
        """What it was before any swap."""
        self.leases: set[Lease] = set()
        self.worker: Worker | None = None
        self.error: InferdError | None = None
        self.fd = -1
        self.pinned = False
        """It neither expires nor is evicted."""
        self.load_s = 0.0
        """What its last load took."""
        self.fitted: dict[str, int] = {}
        """Parameters that are smaller than their defaults, for want of memory."""
        self.used_at = registry.seconds()
        self._keep_alive_s: float | None = None
        self._registry = registry
        self._listeners: set[Callable[[float], None]] = set()
        self._wanted: dict[str, Any] = {}
        self.formers: dict[str, Model] = {}
        """Models that had the name before a swap and are not done yet, by their vocabulary."""
        self.recovery = Recovery(name, self._ready_again, registry.seconds)
        self.embeds = False
        """It makes embeddings: a load counts what that takes."""
        self.whole = False
        """It is loaded as it is configured, not smaller for want of memory."""
        self.held = False
        """A swap holds the name's turns back until another model is loaded."""
        self.replaced = False
        """The model before has left for that; nobody waits for his turn any more."""
        self.dropped = False
        """It had a name before a swap, and leaves for good."""
        self._released = anyio.Event()
        self.changing = anyio.Lock()
        """Held while what the name means is changed: by a swap, by adapters that come and go."""
        self.awaited = 0
        """How many wait for its load."""
        self.stay = registry.turnstile.stay()
        self.evicted_turns = EvictedTurns(
            partial(registry.move, self), registry.start_soon, registry.config.reader_timeout_s
        )

    @property
    def state(self) -> ModelState:
        """Where the model is: follows from its worker."""
        worker = self.worker
        if worker is None:
            return ModelState.COLD if self.error is None else ModelState.FAILED
        if worker.error is not None:
            return ModelState.FAILED
        if not worker.loaded.is_set():
            return ModelState.LOADING
        return ModelState.LEAVING if worker.leaving else ModelState.READY

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the worker's client, loading the model if it is cold; callers share one load.
        One that fails in a swap is tried again: then the model before is back.

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
        :raises WorkerCrashed: it was swapped, and has left.
        """
        self.used_at = self._registry.seconds()
        while self.worker is not None and self.worker.leaving and not self.dropped:
            await self.worker.gone.wait()
        if self.dropped:
            raise WorkerCrashed(f"the worker of {self.name!r} has left, for good")
        if on_progress is not None:
            self._listeners.add(on_progress)
        self.awaited += 1
        try:
            worker = self.worker or self._registry.start(self, self._wanted)
            await worker.loaded.wait()
        finally:
            self.awaited -= 1
            self._listeners.discard(on_progress) if on_progress is not None else None
        if worker.error is not None:
            raise worker.error
        return worker

    def hold(self) -> None:
        """Hold turns back."""
        self.held, self._released = True, anyio.Event()

    def release(self) -> None:
        """Let turns begin again."""
        self.held = self.replaced = False
        self._released.set()

    async def released(self) -> None:
        """Wait until turns may begin."""
        while self.held:
            await self._released.wait()

    def want(self, values: Mapping[str, Any]) -> None:
        """Note model-level values that a first load should have."""
        if self.worker is None or self.worker.leaving:
            self._wanted = {k: v for k, v in values.items() if k in WANTED}
        if values.get("keep-alive") is not None:
            self._keep_alive_s = values["keep-alive"]
            self._registry.keep(self)

    @property
    def kept(self) -> Kept:
        """What was said of it at run time, and holds over a restart."""
        swapped = Taken(self.configured, self.config) if self.config != self.configured else None
        return Kept(swapped=swapped, pinned=self.pinned, keep_alive_s=self._keep_alive_s)

    def take_up(self, kept: Kept) -> None:
        """Be what an earlier daemon was told that it is."""
        self.config = self.configured if kept.swapped is None else kept.swapped.now
        self.pinned, self._keep_alive_s = kept.pinned, kept.keep_alive_s

    @property
    def slots_configured(self) -> int:
        """The slots that a load asks for; where memory is short it may get fewer."""
        return int(self.options().get("slots", SLOTS_DEFAULT))

    @property
    def wanted_ctx_size(self) -> int:
        """The `ctx-size` that whoever had it loaded asked for; 0: none."""
        return int(self._wanted.get("ctx-size", 0))

    @property
    def wanted_gpu_layers(self) -> int:
        """The `n-gpu-layers` that it asked for; -1: as many as fit."""
        return int(self._wanted.get("n-gpu-layers", -1))

    @property
    def keep_alive_s(self) -> float:
        """How long it stays when nobody uses it; negative: until memory is short."""
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
        """How long nobody has used it."""
        return 0.0 if self.busy else max(0.0, self._registry.seconds() - self.used_at)

    @property
    def loaded(self) -> Worker | None:
        """Its worker, if it is ready."""
        return self.worker if self.state is ModelState.READY else None

    async def _ready_again(self) -> ProcessClient:
        """Return the worker for turns that have none any more; they come as those who read them."""
        priority = max((visit.priority for visit in self.stay.inside), default=Priority.NORMAL)
        async with self._registry.turnstile.visit(self, Caller(self._registry.seconds(), priority)):
            return await self.ready()

    def make_way(self) -> None:
        """Let the worker leave for another model; turns that nobody reads are set aside."""
        worker = self.loaded
        if worker is not None:
            self.evicted_turns.add_turns(worker.client.give_away(), worker.info)
            worker.quit()

    def progress(self, fraction: float) -> None:
        """Tell who waits how far the load is."""
        for listener in tuple(self._listeners):
            listener(fraction)

    async def unload(self) -> None:
        """Let the worker leave, and wait until it has left."""
        worker = self.worker
        if worker is not None:
            worker.quit()
            await worker.gone.wait()

    def options(self) -> dict[str, Any]:
        """Return the configured parameters: the defaults, then the model's own."""
        return self._registry.config.defaults | self.config.options

    def describe(self) -> dict[str, Any]:
        """Return what `models` says of it."""
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
            "memory": _memory(self._registry.room.claimed(worker)),
            "adapters": describe_adapters(self),
            "error": self.error.to_wire() if self.error is not None else None,
            "info": msgspec.structs.asdict(info) if info is not None else None,
        }

    def _expires_s(self) -> float | None:
        """Return the seconds until an idle model is unloaded; None: it is not to be."""
        if self.worker is None or self.busy or self.keep_alive_s < 0:
            return None
        return max(0.0, self.used_at + self.keep_alive_s - self._registry.seconds())

    @property
    def busy(self) -> bool:
        """Tell whether somebody holds a lease or a task runs."""
        return bool(self.leases or self.computes or self.stay.wanted)

    @property
    def computes(self) -> bool:
        """Tell whether it has tasks."""
        tasks = self.worker.client.tasks if self.worker is not None else ()
        return bool(tasks or len(self.recovery))


class Lease:
    """One client's hold on a model: a `sessions.ModelSource`. While it lasts, the model does not
    expire; it may leave for another one, and comes back when it is needed.
    """

    def __init__(self, model: Model):
        self.model = model
        self.name = model.name
        self.closed = False
        model.leases.add(self)

    @property
    def loaded(self) -> ProcessClient | None:
        """The client of the model's worker, if the model is loaded."""
        worker = self.model.loaded
        return None if worker is None else worker.client

    @property
    def held(self) -> bool:
        """Whether a swap holds turns back."""
        return self.model.held

    async def released(self) -> None:
        """Wait until turns may begin."""
        await self.model.released()

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the client of the model's worker, loading the model if needed."""
        return await self.model.ready(on_progress)

    async def ask(self, question: Callable[[ProcessClient], Awaitable[T]]) -> T:
        """Return the worker's answer, of another worker where one dies meanwhile.

        :raises WorkerCrashed: the question ended the worker, or too many workers have died.
        """
        return await ask_again(self.ready, question)

    def predecessor(self, vocabulary: str) -> Model | None:
        """Return a model that had the name before a swap, by its vocabulary's hash."""
        return self.model.formers.get(vocabulary)

    def compare(self, comparison: Comparison, tell: Callable[[Similarity], None]) -> None:
        """Have a sentence of the model's compared, as is configured for it."""
        self.model._registry.compare(self.model, comparison, tell)

    def close(self) -> None:
        """Give the lease up."""
        self.closed = True
        self.model.leases.discard(self)
        self.model.used_at = self.model._registry.seconds()
        self.model._registry.lease_ended(self.model)


def _memory(need: MemoryNeed | None) -> dict[str, int] | None:
    if need is None:
        return None
    return msgspec.structs.asdict(need) | {"total": need.total}
