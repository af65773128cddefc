"""Tickets of turns, and the bounds of waiting turns and their prompt tokens."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from ...scheduler.priority import Priority
from ..table import SessionState
from .quotas import NO_QUOTA, Quota


@dataclass(eq=False)
class Ticket:
    """A turn in the ledger, from its admission to its end."""

    owner: int
    model: str
    slots: int
    priority: Priority
    prompt_tokens: int
    n_predict: int = -1
    """The bound of its output; −1: none."""
    output: Sized = ()
    """The turn's output so far; only its length is used."""
    state: SessionState = SessionState.WAITING
    state_since: float = 0.0
    """The time at which it entered its present state."""
    quota_checked: bool = False
    """The token quota was checked already, for the first turn of the same call."""
    resumed_tokens: int = 0
    """The part of its output that was computed before the turn was interrupted."""
    charged: int = 0
    """Tokens that its owner was charged at its end."""


class Refusal(NamedTuple):
    """The setting that refuses a turn, and the reason."""

    bound: str
    why: str


class Bound(NamedTuple):
    """A user's bound, and the setting that sets it."""

    name: str
    limit: int


@dataclass(slots=True)
class WaitingCounts:
    """Waiting turns and their prompt tokens, by owner. Owned by the ledger."""

    tasks: Counter[int] = field(default_factory=Counter)
    prompt_tokens: Counter[int] = field(default_factory=Counter)

    def count_ticket(self, ticket: Ticket, sign: int) -> None:
        """Add a waiting turn (*sign* 1), or remove it (−1)."""
        for counter, amount in ((self.tasks, 1), (self.prompt_tokens, ticket.prompt_tokens)):
            counter[ticket.owner] += sign * amount
            if not counter[ticket.owner]:
                del counter[ticket.owner]


@dataclass(slots=True)
class AdmissionBounds:
    """The configured bounds; `quota_of` returns the bounds of one user."""

    tasks_max: int = 0
    tasks_owner_max: int = 0
    prompt_tokens_max: int = 1 << 20
    prompt_tokens_owner_max: int = 1 << 19
    sessions_owner_max: int = 0
    """0: as many as all users together."""
    session_bytes_owner_max: int = 128 << 20
    quota_of: Callable[[int], Quota] = lambda _: NO_QUOTA

    def sessions_bound(self, owner: int) -> Bound:
        """Return the bound on the number of a user's open sessions."""
        quota = self.quota_of(owner)
        if quota.sessions_max is not None:
            return Bound(quota.bound("sessions-max"), quota.sessions_max)
        return Bound("sessions-user-max", self.sessions_owner_max or sys.maxsize)

    def session_bytes_bound(self, owner: int) -> Bound:
        """Return the bound on the bytes of a user's sessions and graphs."""
        quota = self.quota_of(owner)
        if quota.session_bytes_max is not None:
            return Bound(quota.bound("session-bytes-max"), quota.session_bytes_max)
        return Bound("session-bytes-user-max", self.session_bytes_owner_max)

    def refusal(self, ticket: Ticket, waiting: WaitingCounts) -> Refusal | None:
        """Return why a turn is refused while *waiting* turns wait; None: it is admitted."""
        owner = ticket.owner
        quota, tasks = self.quota_of(owner), waiting.tasks[owner]
        if quota.tasks_waiting_max is not None and tasks >= quota.tasks_waiting_max:
            why = f"{tasks} tasks wait (yours); the limit is {quota.tasks_waiting_max}"
            return Refusal(quota.bound("tasks-waiting-max"), why)
        counts, prompts = waiting.tasks, waiting.prompt_tokens
        own = (counts[owner], self.tasks_owner_max, prompts[owner], self.prompt_tokens_owner_max)
        total = (counts.total(), self.tasks_max, prompts.total(), self.prompt_tokens_max)
        for whose, setting, bounds in (
            ("yours", "waiting-user-max", own),
            ("in all", "waiting-max", total),
        ):
            tasks, tasks_max, tokens, tokens_max = bounds
            if tasks >= tasks_max:
                why = f"{tasks} tasks wait ({whose}); the limit is {tasks_max}"
                return Refusal(f"tasks-{setting}", why)
            # A prompt is admitted if no other waits: otherwise a long one would always be refused.
            if tasks and tokens + ticket.prompt_tokens > tokens_max:
                why = (
                    f"{tokens} prompt tokens wait ({whose}), this prompt has"
                    f" {ticket.prompt_tokens} more; the limit is {tokens_max}"
                )
                return Refusal(f"prompt-tokens-{setting}", why)
        return None
