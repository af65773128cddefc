"""The thread that ends a slice of the idle measurement as soon as the engine gets work."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from inferd.scheduler.worker import WorkWatch

SECONDS_MAX = 60.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_work_is_noticed_within_a_slice(pipe: tuple[int, int]) -> None:
    watch, noticed = WorkWatch([pipe[0]]), threading.Event()
    with watch(noticed.set) as has_work:
        assert not has_work()
        os.write(pipe[1], b"x")
        assert noticed.wait(SECONDS_MAX)
        assert has_work()
    watch.close()


def test_slices_without_work_end_without_a_notice(pipe: tuple[int, int]) -> None:
    watch = WorkWatch([pipe[0]])
    noticed: list[int] = []
    for number in range(50):
        with watch(lambda number=number: noticed.append(number)) as has_work:  # type: ignore[misc]
            assert not has_work()
    watch.close()
    assert noticed == []


def test_work_that_is_there_already_is_noticed_in_each_slice(pipe: tuple[int, int]) -> None:
    watch = WorkWatch([pipe[0]])
    os.write(pipe[1], b"x")
    for _ in range(20):
        noticed = threading.Event()
        with watch(noticed.set):
            assert noticed.wait(SECONDS_MAX)
    watch.close()


def test_a_slice_that_fails_ends_the_watch(pipe: tuple[int, int]) -> None:
    watch, noticed = WorkWatch([pipe[0]]), threading.Event()
    with pytest.raises(ZeroDivisionError), watch(lambda: None):
        raise ZeroDivisionError
    os.write(pipe[1], b"x")
    with watch(noticed.set):
        assert noticed.wait(SECONDS_MAX)
    watch.close()


def test_closing_ends_the_thread_and_may_be_repeated(pipe: tuple[int, int]) -> None:
    before = threading.active_count()
    watch = WorkWatch([pipe[0]])
    with watch(lambda: None):
        assert threading.active_count() == before + 1
    watch.close()
    watch.close()
    assert threading.active_count() == before
