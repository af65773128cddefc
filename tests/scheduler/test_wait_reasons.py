"""The reasons for which tasks have no slot, decided alone and as an engine publishes them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from inferd.scheduler.owner import Priority
from inferd.scheduler.record import WRITTEN_S, WaitReason
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.waiting import wait_reason
from tests.scheduler.doubles import Bench
from tests.scheduler.policy.test_plan import SETTINGS, task


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, WaitReason.SLOT),
        ({"follows": True}, WaitReason.PREFIX),
        ({"preempted_by_kv_pressure": True}, WaitReason.CELLS),
        ({"fetching": True}, WaitReason.DISK),
        ({"preparing": True}, WaitReason.GRAMMAR),
        ({"items": {0: 4}, "media": {0: object()}}, WaitReason.ENCODING),
        ({"items": {0: 4}, "media": {0: object()}, "embeddings": {0: object()}}, WaitReason.SLOT),
        ({"items": {1: 4}, "media": {1: object()}}, WaitReason.SLOT),
        ({"items": {1: 4}, "media": {1: object()}, "covered": 2}, WaitReason.ENCODING),
        ({"reader_away_since": 1.0}, WaitReason.READER),
        ({"computed": 10}, WaitReason.READER),
        ({"computed": 10, "tokens_requested": 1}, WaitReason.SLOT),
        ({"yields_until": 500}, WaitReason.OPERATOR),
        ({"yields_until": 400}, WaitReason.SLOT),
    ],
)
def test_each_task_waits_for_one_reason(fields: dict[str, object], reason: WaitReason) -> None:
    waiting = task(1)
    waiting.spec = msgspec.structs.replace(waiting.spec, pull=True)
    for name, value in fields.items():
        setattr(waiting, name, value)
    assert wait_reason(waiting, SETTINGS, now=100.0, clock=400) is reason


def published(bench: Bench) -> dict[str, int]:
    """Return the waiting tasks by reason as the daemon reads them, without those that are 0."""
    gauges = bench.engine.metrics.page.read_gauges()
    found = {name.removeprefix("waiting_"): int(n) for name, n in gauges.items() if n}
    return {reason: found[reason] for reason in WaitReason if reason in found}


def test_an_engine_publishes_waiting_and_parked_tasks_by_reason() -> None:
    bench = Bench(slots=1, settings=replace(EngineSettings(), reader_lag_s=1.0))
    bench.iterate(bench.submit(1, "one " * 20, priority=Priority.LOW, credit=1))
    for _ in range(30):
        bench.iterate()
    bench.now += 2.0
    bench.iterate(bench.submit(2, "two " * 20), bench.submit(3, "three " * 20))
    bench.engine.metrics.publish()
    assert published(bench) == {"slot": 1, "reader": 1}
    bench.run()
    bench.engine.metrics.publish(at_once=True)
    assert published(bench) == {"reader": 1}


def test_a_reason_that_changes_without_a_step_is_published() -> None:
    """Else a task that waits while nothing is computed would keep the reason of the last step."""
    bench = Bench()
    bench.run(bench.submit(1))
    bench.engine.metrics.publish(at_once=True)
    assert bench.engine.metrics.publish() is None
    waiting = bench.engine.tasks.new_task(bench.spec(2))
    waiting.fetching = True
    bench.engine.tasks.queue.append(waiting)
    due_s = bench.engine.metrics.publish()
    assert due_s is not None and published(bench) == {}
    assert due_s == pytest.approx(WRITTEN_S)
    bench.engine.clock.now += due_s
    assert bench.engine.metrics.publish() is None and published(bench) == {"disk": 1}
