"""Tickets of turns, and the bounds of waiting turns and their prompt tokens."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from ...scheduler.owner import Owner
from ...scheduler.priority import Priority
from ..table import SessionState
from .label_shares import OwnerCounts, exceeds_share
from .quotas import NO_QUOTA, Quota


@dataclass(eq=False)
class Ticket:
    """A turn in the ledger, from its admission to its end."""

    owner: Owner
    model: str
    slots: int
    priority: Priority
    prompt_tokens: int
    n_predict: int = -1
    """The bound of its output; −1 means no bound."""
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
    """Tokens that its user was charged at its end."""


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
    """Waiting turns and their prompt tokens, by user and label. Owned by the ledger."""

    tasks: OwnerCounts = field(default_factory=OwnerCounts)
    prompt_tokens: OwnerCounts = field(default_factory=OwnerCounts)

    def count_ticket(self, ticket: Ticket, sign: int) -> None:
        """Add a waiting turn (*sign* 1), or remove it (−1)."""
        self.tasks.add(ticket.owner, sign)
        self.prompt_tokens.add(ticket.owner, sign * ticket.prompt_tokens)


@dataclass(slots=True)
class AdmissionBounds:
    """The configured bounds; `quota_of` returns the bounds of one user, and `gateway_of` the user
    of the gateway that a user belongs to, or -1.
    """

    tasks_max: int = 0
    tasks_owner_max: int = 0
    prompt_tokens_max: int = 1 << 20
    prompt_tokens_owner_max: int = 1 << 19
    sessions_owner_max: int = 0
    """0 means no bound besides that of all users together."""
    session_bytes_owner_max: int = 128 << 20
    kept_sessions_owner_max: int = 100
    quota_of: Callable[[int], Quota] = lambda _: NO_QUOTA
    gateway_of: Callable[[int], int] = lambda _: -1

    def sessions_bound(self, user: int) -> Bound | None:
        """Return the bound on the number of a user's open sessions, if it has one of its own."""
        quota = self.quota_of(user)
        if quota.sessions_max is not None:
            return Bound(quota.bound("sessions-max"), quota.sessions_max)
        if not self.sessions_owner_max:
            return None
        return Bound("sessions-user-max", self.sessions_owner_max)

    def session_bytes_bound(self, user: int) -> Bound:
        """Return the bound on the bytes of a user's sessions and graphs."""
        quota = self.quota_of(user)
        if quota.session_bytes_max is not None:
            return Bound(quota.bound("session-bytes-max"), quota.session_bytes_max)
        return Bound("session-bytes-user-max", self.session_bytes_owner_max)

    def kept_sessions_bound(self, user: int) -> Bound:
        """Return the bound on the number of a user's kept sessions."""
        quota = self.quota_of(user)
        if quota.kept_sessions_max is not None:
            return Bound(quota.bound("kept-sessions-max"), quota.kept_sessions_max)
        return Bound("kept-sessions-user-max", self.kept_sessions_owner_max)

    def refusal(self, ticket: Ticket, waiting: WaitingCounts) -> Refusal | None:
        """Return why a turn is refused while *waiting* turns wait, or None if it is admitted."""
        user, tasks, prompts = ticket.owner.user, waiting.tasks, waiting.prompt_tokens
        quota, count = self.quota_of(user), tasks.of_user(user)
        if quota.tasks_waiting_max is not None and count >= quota.tasks_waiting_max:
            why = f"{count} tasks wait (yours); the limit is {quota.tasks_waiting_max}"
            return Refusal(quota.bound("tasks-waiting-max"), why)
        own = (count, self.tasks_owner_max, prompts.of_user(user), self.prompt_tokens_owner_max)
        total = (tasks.total(), self.tasks_max, prompts.total(), self.prompt_tokens_max)
        for whose, setting, bounds in (
            ("yours", "waiting-user-max", own),
            ("in all", "waiting-max", total),
        ):
            waits, tasks_max, tokens, tokens_max = bounds
            if waits >= tasks_max:
                why = f"{waits} tasks wait ({whose}); the limit is {tasks_max}"
                return Refusal(f"tasks-{setting}", why)
            # A prompt is admitted if no other waits; otherwise a long one would always be refused.
            if waits and tokens + ticket.prompt_tokens > tokens_max:
                why = (
                    f"{tokens} prompt tokens wait ({whose}), this prompt has"
                    f" {ticket.prompt_tokens} more; the limit is {tokens_max}"
                )
                return Refusal(f"prompt-tokens-{setting}", why)
        return self._label_refusal(ticket, waiting) if ticket.owner.label else None

    def _label_refusal(self, ticket: Ticket, waiting: WaitingCounts) -> Refusal | None:
        """Return why a turn would leave too little for other labels of its user, if it would."""
        owner, tasks, prompts = ticket.owner, waiting.tasks, waiting.prompt_tokens
        quota, prompt_tokens = self.quota_of(owner.user), ticket.prompt_tokens
        shares = [("tasks-waiting-user-max", tasks, 1, self.tasks_owner_max)]
        if quota.tasks_waiting_max is not None:
            shares.insert(0, (quota.bound("tasks-waiting-max"), tasks, 1, quota.tasks_waiting_max))
        if tasks.of(owner):  # a long prompt is admitted if no other of the label waits
            bound = "prompt-tokens-waiting-user-max"
            shares.append((bound, prompts, prompt_tokens, self.prompt_tokens_owner_max))
        for bound, counts, more, limit in shares:
            if exceeds_share(counts, owner, more, limit):
                own, total = counts.of(owner), counts.of_user(owner.user)
                what = "tasks" if counts is tasks else "prompt tokens"
                why = f"{own} {what} wait ({owner.label!r}, of {total} of your user)"
                return Refusal(bound, f"{why}; the rest is for other labels")
        return None
