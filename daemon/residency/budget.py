"""The memory budget: decisions on loads, and on evictions for them.

Lives on the daemon's event loop and never waits. It decides on a load when the worker's estimate
arrives. A load that waits for evictions is decided on again whenever a worker has exited. It gets
its memory together with a place in the `LoadQueue`, so that no paused load holds memory. Loads are
served in the order of their models' requests. A model is evicted once `Residency.may_be_evicted`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import structlog

from ...backends import MemoryNeed
from ...scheduler.messages import EstimateMemory, MemoryEstimate, Proceed
from ..workers.worker import Worker
from .eviction import EvictionCandidate, choose_victims
from .fit import (
    DeviceShortage,
    device_refusal,
    find_device_shortage,
    growth_refusal,
    memory_refusal,
    reduced_parameters,
    smaller_shape,
)
from .load_queue import LoadQueue
from .machine import MachineMemory
from .reservations import PendingLoad, PendingLoads, Reservations, bytes_on
from .residency import ResidencyRequest, ResidentModel

log = structlog.get_logger()


class MemoryBudget:
    """Reserves memory for loads. All models together have *limit* bytes; 0 stands for the machine's
    memory.

    A decision and the reservation that records it happen in one step of the event loop. An `await`
    between them would give the same bytes to two loads, so every method is synchronous, which a
    test checks.
    """

    def __init__(
        self,
        limit: int,
        models: Callable[[], Iterable[ResidentModel]],
        places: LoadQueue,
        machine: MachineMemory | None = None,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self._models, self._places, self._seconds = models, places, seconds
        self.reservations = Reservations(limit, machine)
        self.loads = PendingLoads(places.is_paused)

    def decide_load(self, model: ResidentModel, worker: Worker, report: MemoryEstimate) -> None:
        """Decide on a load: it proceeds, shrinks, waits, or is refused."""
        if not worker.unloading:
            self._decide(self.loads.note_report(model, worker, report))

    def reserve_embedding(self, model: ResidentModel, worker: Worker) -> list[Worker]:
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

    def reserve_more(self, worker: Worker, size: int) -> None:
        """Reserve *size* more bytes for a loaded worker; see `Reservations.add_bytes`.

        :raises OutOfMemory: too few bytes are free.
        """
        free = self.reservations.free_bytes()
        if size > free:
            limit = self.reservations.limit
            raise growth_refusal(worker.spec.name, size, free, limit=limit)
        # No `await` up to here since the free bytes were read, or two workers could get them.
        self.reservations.add_bytes(worker, size)

    def note_exited(self, worker: Worker) -> None:
        """Release all memory of a worker that has exited."""
        self.reservations.release(worker)
        self.loads.remove(worker)
        self.loads.mark_outdated()

    def next_request(self, now: float) -> tuple[ResidencyRequest | None, set[str]]:
        """Return the next request to get memory, and the names of the models to evict for it."""
        for load in self.loads.in_order(now):
            first = load.model.residency.first_request(now)
            if first is not None:
                return first, {victim.name for victim in self._victims(load, now) or ()}
        return None, set()

    def retry_waiting_loads(self, now: float) -> None:
        """Decide again on the waiting loads."""
        for load in self.loads.in_order(now):
            if not load.is_waiting or load.worker.unloading:
                continue
            if load.outdated:
                load.outdated = False
                # Devices may have more free memory.
                load.worker.client.send_command(EstimateMemory(load.report.shape))
            else:
                self._decide(load)

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

    def _decide(self, load: PendingLoad) -> None:
        if load.shrinks:
            load.shrinks -= 1
            shape = smaller_shape(load.report.shape, load.floor)
            if shape is not None:
                load.worker.client.send_command(EstimateMemory(shape))
                return
        model, now, need = load.model, self._seconds(), load.report.need.total
        free, ahead = self.reservations.free_bytes(), self._bytes_ahead(load, now)
        obtainable, shortage = self._obtainable_bytes(load, now), self._shortage(load, now)
        victims = self._victims(load, now)
        fits = shortage is None and need <= obtainable
        if fits and need <= free and need <= obtainable - ahead:
            # No `await` up to here since the free bytes were read, or two loads could get them.
            if self._places.claim_place(load.worker):
                self._grant(load)
            else:
                load.is_waiting = True
        elif not model.load_waiters:
            self.loads.remove(load.worker)
            load.worker.quit()
        elif victims is not None or (model.residency.is_wanted and fits):
            if not load.is_waiting:
                load.is_waiting = True
                log.info("model.waiting", model=model.name, bytes=need)
            self._places.suspend(load.worker)
            if victims and not any(victim.is_engaged or victim.just_used for victim in victims):
                self._evict(victims, for_model=model.name)
        elif (shape := smaller_shape(load.report.shape, load.floor, shortage)) is not None:
            load.is_waiting = False
            load.worker.client.send_command(EstimateMemory(shape))
        elif load.worker.client.embeds:
            self._leave_out_embeddings(load)
        else:
            self._refuse(load, shortage, obtainable)

    def _leave_out_embeddings(self, load: PendingLoad) -> None:
        """Begin a load again without the memory for embeddings, which fit in no shape beside text:
        a load that text alone would have does not fail because of them.
        """
        worker = load.worker
        load.model.embeds = worker.client.embeds = load.is_waiting = False
        worker.has_no_room_for_embeddings = True
        worker.client.send_command(EstimateMemory(load.first_shape))

    def _shortage(self, load: PendingLoad, now: float) -> DeviceShortage | None:
        """Return a device that lacks memory for a load and the loads ahead of it, if any."""
        reserved: Counter[str] = self.reservations.loading_on_devices()
        for other in self.loads.ahead_of(load, now):
            reserved.update(other.report.need.devices)
        return find_device_shortage(load.report.need, load.report.devices, reserved)

    def _victims(self, load: PendingLoad, now: float) -> list[EvictionCandidate] | None:
        """Return the models to evict for a load, for a device that lacks memory or for the host;
        None if all models that may be evicted are not enough.
        """
        shortage = self._shortage(load, now)
        if shortage is not None:
            device = shortage.device.name
            missing = shortage.missing - self.reservations.unloading_bytes(device)
            return choose_victims(self._candidates(load, now, device), missing)
        free = self.reservations.free_bytes() + self.reservations.unloading_bytes()
        missing = load.report.need.total - (free - self._bytes_ahead(load, now))
        return choose_victims(self._candidates(load, now), missing)

    def _obtainable_bytes(self, load: PendingLoad, now: float) -> int:
        """Return the bytes of the host that a load can have at most: those that are free, those of
        unloading workers, those of all models that may be evicted for it, and those of models that
        are still being loaded.
        """
        held = sum(candidate.need for candidate in self._candidates(load, now))
        free = self.reservations.free_bytes() + self.reservations.unloading_bytes()
        return free + held + self._loading_bytes(load)

    def _loading_bytes(self, load: PendingLoad) -> int:
        """Return the bytes of models that are being loaded, as these may be evicted after they have
        served a request.
        """
        if not load.model.residency.is_wanted:
            return 0
        return sum(
            need.total
            for model in self._models()
            if (need := self.reservations.of_worker(model.worker)) is not None
            and model.worker is not None
            and model.loaded is None
            and not (model.worker.unloading or model.pinned)
        )

    def _bytes_ahead(self, load: PendingLoad, now: float) -> int:
        return sum(other.report.need.total for other in self.loads.ahead_of(load, now))

    def _candidates(
        self, load: PendingLoad, now: float, device: str = ""
    ) -> list[EvictionCandidate]:
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

    def _evictable(self) -> Iterator[tuple[ResidentModel, MemoryNeed]]:
        """Yield the models that are loaded and not pinned, with their reservations."""
        for model in self._models():
            need = self.reservations.of_worker(model.worker)
            if need is not None and model.loaded is not None and not model.pinned:
                yield model, need

    def _grant(self, load: PendingLoad) -> None:
        model, shape = load.model, load.report.shape
        self.reservations.reserve(load.worker, load.report.need)
        self.loads.remove(load.worker)
        model.residency.begin_residency(self._seconds(), shape.slots)
        model.fitted = reduced_parameters(load.first_shape, shape)
        if model.fitted:
            log.info("model.fitted", model=model.name, **model.fitted)
        load.worker.client.send_command(Proceed())

    def _evict(self, victims: Iterable[EvictionCandidate], **reason: str) -> None:
        names = {victim.name for victim in victims}
        for model in self._models():
            if model.name in names and model.worker is not None:
                log.info("model.evicted", model=model.name, **reason)
                model.evict()

    def _refuse(self, load: PendingLoad, shortage: DeviceShortage | None, free: int) -> None:
        self.loads.remove(load.worker)
        name, need, shape = load.model.name, load.report.need, load.report.shape
        if shortage is not None:
            error = device_refusal(name, shape, shortage)
        else:
            pinned = [
                # A model loaded by descriptor belongs to its user; others must not see its name.
                (m.name if m.uid is None else "a model loaded from another descriptor", held.total)
                for m in self._models()
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


def _candidate(
    model: ResidentModel, size: int, now: float, engaged: bool = False, just_used: bool = False
) -> EvictionCandidate:
    idle_s, loaded_at = max(0.0, now - model.used_at), model.residency.loaded_at
    return EvictionCandidate(model.name, size, model.load_s, idle_s, engaged, just_used, loaded_at)
