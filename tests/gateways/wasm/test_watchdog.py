"""The end of a guest from outside: first an interrupt, then, after a time, the process's end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from inferd.gateways.wasm.runner import Ending, Watchdog

WAIT_S_MAX = 60.0


def test_a_guest_that_ends_after_the_interrupt_is_not_given_up() -> None:
    interrupted = threading.Event()
    given_up: list[Ending] = []
    with Watchdog(0.01, interrupted.set, given_up.append) as watchdog:
        assert interrupted.wait(WAIT_S_MAX)
    assert (watchdog.ending, given_up) == ("timeout", [])


def test_a_guest_that_does_not_end_is_given_up() -> None:
    given_up = threading.Event()
    endings: list[Ending] = []

    def give_up(ending: Ending) -> None:
        endings.append(ending)
        given_up.set()

    with Watchdog(0.01, lambda: None, give_up):
        assert given_up.wait(WAIT_S_MAX)
    assert endings == ["timeout"]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's handler, which a shell's background jobs do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_raises_only_where_it_may() -> None:
    interrupted = threading.Event()
    with Watchdog(None, interrupted.set, lambda ending: None) as watchdog:
        watchdog.may_raise = lambda: False
        signal.raise_signal(signal.SIGINT)
        assert interrupted.wait(WAIT_S_MAX) and watchdog.ending == "interrupted"
        watchdog.may_raise = lambda: True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_guest_that_ends_by_itself_is_left_alone() -> None:
    calls: list[object] = []
    with Watchdog(None, lambda: calls.append("interrupt"), calls.append) as watchdog:
        pass
    assert watchdog.ending is None and calls == []
