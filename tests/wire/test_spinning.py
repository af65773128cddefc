"""Waits that spin while they are short, on a clock that each call of the poll advances."""

from __future__ import annotations

import os
import time

import pytest

from inferd.wire.spinning import AWAY_S, SHORT_WAITS_MIN, SPIN_S, Spinning

READY = [(3, 1)]
TICK_S = AWAY_S / 10


class Poll:
    """A descriptor that is ready some time after a wait has begun; counts the calls, and those that
    block.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.ready_at = 0.0
        self.away_s = 0.0
        """The time that other threads take of the core between two polls."""
        self.blocked = self.polled = 0
        self._spinning = Spinning()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "sched_yield", self._yield)

    def _yield(self) -> None:
        self.now += self.away_s

    def __call__(self, timeout: float | None) -> list[tuple[int, int]]:
        self.polled += 1
        if timeout == 0:
            self.now += TICK_S
            return READY if self.now >= self.ready_at else []
        self.blocked += 1
        ends_at = self.now + timeout if timeout is not None else self.ready_at
        self.now = max(self.now, min(self.ready_at, ends_at))
        return READY if self.now >= self.ready_at else []

    def wait(self, ready_s: float, timeout: float | None = None) -> bool:
        """Wait for the descriptor, which is ready in *ready_s*; return whether the wait blocked."""
        self.ready_at, before = self.now + ready_s, self.blocked
        found = self._spinning.poll(self, timeout)
        assert found == (READY if self.now >= self.ready_at else [])
        return self.blocked > before


@pytest.fixture
def poll(monkeypatch: pytest.MonkeyPatch) -> Poll:
    return Poll(monkeypatch)


def spin(poll: Poll) -> None:
    """Make short waits until the next one spins."""
    for _ in range(SHORT_WAITS_MIN):
        assert poll.wait(SPIN_S / 2), "too little is known"


def test_waits_after_short_ones_spin(poll: Poll) -> None:
    spin(poll)
    assert not poll.wait(SPIN_S / 2)
    assert not poll.wait(SPIN_S / 4)


def test_waits_after_a_long_one_block(poll: Poll) -> None:
    assert poll.wait(2 * SPIN_S)
    spin(poll)
    assert not poll.wait(SPIN_S / 2)
    assert poll.wait(2 * SPIN_S), "it has spun in vain"
    assert poll.wait(SPIN_S / 2)


def test_no_wait_spins_where_short_and_long_ones_alternate(poll: Poll) -> None:
    for _ in range(10):
        for ready_s in (SPIN_S / 2, 2 * SPIN_S):
            began = poll.polled
            assert poll.wait(ready_s) and poll.polled == began + 1


def test_a_poll_without_a_wait_neither_spins_nor_counts(poll: Poll) -> None:
    for _ in range(SHORT_WAITS_MIN):
        poll.wait(1.0, timeout=0)
    spin(poll)
    began = poll.polled
    poll.wait(1.0, timeout=0)
    assert poll.polled == began + 1
    assert not poll.wait(SPIN_S / 2)


def test_a_wait_spins_no_longer_than_its_bound(poll: Poll) -> None:
    spin(poll)
    began = poll.now
    assert poll.wait(1.0, timeout=0.0001)
    assert poll.now - began < SPIN_S + 2 * TICK_S + 0.0001


def test_a_thread_that_shares_its_core_stops_spinning(poll: Poll) -> None:
    spin(poll)
    poll.away_s = 2 * AWAY_S
    assert poll.wait(SPIN_S)
    assert poll.now == poll.ready_at, "it polled once, and was away once"
