"""The thread that makes calls: order, results, their announcement, and the end."""

from __future__ import annotations

import gc
import queue
import select
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.scheduler.call_thread import CallThread
from tests.waiting import wait_until


@pytest.fixture
def thread() -> Iterator[CallThread]:
    thread = CallThread("calls")
    yield thread
    thread.close()


def outcomes(thread: CallThread, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += (result.outcome for result in thread.results(10))
    return found


def is_readable(thread: CallThread) -> bool:
    return bool(select.select([thread], [], [], 0)[0])


def test_calls_are_made_by_rank_and_then_in_order(thread: CallThread) -> None:
    gate = threading.Event()
    thread.queue_call(gate.wait)
    for number, rank in (1, 5), (2, 5), (3, 2):
        thread.queue_call(lambda number=number: number, rank)  # type: ignore[misc]
    gate.set()
    assert outcomes(thread, 4) == [True, 3, 1, 2]


def test_an_exception_is_the_outcome_of_its_call(thread: CallThread) -> None:
    thread.queue_call(lambda: 1 // 0)
    thread.queue_call(lambda: 1)
    error, one = outcomes(thread, 2)
    assert isinstance(error, ZeroDivisionError) and one == 1


class LateAnnouncements(queue.SimpleQueue[Any]):
    """A queue that lets the thread go on after a result once `gate` is open."""

    def __init__(self) -> None:
        self.put_in, self.gate = threading.Event(), threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.put_in.set()
        assert self.gate.wait(60)


def test_a_result_is_announced_exactly_while_it_is_there(thread: CallThread) -> None:
    """A descriptor that stays readable without a result would keep the engine from waiting."""
    thread._results = results = LateAnnouncements()
    thread.queue_call(lambda: 1)
    assert results.put_in.wait(60)
    assert thread.results() == [] and not is_readable(thread)
    results.gate.set()
    assert outcomes(thread, 1) == [1] and not is_readable(thread)
    assert thread.results() == []


def test_a_thread_holds_no_result_of_an_earlier_call(thread: CallThread) -> None:
    class Large:
        pass

    thread.queue_call(Large)
    [large] = outcomes(thread, 1)
    alive = weakref.ref(large)
    del large
    gc.collect()
    wait_until(lambda: alive() is None)  # the thread drops it after it has announced it


def test_closing_waits_for_the_present_call_and_drops_the_others() -> None:
    thread, gate, made = CallThread("calls"), threading.Event(), []
    begun = threading.Event()

    def first() -> None:
        begun.set()
        assert gate.wait(60)
        made.append(1)

    thread.queue_call(first)
    thread.queue_call(lambda: made.append(2))
    assert begun.wait(60)
    thread.close(0)
    assert not made
    gate.set()
    thread.close()
    assert made == [1]


def test_a_thread_without_calls_is_never_started() -> None:
    before = threading.active_count()
    thread = CallThread("calls")
    assert thread.results() == [] and threading.active_count() == before
    thread.close()
