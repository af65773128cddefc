"""Tasks parked by hand: which tasks get their slots, and when they resume."""

from __future__ import annotations

from inferd.backends import EmbedSpec
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Priority
from tests.scheduler.doubles import Bench

LONG, SHORT = "a long text " * 8, "short"


def bench_of(slots: int = 1, ageing: int = 100_000, quantum: int = 100_000) -> Bench:
    return Bench(slots=slots, settings=EngineSettings(ageing_tokens=ageing, quantum_tokens=quantum))


def park(bench: Bench, number: int) -> bool:
    """Park a task; return whether it gives way."""
    [answer] = [r for r in bench.iterate(m.Park(7, number)) if isinstance(r, m.CommandResult)]
    assert answer.id == 7 and isinstance(answer.value, bool)
    return answer.value


def moves(bench: Bench) -> list[tuple[int, str]]:
    """Return the states of the tasks from now on, and their ends, in order."""
    seen: list[tuple[int, str]] = []

    def see(report: m.Report) -> None:
        if isinstance(report, m.StateChanged):
            seen.append((report.task_id, report.state))
        elif isinstance(report, m.Finished | m.Failed):
            seen.append((report.task_id, "ended"))

    bench.on_report = see
    return seen


def test_a_parked_task_yields_its_slot_and_continues_where_it_was() -> None:
    bench = bench_of()
    seen = moves(bench)
    bench.iterate(bench.submit(1, LONG), bench.submit(2, SHORT))
    for _ in range(20):
        bench.iterate()
    assert park(bench, 1)
    bench.run()

    assert seen == [
        (1, "running"), (1, "parked"), (2, "running"), (2, "ended"), (1, "running"), (1, "ended"),
    ]  # fmt: skip
    assert [bench.text(n).decode() for n in (1, 2)] == [LONG, SHORT]
    assert bench.stats(1).parks == 1


def test_its_class_does_not_reclaim_a_slot_while_others_wait() -> None:
    bench = bench_of()
    seen = moves(bench)
    bench.iterate(
        bench.submit(1, LONG, priority=Priority.URGENT), *(bench.submit(n, SHORT) for n in (2, 3))
    )
    assert park(bench, 1)
    bench.run()

    ended = [number for number, state in seen if state == "ended"]
    assert ended == [2, 3, 1]
    assert seen.count((1, "running")) == 2, "once before it was parked, once when all others ended"


def test_it_gets_a_free_slot_that_no_task_waits_for() -> None:
    bench = bench_of(slots=2)
    bench.iterate(*(bench.submit(n, LONG) for n in (1, 2)), bench.submit(3, SHORT))
    assert park(bench, 1)
    seen = moves(bench)
    bench.run()

    assert seen.index((1, "running")) == seen.index((3, "ended")) + 1
    assert seen.index((1, "running")) < seen.index((2, "ended"))


def test_it_keeps_a_slot_that_no_task_waits_for() -> None:
    bench = bench_of()
    bench.iterate(bench.submit(1, LONG))
    assert not park(bench, 1)
    assert bench.engine.slots.tasks, "it continues"
    assert not park(bench, 99), "the task does not exist"
    bench.run()
    assert bench.text(1).decode() == LONG and bench.stats(1).parks == 0


def test_tasks_parked_by_hand_do_not_yield_to_each_other() -> None:
    bench = bench_of()
    bench.iterate(bench.submit(1, LONG), bench.submit(2, LONG))
    assert park(bench, 1)
    assert not park(bench, 2), "only the parked task waits"
    bench.run()
    assert [bench.text(n).decode() for n in (1, 2)] == [LONG, LONG]


def test_a_waiting_task_goes_behind_the_others_and_its_place_is_reported() -> None:
    bench = bench_of()
    bench.iterate(*(bench.submit(n, SHORT) for n in (1, 2, 3)))
    assert park(bench, 2)
    [answer] = [r for r in bench.iterate(m.Queue(8)) if isinstance(r, m.CommandResult)]
    assert {e.task_id: e.position for e in answer.value} == {1: 0, 3: 1, 2: 2}
    bench.run()
    assert bench.order == [1, 3, 2]


def test_it_waits_at_most_until_it_has_aged_by_a_class() -> None:
    """After `ageing_tokens` for others it is in the order again, one class higher."""
    bench = bench_of(ageing=60, quantum=8)
    bench.iterate(bench.submit(1, LONG), bench.submit(2, LONG))
    seen = moves(bench)
    assert park(bench, 1)
    parked_at = bench.engine.clock.tokens
    while (1, "running") not in seen:
        bench.iterate()
        assert not isinstance(bench.end(2), m.Finished), "it waited until the other task ended"
    assert 60 <= bench.engine.clock.tokens - parked_at < 90
    bench.run()
    assert [bench.text(n).decode() for n in (1, 2)] == [LONG, LONG]


def test_back_in_a_slot_it_is_treated_like_any_other() -> None:
    bench = bench_of()
    seen = moves(bench)
    bench.iterate(bench.submit(1, LONG), bench.submit(2, SHORT))
    assert park(bench, 1)
    while seen.count((1, "running")) < 2:
        bench.iterate()
    bench.run(bench.submit(3, SHORT, priority=Priority.URGENT), bench.submit(4, SHORT))
    assert [number for number, state in seen if state == "ended"] == [2, 3, 1, 4]


def test_a_task_whose_state_does_not_fit_keeps_its_slot() -> None:
    bench = Bench(slots=1, settings=EngineSettings(kv_ram_bytes=1))
    bench.iterate(bench.submit(1, LONG), bench.submit(2, SHORT))
    assert not park(bench, 1)
    assert [t.spec.id for t in bench.engine.slots.tasks] == [1]


def test_embeddings_cannot_be_parked() -> None:
    bench = bench_of()
    bench.iterate(bench.submit(1, LONG), bench.submit(2, SHORT), m.Submit(embedding(bench)))
    assert not park(bench, 3)


def embedding(bench: Bench) -> m.TaskSpec:
    return bench.spec(3, LONG, embed=EmbedSpec())
