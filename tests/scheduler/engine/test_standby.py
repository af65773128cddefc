"""The thread that takes the engine's turn while the engine's thread computes for long."""

from __future__ import annotations

import gc
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from inferd.scheduler.engine.standby import Standby


class Turns:
    """Notes when the standby has the turn."""

    def __init__(self) -> None:
        self.begun, self.steps = threading.Event(), 0
        self.standby = Standby(self._drive)
        self.standby.start()

    def _drive(self, ended: int, has_ended: Callable[[], bool], turn: threading.Lock) -> None:
        while not has_ended():
            with turn:
                self.steps += 1
                self.begun.set()
            select.select([ended], [], [])


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns()
    yield made
    made.standby.close()


def test_short_calls_keep_the_turn(turns: Turns) -> None:
    results = [turns.standby.make_call(lambda number=number: number) for number in range(1000)]  # type: ignore[misc]
    assert [result.outcome for result in results] == list(range(1000))
    assert turns.steps <= turns.standby.takeovers, "of those that a busy machine made long"


def test_the_standby_has_the_turn_until_a_long_call_ends(turns: Turns) -> None:
    for number in range(1, 4):
        turns.begun.clear()
        result = turns.standby.make_call(lambda: turns.begun.wait(60))
        assert result.outcome is True and result.seconds > 0
        assert turns.standby.takeovers == turns.steps == number


def test_an_exception_is_the_outcome(turns: Turns) -> None:
    assert isinstance(turns.standby.make_call(lambda: 1 // 0).outcome, ZeroDivisionError)
    assert turns.standby.make_call(lambda: 1).outcome == 1


@pytest.mark.parametrize("is_raised", [False, True])
def test_an_exception_keeps_nothing_once_it_is_dropped(turns: Turns, *, is_raised: bool) -> None:
    class Inputs:
        pass

    def fail(given: Inputs) -> list[Exception]:
        try:
            raise ValueError(given)
        except ValueError as exc:
            if is_raised:
                raise KeyError from None  # it has the other one as its context
            return [exc]  # of one of several requests

    inputs = Inputs()
    alive = weakref.ref(inputs)
    gc.disable()
    try:
        turns.standby.make_call(partial(fail, inputs))
        del inputs
        assert alive() is None
    finally:
        gc.enable()


def test_a_standby_that_rests_watches_the_next_call(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.scheduler.engine.standby.CHECKS_MAX", 1)
    turns.standby.make_call(lambda: None)
    while not turns.standby.is_resting:
        turns.begun.wait(0.01)
    assert turns.standby.make_call(lambda: turns.begun.wait(60)).outcome is True
