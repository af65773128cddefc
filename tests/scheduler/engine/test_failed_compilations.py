"""Exceptions that no code expects while a grammar is compiled end one turn, and are logged."""

from __future__ import annotations

import pytest

from inferd.backends import CompiledGrammar, ModelSpec, SamplingParams
from inferd.backends.echo.model import EchoModel
from inferd.backends.errors import BackendError, InferdError
from inferd.backends.grammars.trial import CheckRequest, GrammarChecker
from inferd.backends.library import LEVELS
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from tests.scheduler.doubles import Bench

SECRET = "a user's secret"


class Failing(EchoModel):
    """A model whose compiler of grammars raises *exc*."""

    def __init__(self, exc: Exception):
        super().__init__(ModelSpec(name="echo", backend="echo", slots=2, ctx_size=256))
        self.exc = exc

    def compile_grammar(self, params: SamplingParams, owner: int) -> CompiledGrammar | None:
        if params.has_grammar:
            raise self.exc
        return None


@pytest.mark.parametrize(
    ("exc", "error", "cause"),
    [
        (MemoryError(), "MissingMemory", "too little memory for compiling the grammar"),
        (ValueError(SECRET), "RuntimeError", "ValueError at test_failed_compilations.py"),
        (RecursionError(SECRET), "RuntimeError", "RecursionError at"),
        (BackendError("no process"), "RuntimeError", "no process"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_in_the_compiler_ends_one_turn(exc: Exception, error: str, cause: str) -> None:
    bench = Bench()
    bench.model = Failing(exc)
    bench.engine = Engine(bench.model, seconds=lambda: bench.now)
    events: list[m.LogEvent] = []
    bench.on_report = lambda r: events.append(r) if isinstance(r, m.LogEvent) else None
    levels = dict.fromkeys(("backends", "scheduler"), "info")
    sampling = SamplingParams(grammar='root ::= "a"')
    bench.run(
        m.Logging(levels, texts=False),
        bench.submit(1, "bad", sampling=sampling),
        bench.submit(2, "good", owner=2),
    )
    assert bench.error(1) == error and bench.text(2) == b"good"
    [failed] = [e for e in events if e.event == "grammar.failed"]
    assert failed.level == "error" and failed.fields["task"] == 1
    assert failed.fields["error"] == error and cause in str(failed.fields["cause"])
    end = bench.end(1)
    assert isinstance(end, m.Failed) and cause in end.error["message"] and end.error["hint"]
    assert SECRET not in f"{events} {end.error}"
    assert set(levels.values()) <= set(LEVELS)
    bench.run(bench.submit(3, "more"))
    assert bench.text(3) == b"more", "the engine goes on"


@pytest.mark.process
def test_an_exception_in_the_trial_process_has_its_type_and_place() -> None:
    checker = GrammarChecker()
    try:
        checker.check(CheckRequest(regex="a"))
        reply = checker._exchange(b"\xc1 no request")
        assert reply.failure.startswith("DecodeError at ") and " in " in reply.failure
        with pytest.raises(InferdError, match=r"^compiling the grammar failed: IndexError at tr"):
            checker.check(CheckRequest(gbnf="root ::= <[5]>", vocab_size=300, ends=(1000,)))
        assert checker._sandbox is None, "its process may be in any state"
        checker.check(CheckRequest(regex="a"))
    finally:
        checker.close()
