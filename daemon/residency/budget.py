"""Room in memory: which loads may go on, who leaves for them, which are refused.

Lives on the daemon's event loop and never waits: a worker's reckoning is decided on when it comes,
in one step with noting what was promised; one that must wait for others to leave is looked at again
each time one has left. So two loads never get the same bytes, and none waits for nothing. They come
in the order of their models' visits (`stay`); models leave for them whose stay is over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import structlog

from ...backends import MemoryNeed, Shape
from ...scheduler import messages as m
from ..workers.worker import Worker
from .fit import (
    BATCH_SIZE_MIN,
    CTX_SIZE_MIN,
    DeviceShort,
    Idle,
    device_refusal,
    device_short,
    embedding_refusal,
    fewer_layers,
    more_refused,
    refusal,
    smaller,
    victims,
)
from .machine import MachineMemory
from .residency import Visit

if TYPE_CHECKING:
    from ..models.model import Model

__all__ = ("Room", "floor_of")

log = structlog.get_logger()


class _Claim:
    """What a worker was promised. `unseen`: bytes of it that the machine's figures will not show
    (its weights are pages of a file); None while it loads.
    """

    def __init__(self, need: MemoryNeed):
        self.need = need
        self.unseen: int | None = None


class _Load:
    """A load whose worker waits for an answer."""

    def __init__(self, model: Model, worker: Worker, asked: m.MemoryEstimate, floor: Shape):
        self.model, self.worker = model, worker
        self.asked, self.report, self.floor = asked, asked, floor
        self.outdated = False
        """A worker has left since the report: its devices may have more free."""


class Room:
    """Gives memory to loads. *budget* bytes are for all models together; 0: what is free."""

    def __init__(
        self,
        budget: int,
        models: Callable[[], Iterable[Model]],
        machine: MachineMemory | None = None,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self._budget = budget
        self._models = models
        self._machine = machine or MachineMemory()
        self._seconds = seconds
        self._claims: dict[Worker, _Claim] = {}
        self._loads: dict[Worker, _Load] = {}
        self._waiting: list[Worker] = []

    def reckoned(self, model: Model, worker: Worker, report: m.MemoryEstimate) -> None:
        """Decide on a load: it goes on, in another shape perhaps, or waits, or is refused."""
        if worker.leaving:
            return
        load = self._loads.get(worker)
        if load is None:
            load = self._loads[worker] = _Load(model, worker, report, floor_of(model, report))
        load.report = report
        self._decide(load)

    def loaded(self, worker: Worker) -> None:
        """Note that a load has ended well."""
        claim = self._claims.get(worker)
        if claim is not None:
            claim.unseen = self._unseen(worker, claim)

    def embed(self, model: Model, worker: Worker) -> list[Worker]:
        """Promise a loaded worker the memory in which it makes embeddings. Idle models leave for
        it: those to wait for are returned, before this is called again.

        :raises OutOfMemory: it is not there, with all that may leave.
        """
        claim = self._claims.get(worker)
        extra = claim.need.embedding if claim is not None else 0
        missing = extra - self.free_bytes()
        if claim is None or missing <= 0:
            if claim is not None:
                claim.need = claim.need.with_embedding()
                claim.unseen = None if claim.unseen is None else claim.unseen + extra
            worker.client.embeds = True
            return []
        others = [idle for idle in self._unused() if idle.name != model.name]
        leaving = victims(others, missing - self._coming())
        if leaving is None:
            whole = self.free_bytes() + self._coming() + sum(idle.need for idle in others)
            raise embedding_refusal(model.name, extra, whole)
        self._evict([idle.name for idle in leaving], for_model=model.name)
        return [other for other in self._claims if other.leaving]

    def promise(self, worker: Worker, size: int) -> None:
        """Promise a loaded worker *size* bytes more; call `loaded` once it has them.

        :raises OutOfMemory: so many are not free.
        """
        free = self.free_bytes()
        if size > free:
            raise more_refused(worker.spec.name, size, free)
        self._grow(worker, size)

    def take_back(self, worker: Worker, size: int) -> None:
        """Take back *size* bytes of what a loaded worker was promised."""
        self._grow(worker, -size)

    def _grow(self, worker: Worker, size: int) -> None:
        claim = self._claims.get(worker)
        if claim is not None:  # else it has left
            weights = max(0, claim.need.weights + size)
            claim.need = msgspec.structs.replace(claim.need, weights=weights)
            claim.unseen = None

    def left(self, worker: Worker) -> None:
        """Note that a worker is gone."""
        self._claims.pop(worker, None)
        self._end(worker)
        for load in self._loads.values():
            load.outdated = bool(load.report.devices)

    @property
    def loads_wait(self) -> bool:
        """Tell whether a load waits for others to leave."""
        return bool(self._waiting)

    def head(self, now: float) -> tuple[Visit | None, set[Model]]:
        """Return the visit for which memory is given next, and which models are to leave for it."""
        for load in self._in_order(now):
            first = load.model.stay.first(now)
            if first is None:
                continue
            names = {holder.name for holder in self._leaving(load, now) or ()}
            return first, {model for model in self._models() if model.name in names}
        return None, set()

    def look(self, now: float) -> None:
        """Decide again on the loads that wait."""
        for load in self._in_order(now):
            if load.worker not in self._waiting or load.worker.leaving:
                continue
            if load.outdated:
                load.outdated = False
                load.worker.reckon(load.report.shape)  # what is free there now, its worker sees
            else:
                self._decide(load)

    def claimed(self, worker: Worker | None) -> MemoryNeed | None:
        """Return what a worker was promised."""
        claim = self._claims.get(worker) if worker is not None else None
        return claim.need if claim is not None else None

    # Decisions.

    def _decide(self, load: _Load) -> None:
        now, need, free = self._seconds(), load.report.need.total, self.free_bytes()
        whole, short = self._whole(load, now), self._short(load, now)
        leaving = self._leaving(load, now)
        if short is None and need <= free and need <= whole - self._promised_ahead(load, now):
            self._grant(load)
        elif not load.model.awaited:
            self._end(load.worker)
            load.worker.quit()
        elif leaving is not None or (load.model.stay.wanted and short is None and need <= whole):
            self._wait(load)
            if leaving and not any(holder.busy or holder.lingers for holder in leaving):
                self._evict([holder.name for holder in leaving], for_model=load.model.name)
        elif (shape := _less(load, short)) is not None:
            self._stop_waiting(load.worker)
            load.worker.reckon(shape)
        else:
            self._refuse(load, short, whole)

    def _short(self, load: _Load, now: float) -> DeviceShort | None:
        """Return the device that has too little for a load, if there is one."""
        report = load.report
        return device_short(report.need, report.devices, self._promised_on_devices(load, now))

    def _leaving(self, load: _Load, now: float) -> list[Idle] | None:
        """Return who leaves for a load, of a device that is short or else of the host; None: all
        that may leave are not enough.
        """
        short = self._short(load, now)
        if short is not None:
            name = short.device.name
            return victims(self._holders(load, now, name), short.missing - self._coming(name))
        room = self.free_bytes() + self._coming() - self._promised_ahead(load, now)
        return victims(self._holders(load, now), load.report.need.total - room)

    def _whole(self, load: _Load, now: float) -> int:
        """Return what a load could have if all left that may."""
        held = sum(holder.need for holder in self._holders(load, now))
        return self.free_bytes() + self._coming() + held + self._loading(load)

    def free_bytes(self) -> int:
        """Return the bytes that nobody has and nobody was promised."""
        if self._budget:
            return self._budget - sum(c.need.total for c in self._claims.values())
        unseen = sum(self._unseen(worker, claim) for worker, claim in self._claims.items())
        return self._machine.free_bytes() - unseen

    def spare_bytes(self) -> int:
        """Return what the machine has free; negative where it is short.

        Where the budget is set by hand, what the models have yet to touch is the operator's care.
        """
        return self._machine.free_bytes() if self._budget else self.free_bytes()

    def shed(self) -> Idle | None:
        """Let the idle model leave that is least worth its memory; None: none may."""
        leaving = victims(self._unused(), 1)
        if not leaving:
            return None
        self._evict([leaving[0].name], cause="pressure")
        return leaving[0]

    def _unseen(self, worker: Worker, claim: _Claim) -> int:
        if claim.unseen is not None:
            return claim.unseen
        return max(0, claim.need.total - self._machine.anonymous_bytes(worker.pid))

    def _coming(self, device: str = "") -> int:
        """Return the bytes of workers that are about to end, the host's or a device's."""
        return sum(_bytes_of(c.need, device) for w, c in self._claims.items() if w.leaving)

    def _promised_on_devices(self, load: _Load, now: float) -> Counter[str]:
        """Return the bytes of each device that loads under way will take, and those that wait and
        come before *load*; what is loaded is not free on the device.
        """
        needs = [other.report.need for other in self._ahead(load, now)]
        needs += [claim.need for claim in self._claims.values() if claim.unseen is None]
        promised: Counter[str] = Counter()
        for need in needs:
            promised.update(need.devices)
        return promised

    def _loading(self, load: _Load) -> int:
        """Return the bytes of models that are being loaded: they leave, too, once they served."""
        if not load.model.stay.wanted:
            return 0
        loading = [m for m in self._models() if m.worker in self._claims and m.loaded is None]
        return sum(
            self._claims[m.worker].need.total
            for m in loading
            if m.worker is not None and not m.worker.leaving and not m.pinned
        )

    def _in_order(self, now: float) -> list[_Load]:
        """Return the loads that wait, first come first."""
        loads = [self._loads[worker] for worker in self._waiting]
        return sorted(loads, key=lambda load: load.model.stay.rank(now))

    def _ahead(self, load: _Load, now: float) -> list[_Load]:
        """Return the loads that wait and come before *load*."""
        ahead = self._in_order(now)
        if load in ahead:
            return ahead[: ahead.index(load)]
        rank = load.model.stay.rank(now)
        return [other for other in ahead if other.model.stay.rank(now) <= rank]

    def _promised_ahead(self, load: _Load, now: float) -> int:
        return sum(other.report.need.total for other in self._ahead(load, now))

    def _holders(self, load: _Load, now: float, device: str = "") -> list[Idle]:
        """Return the models that may leave for a load, now or when their stay is over, with what
        comes back of the host's or a device's memory. For one that nobody waits for (a swap's),
        only those leave that nobody holds.
        """
        visit, found = load.model.stay.first(now), []
        for model, need in self._settled():
            busy, over = model.stay.engaged, model.stay.over(visit, now)
            if not load.model.stay.wanted and (model.busy or not over):
                continue
            unused_s = max(0.0, now - model.used_at)
            size, began = _bytes_of(need, device), model.stay.began
            lingers = not (busy or over)
            found.append(Idle(model.name, size, model.load_s, unused_s, busy, lingers, began))
        return found

    def _unused(self) -> list[Idle]:
        """Return the models that nobody uses; who holds a lease has them loaded again."""
        now = self._seconds()
        return [
            Idle(model.name, need.total, model.load_s, max(0.0, now - model.used_at))
            for model, need in self._settled()
            if model.stay.over(None, now) and not model.computes
        ]

    def _settled(self) -> Iterator[tuple[Model, MemoryNeed]]:
        """Yield the models that are loaded and not pinned, with what they were promised."""
        for model in self._models():
            claim = self._claims.get(model.worker) if model.worker is not None else None
            if claim is not None and model.loaded is not None and not model.pinned:
                yield model, claim.need

    def _grant(self, load: _Load) -> None:
        self._claims[load.worker] = _Claim(load.report.need)
        self._end(load.worker)
        load.model.stay.begin(self._seconds(), load.report.shape.slots)
        asked, shape = load.asked.shape, load.report.shape
        load.model.fitted = fitted(asked, shape)
        if load.model.fitted:
            log.info("model.fitted", model=load.model.name, **load.model.fitted)
        load.worker.proceed()

    def _wait(self, load: _Load) -> None:
        if load.worker not in self._waiting:
            self._waiting.append(load.worker)
            log.info("model.waits", model=load.model.name, bytes=load.report.need.total)

    def _evict(self, names: list[str], **why: str) -> None:
        for model in self._models():
            if model.name in names and model.worker is not None:
                log.info("model.evicted", model=model.name, **why)
                model.make_way()

    def _refuse(self, load: _Load, short: DeviceShort | None, free: int) -> None:
        self._end(load.worker)
        if short is not None:
            load.worker.refuse(device_refusal(load.model.name, load.report.shape, short))
            return
        holders = [
            (_told_name(model), self._claims[model.worker].need.total)
            for model in self._models()
            if model.worker in self._claims and model.pinned and model.worker is not None
        ]
        report = load.report
        error = refusal(
            load.model.name, report.need, report.shape, load.floor, free=free, holders=holders
        )
        load.worker.refuse(error)

    def _end(self, worker: Worker) -> None:
        self._loads.pop(worker, None)
        self._stop_waiting(worker)

    def _stop_waiting(self, worker: Worker) -> None:
        if worker in self._waiting:
            self._waiting.remove(worker)


def _less(load: _Load, short: DeviceShort | None) -> Shape | None:
    """Return the next smaller shape that a load may have."""
    if short is not None:
        return fewer_layers(load.report.shape, load.floor, short)
    return smaller(load.report.shape, load.floor)


def _bytes_of(need: MemoryNeed, device: str) -> int:
    return need.devices.get(device, 0) if device else need.total


def _told_name(model: Model) -> str:
    """Return what anybody may hear of a model: descriptors' models are their user's alone."""
    return model.name if model.uid is None else "what another descriptor loaded"


def floor_of(model: Model, report: m.MemoryEstimate) -> Shape:
    """Return the smallest shape that *model* may be loaded in: what was asked for stays."""
    set_by_hand, shape = model.options(), report.shape
    if model.whole:
        return shape
    wanted = model.wanted_ctx_size
    ctx_size = min(shape.ctx_size, max(CTX_SIZE_MIN, wanted))
    if set_by_hand.get("ctx-size") or wanted >= shape.ctx_size:
        ctx_size = shape.ctx_size
    return Shape(
        shape.slots if "slots" in set_by_hand else 1,
        ctx_size,
        shape.batch_size if "batch-size" in set_by_hand else min(shape.batch_size, BATCH_SIZE_MIN),
        0 if set_by_hand.get("n-gpu-layers", model.wanted_gpu_layers) < 0 else shape.n_gpu_layers,
    )


def fitted(asked: Shape, shape: Shape) -> dict[str, int]:
    """Return the parameters whose values in force are smaller than the defaults would be."""
    names = ("slots", "ctx-size", "batch-size", "n-gpu-layers")
    fields = {name: name.replace("-", "_") for name in names}
    return {
        key: getattr(shape, field)
        for key, field in fields.items()
        if getattr(shape, field) != getattr(asked, field)
    }
