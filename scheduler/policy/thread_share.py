"""The share of the engine's thread for one user's work outside of steps, while others' tasks run.

Pure: the time is passed in. Work on texts (`engine.tokenizing`) and slow sampling each use one.
"""

from __future__ import annotations

SHARE = 0.1
"""Other users' tasks keep 1 - SHARE of their pace, less the CPU time that the sender's process and
the daemon need for such work. A text of 16 kB takes 6 ms on a slow machine, so a user who only
sends texts still gets 16 of them a second.
"""
BURST_S = 0.02
"""Seconds of work that may be done at once, between two steps; further work is spread."""


class ThreadShare:
    """The moment at which each user has paid for the work that was done (generic cell rate
    algorithm, ITU-T I.371). Users without a debt are not stored.
    """

    def __init__(self) -> None:
        self._paid_at: dict[int, float] = {}

    def may_work(self, user: int, now: float) -> bool:
        """Return whether work may be done for *user*."""
        return self._paid_at.get(user, now) <= now + BURST_S / SHARE

    def charge_user(self, user: int, seconds: float, now: float, users: int = 1) -> None:
        """Charge *user* for work; *users* with such work divide the share among them."""
        paid_at = max(self._paid_at.get(user, now), now) + seconds * max(users, 1) / SHARE
        self._paid_at = {u: at for u, at in self._paid_at.items() if at > now}
        self._paid_at[user] = paid_at
