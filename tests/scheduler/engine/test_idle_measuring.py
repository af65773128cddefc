"""The measurement of settings by an engine: only without work, in slices, with one result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from inferd.backends import ModelSpec
from inferd.backends.echo.model import EchoModel
from inferd.backends.errors import OutOfMemory
from inferd.backends.tuning_choice import (
    PROBES,
    UNKNOWN_CPU,
    LoadTuning,
    Probe,
    ProbeRunner,
    Setting,
)
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import SLICE_S, Engine, IdleMeasuring
from inferd.scheduler.policy.tuning import SECONDS_MAX
from inferd.scheduler.record import PAGE_COUNTERS
from tests.scheduler.doubles import Bench

OFF, ON = Setting(False), Setting(True)


class Runner:
    """A runner on a fake clock. Each piece takes the seconds that `cost` returns."""

    def __init__(self, cost: Callable[[Probe, Setting], float]):
        self.probes: tuple[Probe, ...] = PROBES[:2]
        self.cost = cost
        self.now, self.pieces, self.closed, self.aborted = 0.0, 0, 0, False
        self.prepared: set[tuple[Probe, Setting]] = set()

    def advance(self, probe: Probe, setting: Setting) -> float | None:
        self.pieces += 1
        if (probe, setting) not in self.prepared:
            self.prepared.add((probe, setting))
            self.now += 0.001
            return None
        seconds = self.cost(probe, setting)
        self.now += seconds
        return None if self.aborted else seconds

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed += 1
        self.prepared.clear()


class Model(EchoModel):
    """An echo model with that runner."""

    def __init__(self, runner: Runner):
        tuning = LoadTuning(cpu=UNKNOWN_CPU)
        options = {"probe_ms": 1}
        super().__init__(ModelSpec(name="e", backend="echo", options=options, tuning=tuning))
        self.runner = runner

    def probe_runner(self) -> ProbeRunner:
        return self.runner


@contextmanager
def idle(_: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """A watch that notices no work."""
    yield lambda: False


@contextmanager
def busy(_: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """A watch that notices work at once."""
    yield lambda: True


def measuring_of(runner: Runner) -> IdleMeasuring:
    measuring = IdleMeasuring(Model(runner), {}, seconds=lambda: runner.now)
    measuring.switch(on=True)
    return measuring


def run_to_end(measuring: IdleMeasuring) -> m.Measured:
    while measuring.is_on:
        for report in measuring.run_slice(idle):
            assert isinstance(report, m.Measured)
            return report
    raise AssertionError("it ended without a report")


def test_slices_end_in_time_and_the_result_is_reported_once() -> None:
    runner = Runner(lambda _, s: 0.006 if s == ON else 0.01)
    measuring = measuring_of(runner)
    before = 0.0
    while measuring.is_on:
        reports = measuring.run_slice(idle)
        assert runner.now - before <= SLICE_S + 0.01
        before = runner.now
    (report,) = reports
    assert isinstance(report, m.Measured) and report.record is not None
    assert (report.record.chosen, report.record.ratios["decode-1"]) == (ON, 0.6)
    assert report.slices == measuring.slices > 1
    assert runner.closed == 1
    measuring.switch(on=True)
    assert not measuring.is_on


def test_a_stop_frees_the_contexts_and_keeps_the_samples() -> None:
    runner = Runner(lambda _, s: 0.006 if s == ON else 0.01)
    measuring = measuring_of(runner)
    measuring.run_slice(idle)
    pieces = runner.pieces
    measuring.switch(on=False)
    assert (runner.closed, measuring.is_on) == (0, False)
    measuring.free_memory()
    assert runner.closed == 1
    measuring.switch(on=True)
    assert run_to_end(measuring).record is not None
    whole = Runner(lambda _, s: 0.006 if s == ON else 0.01)
    run_to_end(measuring_of(whole))
    # Only the preparation is repeated.
    assert pieces < runner.pieces <= whole.pieces + 4


def test_work_ends_a_slice_before_its_next_piece() -> None:
    runner = Runner(lambda _p, _s: 0.001)
    measuring = measuring_of(runner)
    measuring.run_slice(idle)

    pieces = runner.pieces
    measuring.run_slice(busy)
    assert runner.pieces == pieces


def test_aborted_pieces_end_the_measurement_with_the_default() -> None:
    runner = Runner(lambda _p, _s: 0.04)
    runner.aborted = True
    report = run_to_end(measuring_of(runner))
    assert report.record is not None and report.record.chosen == OFF
    assert SECONDS_MAX <= report.seconds <= 2 * SECONDS_MAX + 1


def test_a_context_that_does_not_fit_ends_the_measurement_with_the_cause() -> None:
    def fail(_p: Probe, _s: Setting) -> float:
        raise OutOfMemory("no memory for a context")

    runner = Runner(fail)
    report = run_to_end(measuring_of(runner))
    assert (report.record, report.cause) == (None, "no memory for a context")
    assert runner.closed == 1


def test_a_model_without_probes_is_not_measured() -> None:
    runner = Runner(lambda _p, _s: 0.01)
    runner.probes = ()
    assert "no probe" in run_to_end(measuring_of(runner)).cause


@pytest.mark.parametrize("ends", ["waits", "runs", "off", "nothing"])
def test_an_engine_measures_only_without_work(ends: str) -> None:
    bench = Bench(slots=1)
    model = Model(Runner(lambda _p, _s: 0.01))
    bench.model, bench.engine = model, Engine(model, seconds=lambda: bench.now)
    bench.iterate(m.SetMeasuring(True))
    bench.now += 10.0
    bench.iterate()
    assert bench.engine.may_measure
    match ends:
        case "waits" | "runs":
            bench.iterate(
                *(bench.submit(n, credit=0) for n in ((1,) if ends == "runs" else (1, 2)))
            )
        case "off":
            bench.iterate(m.SetMeasuring(False))
    assert bench.engine.may_measure == (ends == "nothing")


def test_a_task_that_stops_a_measurement_does_not_wait_for_its_memory() -> None:
    bench = Bench(slots=1)
    runner = Runner(lambda _p, _s: 0.01)
    model = Model(runner)
    bench.model, bench.engine = model, Engine(model, seconds=lambda: bench.now)
    bench.iterate(m.SetMeasuring(True))
    bench.engine.measure(busy)
    bench.engine.begin_iteration([m.SetMeasuring(False), bench.submit(1)])
    reports = bench.engine.compute_step()
    assert reports and runner.closed == 0
    bench.engine.end_iteration()
    assert runner.closed == 1


def test_slices_are_counted_in_the_metrics() -> None:
    bench = Bench(slots=1)
    model = Model(Runner(lambda _p, _s: 0.01))
    bench.model, bench.engine = model, Engine(model, seconds=lambda: bench.now)
    bench.engine.metrics.publish(at_once=True)
    bench.iterate(m.SetMeasuring(True))
    bench.engine.measure(idle)
    bench.now += 10.0
    bench.iterate()
    bench.engine.metrics.publish()
    cells = bench.engine.metrics.page.read_counters()
    assert dict(zip(PAGE_COUNTERS, cells, strict=False))["tuning_slices"] == 1
