"""The measurement of a model's settings in short slices, while the engine has no work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from ...backends import InferdError, LanguageModel
from ...backends.errors import UnsupportedOperation
from ...backends.library import LLAMA_COMMIT
from ...backends.tuning_choice import ModelTuning, ProbeRunner, Sample, Setting, TuningRecord
from .. import messages as m
from ..policy.tuning import Measurement, Outcome

SLICE_S = 0.05
"""The time after which a slice begins no further piece."""
WorkWatch = Callable[[Callable[[], None]], AbstractContextManager[Callable[[], bool]]]
"""A context in which another thread calls the function as soon as the engine gets work. It yields a
function that returns whether this has happened.
"""


class IdleMeasuring:
    """Owned by the engine's thread. *counts* are the model's steps by probe, which grow; numbers of
    threads are compared on *cores*.
    """

    def __init__(
        self,
        model: LanguageModel,
        counts: Mapping[str, float],
        cores: int = 1,
        seconds: Callable[[], float] = time.perf_counter,
    ):
        self.is_on = False
        """Whether slices are to run while the engine has no work."""
        self.slices = 0
        self._model, self._counts, self._cores, self._clock = model, counts, cores, seconds
        self._has_ended = False
        self._runner: ProbeRunner | None = None
        self._measurement: Measurement | None = None

    def switch(self, *, on: bool) -> None:
        """Begin or continue the measurement, or stop it; samples are kept."""
        self.is_on = on and not self._has_ended

    def free_memory(self) -> None:
        """Free the contexts of the probes if the measurement is stopped. A task is usually the
        reason for that, so call this after its first step.
        """
        if not self.is_on:
            self.close()

    def run_slice(self, watch: WorkWatch) -> list[m.Report]:
        """Run probes for about `SLICE_S`, or until *watch* notices work; return the reports."""
        tuning = self._model.tuning
        assert tuning is not None, "the daemon measures only models with another setting"
        self.slices += 1
        try:
            runner, measurement = self._prepare(tuning)
            with watch(runner.abort) as has_work:
                self._run_pieces(runner, measurement, has_work)
        except InferdError as exc:
            return self._end(m.Measured(self.slices, 0.0, cause=exc.message))
        if measurement.outcome is None:
            return []
        record = record_of(tuning, measurement.outcome)
        return self._end(m.Measured(self.slices, round(measurement.spent_s, 3), record))

    def _prepare(self, tuning: ModelTuning) -> tuple[ProbeRunner, Measurement]:
        if self._runner is None:
            self._runner = self._model.probe_runner()
            if not self._runner.probes:
                raise UnsupportedOperation("no probe can run beside this model")
        if self._measurement is None:
            default = Setting(tuning.chosen.setting.flash_attn)
            cores = 1 if tuning.keeps_threads else self._cores
            self._measurement = Measurement(default, self._runner.probes, cores)
        return self._runner, self._measurement

    def _run_pieces(
        self, runner: ProbeRunner, measurement: Measurement, has_work: Callable[[], bool]
    ) -> None:
        begin = now = self._clock()
        while now < begin + SLICE_S and measurement.outcome is None and not has_work():
            probe, setting = measurement.next_run()
            seconds = runner.advance(probe, setting)
            before, now = now, self._clock()
            measurement.add_time(now - before)
            if seconds is not None:
                measurement.add_sample(Sample(setting, probe.name, seconds), self._counts)

    def _end(self, report: m.Measured) -> list[m.Report]:
        self._has_ended = True
        self.switch(on=False)
        self.free_memory()
        return [report]

    def close(self) -> None:
        """Free the contexts of the probes; call this before the model is closed."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


def record_of(tuning: ModelTuning, outcome: Outcome) -> TuningRecord:
    """Return the record of a measurement; the daemon adds the time."""
    return TuningRecord(
        shape=tuning.shape,
        cpu=tuning.cpu,
        build=LLAMA_COMMIT,
        chosen=outcome.chosen,
        reason=outcome.reason,
        ratios=outcome.ratios,
    )
