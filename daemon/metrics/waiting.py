"""The reasons for which turns wait: those of their engines, and of models that are not loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from ...scheduler.record import WaitReason
from ..models.model import ManagedModel

if TYPE_CHECKING:
    from ..core import Daemon


class ModelWait(StrEnum):
    """The reason for which a turn waits for its model."""

    LOAD = "load"
    MEMORY = "memory"
    """Its load waits until other models are evicted."""
    RESIDENCY = "residency"
    """It is loaded, and requests of another model come first."""


WAIT_REASONS = (*(reason.value for reason in WaitReason), *(wait.value for wait in ModelWait))


def reasons_in_engine(model: ManagedModel, count: int) -> Iterator[tuple[str, int]]:
    """Yield the reasons for which *count* turns of *model* wait, with their numbers. Turns that
    began to wait since the engine last published its metrics count as waiting for a slot.
    """
    worker = model.loaded
    if worker is None:
        yield ModelWait.LOAD.value, count
        return
    yield from split_by_reason(count, worker.metrics_page.read_gauges())


def split_by_reason(count: int, gauges: Mapping[str, float]) -> Iterator[tuple[str, int]]:
    """Yield how many of *count* turns wait for each reason in an engine's *gauges*. The others
    count as waiting for a slot.
    """
    for reason in WaitReason:
        if reason is not WaitReason.SLOT:
            number = min(count, int(gauges[f"waiting_{reason}"]))
            yield reason.value, number
            count -= number
    yield WaitReason.SLOT.value, count


def model_wait(daemon: Daemon, model: ManagedModel) -> ModelWait:
    """Return why requests wait for *model*."""
    if model.loaded is not None:
        return ModelWait.RESIDENCY
    worker = model.worker
    waits = worker is not None and daemon.registry.loader.waits_for_memory(worker)
    return ModelWait.MEMORY if waits else ModelWait.LOAD


def finishing_turns(daemon: Daemon) -> Counter[ManagedModel]:
    """Return by model the number of turns that end before it is unloaded or the daemon stops: those
    of the old models of swaps, or all while the daemon drains.
    """
    found: Counter[ManagedModel] = Counter()
    for model in daemon.registry.catalog.known():
        for old in (model,) if daemon.draining else model.predecessors.values():
            tasks = () if old.worker is None else old.worker.client.tasks
            found[model] += len(tasks) + len(old.recovery)
    return +found
