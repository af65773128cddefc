"""Room in memory: which loads may go on, who leaves for them, which are refused.

Lives on the daemon's event loop and never waits: a worker's reckoning is decided on when it comes,
in one step with noting what was promised; one that must wait for others to leave is looked at again
each time one has left. So two loads never get the same bytes, and none waits for nothing. They come
in the order of their models' visits (`stay`); models leave for them whose stay is over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from ..backends import MemoryNeed, Shape
from ..scheduler import messages as m
from .memory import (
    BATCH_SIZE_MIN,
    CTX_SIZE_MIN,
    Idle,
    available_bytes,
    cgroup_free_bytes,
    cgroup_of,
    refusal,
    smaller,
    victims,
)
from .stay import Visit
from .workers import Worker

if TYPE_CHECKING:
    from .models import Model

__all__ = ("MachineMemory", "Room", "floor_of")

log = structlog.get_logger()


class MachineMemory:
    """What the machine and this process's cgroups have free; read anew each time."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        self._proc, self._cgroups = proc, cgroups

    def free_bytes(self) -> int:
        """Return the bytes that models may take now."""
        free = available_bytes((self._proc / "meminfo").read_text())
        limited = cgroup_free_bytes(self._cgroups, cgroup_of(self._read("self/cgroup")))
        return free if limited is None else min(free, limited)

    def anonymous_bytes(self, pid: int) -> int:
        """Return the memory of a process that free memory does not count any more."""
        fields = self._read(f"{pid}/statm").split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if fields else 0

    def _read(self, path: str) -> str:
        try:
            return (self._proc / path).read_text()
        except OSError:
            return ""


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
        seconds: Callable[[], float] = time.monotonic,
    ):
        self._budget = budget
        self._models = models
        self._machine = machine or MachineMemory()
        self._seconds = seconds
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
        """Note that a worker is gone."""
        self._claims.pop(worker, None)
        self._end(worker)

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
            leaving = victims(self._holders(load, now), self._missing(load, now))
            names = {holder.name for holder in leaving or ()}
            return first, {model for model in self._models() if model.name in names}
        return None, set()

    def look(self, now: float) -> None:
        """Decide again on the loads that wait."""
        for load in self._in_order(now):
            if load.worker in self._waiting and not load.worker.leaving:
                self._decide(load)

    def claimed(self, worker: Worker | None) -> MemoryNeed | None:
        """Return what a worker was promised."""
        claim = self._claims.get(worker) if worker is not None else None
        return claim.need if claim is not None else None

    # Decisions.

    def _decide(self, load: _Load) -> None:
        now, need, free = self._seconds(), load.report.need.total, self.free_bytes()
        holders = self._holders(load, now)
        held = sum(holder.need for holder in holders)
        whole = free + self._coming() + held + self._loading(load)
        leaving = victims(holders, self._missing(load, now))
        if need <= free and need <= whole - self._promised_ahead(load, now):
            self._grant(load)
        elif not load.model.awaited:
            self._end(load.worker)
            load.worker.quit()
        elif leaving is not None or (load.model.stay.wanted and need <= whole):
            self._wait(load)
            if leaving and not any(holder.busy for holder in leaving):
                self._evict([holder.name for holder in leaving], load.model.name)
        elif (shape := smaller(load.report.shape, load.floor)) is not None:
            self._stop_waiting(load.worker)
            load.worker.reckon(shape)
        else:
            self._refuse(load, whole)

    def _missing(self, load: _Load, now: float) -> int:
        """Return the bytes that are missing when those have left that are about to, and those have
        loaded that come first.
        """
        room = self.free_bytes() + self._coming() - self._promised_ahead(load, now)
        return load.report.need.total - room

    def free_bytes(self) -> int:
        """Return the bytes that nobody has and nobody was promised."""
        if self._budget:
            return self._budget - sum(c.need.total for c in self._claims.values())
        unseen = sum(self._unseen(worker, claim) for worker, claim in self._claims.items())
        return self._machine.free_bytes() - unseen

    def _unseen(self, worker: Worker, claim: _Claim) -> int:
        if claim.unseen is not None:
            return claim.unseen
        return max(0, claim.need.total - self._machine.anonymous_bytes(worker.pid))

    def _coming(self) -> int:
        """Return the bytes of workers that are about to end."""
        return sum(c.need.total for w, c in self._claims.items() if w.leaving)

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

    def _promised_ahead(self, load: _Load, now: float) -> int:
        """Return what the loads need that wait and come before *load*."""
        ahead = self._in_order(now)
        if load in ahead:
            ahead = ahead[: ahead.index(load)]
        else:
            rank = load.model.stay.rank(now)
            ahead = [other for other in ahead if other.model.stay.rank(now) <= rank]
        return sum(other.report.need.total for other in ahead)

    def _holders(self, load: _Load, now: float) -> list[Idle]:
        """Return the models that may leave for a load, now or when their stay is over. For one that
        nobody waits for (a swap's), only those leave that nobody holds.
        """
        visit, found = load.model.stay.first(now), []
        for model in self._models():
            claim = self._claims.get(model.worker) if model.worker is not None else None
            if claim is None or model.loaded is None or model.pinned:
                continue
            busy = not model.stay.over(visit, now)
            if load.model.stay.wanted or not (busy or model.busy):
                unused_s = max(0.0, now - model.used_at)
                need, began = claim.need.total, model.stay.began
                found.append(Idle(model.name, need, model.load_s, unused_s, busy, began))
        return found

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

    def _evict(self, names: list[str], for_model: str) -> None:
        for model in self._models():
            if model.name in names and model.worker is not None:
                log.info("model.evicted", model=model.name, for_model=for_model)
                model.make_way()

    def _refuse(self, load: _Load, free: int) -> None:
        self._end(load.worker)
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
    )


def fitted(asked: Shape, shape: Shape) -> dict[str, int]:
    """Return the parameters whose values in force are smaller than the defaults would be."""
    names = {"slots": "slots", "ctx-size": "ctx_size", "batch-size": "batch_size"}
    return {
        key: getattr(shape, field)
        for key, field in names.items()
        if getattr(shape, field) != getattr(asked, field)
    }
