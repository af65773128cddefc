"""A task that is parked, resumed or gets credit while its sentence is compared."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from inferd.backends.params import StoppingParams
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from tests.scheduler.doubles import Bench

TEXT = "One. Two! Three. Four"
ENDS = {"One.": 4, "Two!": 9, "Three.": 16}
OTHER = "another text"
SIMILAR = StoppingParams(stop_similarity="anything")
PATIENT = EngineSettings(reader_lag_s=1000.0, ageing_tokens=100_000, quantum_tokens=100_000)
"""Tasks are parked only by hand."""


def requested(bench: Bench) -> list[m.SentenceEnded]:
    return [r for r in bench.reports.get(1, []) if isinstance(r, m.SentenceEnded)]


def begun(settings: EngineSettings = PATIENT, **fields: object) -> Bench:
    """Return a bench with one slot, whose task 1 waits for its first comparison."""
    bench = Bench(slots=1, settings=settings)
    bench.run(bench.submit(1, TEXT, stopping=SIMILAR, **fields))
    if fields.get("pull"):
        bench.run(*[m.PullToken(1)] * len("ne. "))
    assert [s.text for s in requested(bench)] == ["One."]
    return bench


def finished(bench: Bench, similar: str, *, pull: bool) -> None:
    """Answer all requests for comparisons until both tasks have ended."""
    for _ in range(100):
        if bench.end(1) is not None and bench.end(2) is not None:
            return
        last = requested(bench)[-1]
        assert ENDS[last.text] == last.end
        compared = m.SentenceCompared(1, last.end, "0.900" if last.text == similar else "")
        bench.run(compared, *([m.PullToken(1)] if pull else []))
    raise AssertionError(f"it never ended: {bench.reports}")


DEEDS = ("park", "comparison", "stale", "other")
ORDERS = [order for order in permutations(DEEDS) if order.index("other") < order.index("park")]


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("similar", ["", "One.", "Two!", "Three."])
def test_parking_around_a_comparison_does_not_change_the_answer(similar: str, pull: bool) -> None:
    """In each order of the events, each in its own iteration or with the previous one."""
    whole = TEXT[: ENDS[similar]] if similar else TEXT
    for order, together in product(ORDERS, product((False, True), repeat=len(DEEDS) - 1)):
        bench = begun(pull=pull)
        commands: dict[str, m.Command] = {
            "other": bench.submit(2, OTHER),
            "park": m.Park(7, 1),
            "comparison": m.SentenceCompared(1, 4, "0.900" if similar == "One." else ""),
            "stale": m.SentenceCompared(1, 3, "0.900"),
        }
        batch: list[m.Command] = []
        for deed, joined in zip(order, (False, *together), strict=True):
            if not joined:
                bench.iterate(*batch)
                batch = []
            batch.append(commands[deed])
        bench.run(*batch)
        finished(bench, similar, pull=pull)

        assert bench.text(1).decode() == whole, (order, together)
        assert bench.stats(1).stop_reason == ("similarity" if similar else "eos")
        compared = [s for s in ENDS if not similar or ENDS[s] <= ENDS[similar]]
        assert [s.text for s in requested(bench)] == compared, "each sentence once"
        assert bytes(bench.tokens(1)).startswith(whole.encode()), "no token twice"
        assert bench.text(2).decode() == OTHER


def test_a_parked_task_takes_no_slot_before_its_comparison() -> None:
    bench = begun()
    bench.iterate(bench.submit(2, OTHER))
    [answer] = [r for r in bench.iterate(m.Park(7, 1)) if isinstance(r, m.CommandResult)]
    assert answer.value is True
    bench.run()
    assert bench.text(2).decode() == OTHER and bench.end(1) is None
    steps = bench.engine.metrics.steps
    bench.run(m.Credit(1, 5), m.Park(8, 1))
    assert bench.engine.metrics.steps == steps and bench.text(1) == b"One."
    bench.run(m.SentenceCompared(1, 4))
    assert [s.text for s in requested(bench)] == ["One.", "Two!"]


def test_a_task_that_ends_while_parked_leaves_nothing_behind() -> None:
    bench = begun()
    bench.iterate(bench.submit(2, OTHER))
    bench.iterate(m.Park(7, 1))
    bench.iterate(m.SentenceCompared(1, 4, "0.900"))
    assert (bench.text(1), bench.stats(1).stop_reason) == (b"One.", "similarity")
    bench.run()
    bench.engine.tasks.check_integrity()
    assert bench.text(2).decode() == OTHER


@pytest.mark.parametrize("pull", [False, True])
def test_credit_during_a_check_does_not_keep_the_slot(pull: bool) -> None:
    """It waits for other tasks for as long as it would without credit."""
    bench = begun(EngineSettings(reader_lag_s=0.2), pull=pull, **({} if pull else {"credit": 100}))
    bench.iterate(bench.submit(2, OTHER))
    bench.now += 0.1
    bench.iterate(m.PullToken(1) if pull else m.Credit(1, 5))
    bench.now += 0.1
    bench.run()
    assert bench.text(2).decode() == OTHER
    bench.run(m.SentenceCompared(1, 4))
    assert bench.text(1).decode() == ("One. T" if pull else "One. Two!")
    assert bench.stats(2).parks == 0
