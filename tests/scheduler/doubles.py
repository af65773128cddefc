"""An engine on the echo model, driven turn by turn, with a clock that stands still until told."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.echo.model import EchoModel
from inferd.backends.echo.options import EchoOptions
from inferd.scheduler import Limits
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.kv.files import KvFiles


class Bench:
    """One engine, its clock, and everything that it has told, by task."""

    def __init__(
        self,
        slots: int = 2,
        limits: Limits | None = None,
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
        self.engine = Engine(self.model, limits, lambda: self.now, files)
        self.reports: dict[int, list[m.Report]] = {}
        self.on_report: Callable[[m.Report], None] = lambda _: None
        self.order: list[int] = []
        """Tasks in the order in which they were first admitted."""

    def spec(self, number: int, text: str | bytes = "hello", **fields: object) -> m.TaskSpec:
        data = text.encode() if isinstance(text, str) else text
        tokens = self.model.tokenize(data, special=False, bos=True)
        values = {"owner": 1, "sampling": SamplingParams(), **fields}
        return m.TaskSpec(id=number, tokens=m.pack_tokens(tokens), **values)  # type: ignore[arg-type]

    def submit(self, number: int, text: str | bytes = "hello", **fields: object) -> m.Submit:
        return m.Submit(self.spec(number, text, **fields))

    def turn(self, *commands: m.Command) -> list[m.Report]:
        reports = self.engine.iterate(commands)
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
        if isinstance(report, m.Moved) and report.state == "running" and number not in self.order:
            self.order.append(number)

    def run(self, *commands: m.Command, turns_max: int = 5000) -> None:
        """Turn until nothing is left to compute."""
        self.turn(*commands)
        for _ in range(turns_max):
            patience = self.engine.patience()
            if patience is None or patience > self.engine.tasks.limits.pull_linger_s:
                return
            self.now += patience
            self.turn()
        raise AssertionError(f"still running after {turns_max} turns: {self.engine}")

    def text(self, number: int) -> bytes:
        told = self.reports.get(number, [])
        return b"".join(r.text for r in told if isinstance(r, (m.Tokens, m.Finished)))

    def tokens(self, number: int) -> list[int]:
        told = self.reports.get(number, [])
        return [t for r in told if isinstance(r, m.Tokens) for t in r.tokens]

    def end(self, number: int) -> m.Finished | m.Failed | None:
        told: Iterable[m.Report] = self.reports.get(number, [])
        return next((r for r in told if isinstance(r, (m.Finished, m.Failed))), None)

    def stats(self, number: int) -> m.TurnStats:
        end = self.end(number)
        assert isinstance(end, m.Finished), end
        return end.stats

    def error(self, number: int) -> str:
        end = self.end(number)
        assert isinstance(end, m.Failed), end
        return str(end.error["name"])
