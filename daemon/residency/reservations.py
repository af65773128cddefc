"""Memory reserved for workers, and the free memory beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from ...backends import MemoryNeed
from ..workers.worker import Worker
from .machine import MachineMemory
from .plan import growth_refusal


@dataclass(slots=True)
class _Reservation:
    """The memory reserved for one worker."""

    need: MemoryNeed
    not_yet_resident: int | None = None
    """Its bytes that the machine still counts as free, because weights are pages of a file; None
    while the worker loads.
    """


class Reservations:
    """The reserved memory by worker. All models together have *limit* bytes; 0 stands for the
    machine's memory.

    Owned by the daemon's event loop; no method waits.
    """

    def __init__(self, limit: int, machine: MachineMemory):
        self.limit, self._machine = limit, machine
        self._by_worker: dict[Worker, _Reservation] = {}

    def reserve(self, worker: Worker, need: MemoryNeed) -> None:
        """Reserve *need* for a worker that may load now."""
        self._by_worker[worker] = _Reservation(need)

    def release(self, worker: Worker) -> None:
        """Release the memory of a worker that has exited."""
        self._by_worker.pop(worker, None)

    def note_loaded(self, worker: Worker) -> None:
        """Record that a worker has allocated its memory."""
        reservation = self._by_worker.get(worker)
        if reservation is not None:
            reservation.not_yet_resident = self._bytes_not_yet_resident(worker, reservation)

    def reserve_more(self, worker: Worker, size: int) -> None:
        """Reserve *size* more bytes for a loaded worker; see `add_bytes`.

        :raises OutOfMemory: too few bytes are free.
        """
        free = self.free_bytes()
        if size > free:
            raise growth_refusal(worker.spec.name, size, free, limit=self.limit)
        # No `await` up to here since the free bytes were read, or two workers could get them.
        self.add_bytes(worker, size)

    def add_bytes(self, worker: Worker, size: int) -> None:
        """Reserve *size* more bytes for a loaded worker, or fewer if *size* is negative. Call
        `note_loaded` once the worker has allocated or freed them.
        """
        reservation = self._by_worker.get(worker)
        if reservation is not None:  # otherwise it has exited
            weights = max(0, reservation.need.weights + size)
            reservation.need = msgspec.structs.replace(reservation.need, weights=weights)
            reservation.not_yet_resident = None

    def set_projector(self, worker: Worker, size: int) -> None:
        """Reserve *size* bytes for the encoder process of a loaded worker, which has measured them:
        they are allocated.
        """
        reservation = self._by_worker.get(worker)
        if reservation is not None:
            reservation.need = msgspec.structs.replace(reservation.need, projector=size)
            reservation.not_yet_resident = None
            self.note_loaded(worker)

    def add_embedding(self, worker: Worker) -> None:
        """Reserve the memory of a loaded worker's embedding context."""
        reservation = self._by_worker.get(worker)
        if reservation is not None:
            extra = reservation.need.embedding
            reservation.need = reservation.need.with_embedding()
            if reservation.not_yet_resident is not None:
                reservation.not_yet_resident += extra

    def of_worker(self, worker: Worker | None) -> MemoryNeed | None:
        """Return the reservation of a worker, or None if it has none."""
        reservation = self._by_worker.get(worker) if worker is not None else None
        return reservation.need if reservation is not None else None

    def free_bytes(self) -> int:
        """Return the bytes that are neither used nor reserved."""
        if self.limit:
            return self.limit - sum(r.need.total for r in self._by_worker.values())
        reservations = self._by_worker.items()
        return self._machine.free_bytes() - sum(
            self._bytes_not_yet_resident(worker, r) for worker, r in reservations
        )

    def machine_free_bytes(self) -> int:
        """Return the machine's free bytes; negative when memory is short.

        With a configured limit, memory that is reserved but not yet used counts as free.
        """
        return self._machine.free_bytes() if self.limit else self.free_bytes()

    def sizes_of_load(self, worker: Worker) -> tuple[MemoryNeed | None, int]:
        """Return the memory that a load needs, if it is known, and the bytes free for it now."""
        need, free = self.of_worker(worker), self._machine.free_bytes()
        if need is not None and self.limit:
            free = min(free, self.free_bytes() + need.total)
        return need, max(0, free)

    def unloading_workers(self) -> list[Worker]:
        """Return the workers that have memory and are unloading."""
        return [worker for worker in self._by_worker if worker.unloading]

    def unloading_bytes(self, device: str = "") -> int:
        """Return the bytes of the host or of *device* that unloading workers have."""
        return sum(bytes_on(self._by_worker[w].need, device) for w in self.unloading_workers())

    def loading_on_devices(self) -> Counter[str]:
        """Return the bytes by device that loads under way have reserved. Those of loaded workers
        are left out, since their devices no longer count them as free.
        """
        reserved: Counter[str] = Counter()
        for reservation in self._by_worker.values():
            if reservation.not_yet_resident is None:
                reserved.update(reservation.need.devices)
        return reserved

    def _bytes_not_yet_resident(self, worker: Worker, reservation: _Reservation) -> int:
        if reservation.not_yet_resident is not None:
            return reservation.not_yet_resident
        held = sum(map(self._machine.anonymous_bytes, worker.pids))
        return max(0, reservation.need.total - held)


def bytes_on(need: MemoryNeed, device: str) -> int:
    """Return the bytes of *need* on *device*, or on the host if that is empty."""
    return need.devices.get(device, 0) if device else need.total
