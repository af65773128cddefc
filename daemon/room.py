"""Room in memory: which loads may go on, who leaves for them, which are refused.

Lives on the daemon's event loop and never waits: a worker's reckoning is decided on when it comes,
in one step with noting what was promised; one that must wait for others to leave is looked at again
each time one has left. So two loads never get the same bytes, and none waits for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import structlog

from ..backends import MemoryNeed, Shape
from ..scheduler import messages as m
from .machine import MachineMemory
from .memory import (
    BATCH_SIZE_MIN,
    CTX_SIZE_MIN,
    DeviceShort,
    Idle,
    device_refusal,
    device_short,
    fewer_layers,
    refusal,
    smaller,
    victims,
)
from .workers import Worker

if TYPE_CHECKING:
    from .models import Model

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

    def __init__(self, model: Model, worker: Worker, asked: m.Reckoned, floor: Shape):
        self.model, self.worker = model, worker
        self.asked, self.report, self.floor = asked, asked, floor


class Room:
    """Gives memory to loads. *budget* bytes are for all models together; 0: what is free."""

    def __init__(
        self,
        budget: int,
        models: Callable[[], Iterable[Model]],
        machine: MachineMemory | None = None,
    ):
        self._budget = budget
        self._models = models
        self._machine = machine or MachineMemory()
        self._claims: dict[Worker, _Claim] = {}
        self._loads: dict[Worker, _Load] = {}
        self._waiting: list[Worker] = []

    def reckoned(self, model: Model, worker: Worker, report: m.Reckoned) -> None:
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

    def left(self, worker: Worker) -> None:
        """Look again at the loads that wait: a worker is gone."""
        self._claims.pop(worker, None)
        self._end(worker)
        for other in tuple(self._waiting):
            load = self._loads.get(other)
            if load is None or other.leaving:
                continue
            if load.report.devices:
                other.reckon(load.report.shape)  # what is free there now, its worker sees
            else:
                self._decide(load)

    def claimed(self, worker: Worker | None) -> MemoryNeed | None:
        """Return what a worker was promised."""
        claim = self._claims.get(worker) if worker is not None else None
        return claim.need if claim is not None else None

    # Decisions.

    def _decide(self, load: _Load) -> None:
        report, promised = load.report, self._promised_on_devices(load.worker)
        if (short := device_short(report.need, report.devices, promised)) is not None:
            self._make_room_on_device(load, short)
            return
        need, free = report.need.total, self.free_bytes()
        ahead = self._promised_ahead(load.worker)
        room = free + self._coming() - ahead
        if need <= min(free, room):
            self._grant(load)
        elif (leaving := victims(self._idle(), need - room)) is not None:
            self._wait(load)
            self._evict([i.name for i in leaving], for_model=load.model.name)
        elif (shape := smaller(load.report.shape, load.floor)) is not None:
            self._stop_waiting(load.worker)
            load.worker.reckon(shape)
        else:
            self._refuse(load, room + sum(i.need for i in self._idle()))

    def _make_room_on_device(self, load: _Load, short: DeviceShort) -> None:
        name = short.device.name
        leaving = victims(self._idle(name), short.missing - self._coming(name))
        if leaving is not None:
            self._wait(load)
            self._evict([i.name for i in leaving], for_model=load.model.name)
        elif (shape := fewer_layers(load.report.shape, load.floor, short)) is not None:
            self._stop_waiting(load.worker)
            load.worker.reckon(shape)
        else:
            self._end(load.worker)
            load.worker.refuse(device_refusal(load.model.name, load.report.shape, short))

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
        leaving = victims(self._idle(), 1)
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

    def _promised_on_devices(self, worker: Worker) -> Counter[str]:
        """Return the bytes of each device that loads under way will take, and those that wait and
        came before *worker*'s; what is loaded is not free on the device.
        """
        ahead = self._waiting
        if worker in ahead:
            ahead = ahead[: ahead.index(worker)]
        needs = [self._loads[w].report.need for w in ahead]
        needs += [c.need for c in self._claims.values() if c.unseen is None]
        promised: Counter[str] = Counter()
        for need in needs:
            promised.update(need.devices)
        return promised

    def _promised_ahead(self, worker: Worker) -> int:
        """Return what the loads need that wait and came before *worker*'s."""
        ahead = self._waiting
        if worker in ahead:
            ahead = ahead[: ahead.index(worker)]
        return sum(self._loads[w].report.need.total for w in ahead)

    def _idle(self, device: str = "") -> list[Idle]:
        """Return the models that may leave, with what comes back of the host's or a device's."""
        found = []
        for model in self._models():
            claim = self._claims.get(model.worker) if model.worker is not None else None
            if claim is not None and model.evictable:
                found.append(
                    Idle(model.name, _bytes_of(claim.need, device), model.load_s, model.idle_s)
                )
        return found

    def _grant(self, load: _Load) -> None:
        self._claims[load.worker] = _Claim(load.report.need)
        self._end(load.worker)
        asked, shape = load.asked.shape, load.report.shape
        load.model.fitted = fitted(asked, shape)
        if load.model.fitted:
            log.info("model.fitted", model=load.model.name, **load.model.fitted)
        load.worker.proceed()

    def _wait(self, load: _Load) -> None:
        if load.worker not in self._waiting:
            self._waiting.append(load.worker)

    def _evict(self, names: list[str], **why: str) -> None:
        for model in self._models():
            if model.name in names and model.worker is not None:
                log.info("model.evicted", model=model.name, **why)
                model.worker.quit()

    def _refuse(self, load: _Load, free: int) -> None:
        self._end(load.worker)
        holders = [
            (_told_name(model), self._claims[model.worker].need.total)
            for model in self._models()
            if model.worker in self._claims and not model.evictable and model.worker is not None
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


def _bytes_of(need: MemoryNeed, device: str) -> int:
    return need.devices.get(device, 0) if device else need.total


def _told_name(model: Model) -> str:
    """Return what anybody may hear of a model: descriptors' models are their user's alone."""
    return model.name if model.uid is None else "what another descriptor loaded"


def floor_of(model: Model, report: m.Reckoned) -> Shape:
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
