"""The estimated starts of waiting tasks, compared with their actual starts."""

from __future__ import annotations

import pytest

from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Priority
from inferd.scheduler.waiting import POSITION_PAUSE_S, POSITIONS_AT_ONCE
from tests.scheduler.doubles import Bench
from tests.scheduler.engine.test_reserved_quanta import LOWER, Endless

STEP_S = 0.05


def places(bench: Bench, number: int) -> list[m.Position]:
    return [r for r in bench.reports[number] if isinstance(r, m.Position)]


def entry(bench: Bench, number: int) -> m.QueueEntry:
    [found] = [e for e in bench.engine.tasks.view_queue().entries() if e.task_id == number]
    return found


@pytest.mark.parametrize("ended", [0, 5])
def test_a_low_task_behind_endless_urgent_ones_is_estimated_by_its_reserved_quantum(
    ended: int,
) -> None:
    """Whether turns ended before, from whose lengths the engine would expect early ends, or not."""
    bench = Bench(slots=4, ctx_size=1 << 16)
    for number in range(ended):
        bench.iterate(bench.submit(100 + number, "short"))
        while list(bench.engine.tasks):
            bench.now += STEP_S
            bench.iterate()
    for number in range(5):
        bench.iterate(bench.submit(number, str(number) * 20_000, priority=Priority.URGENT))
    bench.iterate(bench.submit(LOWER, "low", priority=Priority.LOW, n_predict=10))
    arrived = bench.now

    estimates = []
    while entry(bench, LOWER).position:
        starts_in_s = entry(bench, LOWER).starts_in_s
        assert starts_in_s is not None
        estimates.append((bench.now + starts_in_s, bench.now))
        bench.now += STEP_S
        bench.iterate()

    started_s = bench.now - arrived
    assert all(abs(at - bench.now) <= 2 * STEP_S for at, _ in estimates), (
        f"started after {started_s:.1f} s; first estimate {estimates[0][0] - arrived:.1f} s"
    )


def test_a_task_parked_by_hand_has_no_estimate() -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(1, "a long text"), bench.submit(2, "another"))
    bench.iterate(m.Park(7, 1))

    assert entry(bench, 1).starts_in_s is None
    assert entry(bench, 2).starts_in_s is not None or not entry(bench, 2).position


def test_a_parked_task_whose_reader_is_away_has_no_estimate() -> None:
    bench = Bench(slots=1, settings=EngineSettings(reader_lag_s=0.2))
    bench.iterate(bench.submit(1, "a long text", credit=1), bench.submit(2, "x" * 60))
    for _ in range(4):
        bench.now += 0.2
        bench.iterate()

    assert entry(bench, 1).state == "parked"
    assert entry(bench, 1).starts_in_s is None


def test_a_reported_position_has_an_estimate() -> None:
    endless = Endless(slots=1, count=3)
    endless.iterate(endless.bench.submit(LOWER, "low", priority=Priority.LOW, watch=True))
    [place] = places(endless.bench, LOWER)

    assert place.position == 3
    assert place.starts_in_s is not None


def test_places_beside_many_waiting_tasks_change_with_a_pause() -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(0, "x" * 1000))
    bench.iterate(*(bench.submit(n, str(n), watch=True) for n in range(1, 61)))
    [before] = places(bench, 60)
    bench.iterate(m.Cancel(30), bench.submit(61, "new", watch=True))
    assert places(bench, 60) == [before]
    [first] = places(bench, 61)
    assert first.starts_in_s is None  # an estimate of all starts takes longest

    due = bench.now + (before.waiting - POSITIONS_AT_ONCE) * POSITION_PAUSE_S
    assert due in bench.engine.tasks.deadlines()  # also if no step is to be computed
    bench.now = due
    bench.iterate()
    assert places(bench, 60)[1].position < before.position
    assert places(bench, 61)[1].starts_in_s is not None
