"""An engine on the echo model, driven iteration by iteration, with a clock that tests advance."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.echo.model import EchoModel
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.owner import Owner


def iterate_engine(engine: Engine, commands: Iterable[m.Command] = ()) -> list[m.Report]:
    """Do one iteration as a worker does, and return its reports. No grammar is still compiled."""
    reports = [*engine.begin_iteration(commands)]
    while engine.tokenizing.compiling.busy:
        assert select.select([engine.tokenizing.compiling.thread], [], [], 10)[0]
        reports += engine.begin_iteration(())
    reports += engine.compute_step()
    engine.end_iteration()
    return reports


class Bench:
    """One engine, its clock, and all its reports, by task."""

    def __init__(
        self,
        slots: int = 2,
        settings: EngineSettings | None = None,
        ctx_size: int = 256,
        batch_size: int = 64,
        options: EchoOptions | None = None,
        files: KvFiles | None = None,
    ):
        spec = ModelSpec(
            name="echo", backend="echo", slots=slots, ctx_size=ctx_size, batch_size=batch_size
        )
        self.now = 100.0
        self.model = EchoModel(spec, options or EchoOptions())
        self.engine = Engine(self.model, settings, lambda: self.now, files)
        self.engine.clock.cpu = lambda: 0.0  # or a pause would be charged as a slow token
        self.reports: dict[int, list[m.Report]] = {}
        self.on_report: Callable[[m.Report], None] = lambda _: None
        self.order: list[int] = []
        """Tasks in the order of their first admission."""

    def spec(self, number: int, text: str | bytes = "hello", **fields: object) -> m.TaskSpec:
        data = text.encode() if isinstance(text, str) else text
        tokens = self.model.tokenize(data, special=False, bos=True)
        values = {"owner": 1, "sampling": SamplingParams(), "speculation": "off", **fields}
        if isinstance(values["owner"], int):
            values["owner"] = Owner(values["owner"])
        return m.TaskSpec(id=number, tokens=m.pack_tokens(tokens), **values)  # type: ignore[arg-type]

    def submit(self, number: int, text: str | bytes = "hello", **fields: object) -> m.Submit:
        return m.Submit(self.spec(number, text, **fields))

    def iterate(self, *commands: m.Command) -> list[m.Report]:
        reports = iterate_engine(self.engine, commands)
        for report in reports:
            self.note(report)
        self.engine.tasks.check_integrity()
        return reports

    def note(self, report: m.Report) -> None:
        self.on_report(report)
        number = getattr(report, "task_id", None)
        if number is None:
            return
        self.reports.setdefault(number, []).append(report)
        if (
            isinstance(report, m.StateChanged)
            and report.state == "running"
            and number not in self.order
        ):
            self.order.append(number)

    def run(self, *commands: m.Command, iterations_max: int = 5000) -> None:
        """Iterate until there is nothing left to compute."""
        self.iterate(*commands)
        for _ in range(iterations_max):
            wait_s_max = self.engine.wait_s_max()
            if wait_s_max is None or wait_s_max > self.engine.tasks.settings.pull_batch_wait_s:
                return
            self.now += wait_s_max
            self.iterate()
        raise AssertionError(f"still running after {iterations_max} iterations")

    def text(self, number: int) -> bytes:
        reports = self.reports.get(number, [])
        return b"".join(r.text for r in reports if isinstance(r, (m.Tokens, m.Finished)))

    def tokens(self, number: int) -> list[int]:
        reports = self.reports.get(number, [])
        return [t for r in reports if isinstance(r, m.Tokens) for t in r.tokens]

    def end(self, number: int) -> m.Finished | m.Failed | None:
        reports = self.reports.get(number, [])
        return next((r for r in reports if isinstance(r, (m.Finished, m.Failed))), None)

    def stats(self, number: int) -> m.TurnStats:
        end = self.end(number)
        assert isinstance(end, m.Finished), end
        return end.stats

    def error(self, number: int) -> str:
        end = self.end(number)
        assert isinstance(end, m.Failed), end
        return str(end.error["name"])
