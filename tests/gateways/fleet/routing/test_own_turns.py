"""Turns of the entry itself, beside those in a node's reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.gateways.fleet.routing.loads import (
    AGE_S_MAX,
    OPENED_S,
    ModelLoad,
    NodeLoad,
    OwnTurns,
    TurnKind,
)

NORMAL, URGENT = TurnKind("m", 1), TurnKind("m", 3)


def report(running: int = 0, waiting: int = 0, **others: int) -> NodeLoad:
    models = {"m": ModelLoad(running=(0, running, 0, 0), waiting=(0, 0, waiting, 0))}
    models |= {name: ModelLoad(running=(count, 0, 0, 0)) for name, count in others.items()}
    return NodeLoad(instance=1, models=models)


def test_a_turn_counts_until_a_report_has_it_and_its_end_until_the_next_one() -> None:
    turns = OwnTurns()
    turns.begin_turn("one", NORMAL, 1.0)
    assert turns.since_report(1.0) == {"m": (0, 1, 0, 0)}
    turns.note_report(report(running=0), 1.0 + AGE_S_MAX / 2)
    assert turns.since_report(1.1) == {"m": (0, 1, 0, 0)}, "the report is older than the turn"
    turns.note_report(report(running=1), 1.3)
    assert turns.since_report(1.3)["m"] == (0, 0, 0, 0)
    turns.end_turn("one", 1.3)
    assert turns.since_report(1.3)["m"] == (0, -1, 0, 0)
    turns.note_report(report(running=0), 1.4)
    assert turns.since_report(1.4) == {}


def test_a_report_that_was_under_way_when_a_turn_began_or_ended_is_read_by_its_counts() -> None:
    turns = OwnTurns()
    turns.begin_turn("one", NORMAL, 1.0)
    turns.note_report(report(waiting=1), 1.0 + AGE_S_MAX / 2)
    assert turns.since_report(1.1)["m"] == (0, 0, 0, 0), "the turn is in it"
    turns.end_turn("one", 2.0)
    turns.note_report(report(running=1, other=3), 2.0 + AGE_S_MAX / 2)
    assert turns.since_report(2.1)["m"] == (0, -1, 0, 0), "so is one that has ended since"
    turns.note_report(report(running=0), 2.0 + 0.6 * AGE_S_MAX)
    turns.note_report(report(running=1), 2.0 + 0.7 * AGE_S_MAX)
    assert turns.since_report(2.2) == {}, "a later turn is another entry's"
    turns.begin_turn("two", NORMAL, 3.0)
    turns.note_report(report(running=3), 3.0 + 2 * AGE_S_MAX)
    assert turns.since_report(3.5)["m"] == (0, 0, 0, 0), "the others are another entry's"


def test_a_context_counts_until_its_turn_begins_or_for_a_while() -> None:
    turns = OwnTurns()
    turns.note_opened("a", URGENT, 1.0)
    turns.note_opened("b", TurnKind("n", 0), 1.0)
    assert turns.since_report(1.1) == {"m": (0, 0, 0, 1), "n": (1, 0, 0, 0)}
    turns.drop_opened("a")
    turns.begin_turn("request", URGENT, 1.1)
    assert turns.since_report(1.1)["m"] == (0, 0, 0, 1)
    assert turns.since_report(1.0 + 2 * OPENED_S) == {"m": (0, 0, 0, 1)}
    turns.drop_opened("missing")
    turns.end_turn("missing", 1.1)


def test_a_context_that_is_being_opened_counts_until_that_has_ended() -> None:
    turns = OwnTurns()
    turns.note_opening("request", NORMAL)
    turns.note_report(report(), 1.0)
    assert turns.since_report(1.0 + 100 * OPENED_S) == {"m": (0, 1, 0, 0)}
    turns.drop_opened("request")
    assert turns.since_report(1.0 + 100 * OPENED_S) == {}


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "report"]), st.integers(0, 5))))
def test_with_every_report_the_sum_is_what_runs(steps: list[tuple[str, int]]) -> None:
    """The turns of a report that has exactly the own turns, and those since, are those that run."""
    turns, running, in_report, now = OwnTurns(), set[int](), 0, 0.0
    for step, key in steps:
        now += 2 * AGE_S_MAX
        if step == "begin":
            running.add(key)
            turns.begin_turn(key, NORMAL, now)
        elif step == "end":
            running.discard(key)
            turns.end_turn(key, now)
        else:
            in_report = len(running)
            turns.note_report(report(in_report), now)
        since = turns.since_report(now).get("m", (0, 0, 0, 0))
        assert in_report + since[1] == len(running)
