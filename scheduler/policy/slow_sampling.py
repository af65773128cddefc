"""The bounds on slow sampling: the steps that a slow task skips, and the time at which it ends.

Pure: times are passed in. A task is slow if sampling one of its tokens, with the work on its text,
takes much more CPU time than is usual for the model. A large grammar or many stop texts cause this.
`ThreadShare` bounds the work for one user outside of steps; work on texts (`engine.tokenizing`)
uses another one.
"""

from __future__ import annotations

from collections.abc import Collection

from ...backends.errors import Timeout
from ..task import Task
from .order import Order

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


SLOW_AT, SLOW_S = 3.0, 0.001
"""A token is slow if it takes more than this many times the prediction, and more than this time.
(With a vocabulary of 262k tokens the default samplers take 1 ms, greedy sampling 0.3 ms.)
"""
FALL, RISE = 1 / 8, 1 / 1024
"""The prediction falls by this share of the distance to a faster token, and rises by this share of
itself at a slower one. So it follows the fastest tasks: a slow task that runs alone for minutes
does not become the usual one.
"""
TIMEOUT_S, TIMEOUT_AT = 1.0, 10.0
"""A token may take the greater of this time and this many times the prediction."""


class SlowSampling:
    """The predicted time to sample a token, and the debts of users with slow tasks."""

    def __init__(self) -> None:
        self.predicted_s = SLOW_S
        self._share = ThreadShare()

    def note_token(self, task: Task, seconds: float, *, usual: bool = True) -> float:
        """Record that sampling a token of *task* took *seconds* of CPU time; return how many of
        them exceed the limit for a slow token. A forced token is not *usual*: it takes less.
        """
        if not usual:
            task.sampling_s = max(task.sampling_s, seconds)
        else:
            task.sampling_s = seconds
            if seconds < self.predicted_s:
                self.predicted_s += FALL * (seconds - self.predicted_s)
            else:
                self.predicted_s *= 1 + RISE
        return max(0.0, seconds - self._usual_s)

    def charge_task(self, task: Task, slow_s: float, now: float, tasks: Collection[Task]) -> None:
        """Charge the slow part of a token to the user of *task*, one of the running *tasks*."""
        usual_s = self._usual_s
        users = {t.spec.owner.user for t in tasks if t.sampling_s > usual_s}
        self._share.charge_user(task.spec.owner.user, slow_s, now, len(users))

    @property
    def _usual_s(self) -> float:
        return max(SLOW_S, SLOW_AT * self.predicted_s)

    def skipping(self, tasks: Collection[Task], order: Order, now: float) -> frozenset[Task]:
        """Return those of *tasks*, which all have work, that skip the next step. These are slow
        tasks of users who have used their share, beside tasks of the same class or a higher one.
        Tasks with a grammar count as slow: any token may be slow, also in the user's next turn.
        """
        usual_s = self._usual_s
        late = [
            t
            for t in tasks
            if (t.sampling_s > usual_s or t.has_grammar)
            and not self._share.may_work(t.spec.owner.user, now)
        ]
        if not late:
            return frozenset()
        others = order.highest(t for t in tasks if t not in late)
        return frozenset(t for t in late if any(not order.is_above(t, other) for other in others))

    def timeout(self, seconds: float) -> Timeout | None:
        """Return the error of a task if sampling one of its tokens took too many *seconds*."""
        limit_s = max(TIMEOUT_S, TIMEOUT_AT * self.predicted_s)
        if seconds <= limit_s:
            return None
        return Timeout(
            f"sampling one token took {seconds:.1f} s; the limit is {limit_s:.1f} s",
            hint="use a smaller grammar or JSON schema, fewer or shorter stop texts, or other"
            " samplers",
            data={"timeout": "sampling", "seconds": seconds, "seconds_max": limit_s},
        )
