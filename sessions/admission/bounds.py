"""Bounds of waiting turns and their prompt tokens, in total and per owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .forecast import Ticket
from .quotas import Quota, no_quota


class Refusal(NamedTuple):
    """The setting that refuses a turn, and the reason."""

    bound: str
    why: str


@dataclass(slots=True)
class WaitingCounts:
    """Waiting turns and their prompt tokens, by owner."""

    tasks: Counter[int] = field(default_factory=Counter)
    prompt_tokens: Counter[int] = field(default_factory=Counter)

    def add_ticket(self, ticket: Ticket) -> None:
        """Add a waiting turn."""
        self._count(ticket, 1)

    def remove_ticket(self, ticket: Ticket) -> None:
        """Remove a turn that no longer waits."""
        self._count(ticket, -1)

    def copy(self) -> WaitingCounts:
        """Return an independent copy."""
        return WaitingCounts(self.tasks.copy(), self.prompt_tokens.copy())

    def _count(self, ticket: Ticket, sign: int) -> None:
        for counter, amount in ((self.tasks, 1), (self.prompt_tokens, ticket.prompt_tokens)):
            counter[ticket.owner] += sign * amount
            if not counter[ticket.owner]:
                del counter[ticket.owner]


@dataclass(slots=True)
class AdmissionBounds:
    """The configured bounds; `quota_of` returns the bounds of one user."""

    tasks_max: int
    tasks_owner_max: int
    prompt_tokens_max: int = 1 << 20
    prompt_tokens_owner_max: int = 1 << 19
    quota_of: Callable[[int], Quota] = no_quota

    def refusal(self, ticket: Ticket, waiting: WaitingCounts) -> Refusal | None:
        """Return why a turn is refused while *waiting* turns wait; None: it is admitted."""
        owner = ticket.owner
        quota, tasks = self.quota_of(owner), waiting.tasks[owner]
        if quota.tasks_waiting_max is not None and tasks >= quota.tasks_waiting_max:
            why = f"{tasks} tasks wait (yours); the limit is {quota.tasks_waiting_max}"
            return Refusal(quota.bound("tasks-waiting-max"), why)
        yours = _WaitingBound(
            "yours",
            "waiting-user-max",
            tasks,
            self.tasks_owner_max,
            waiting.prompt_tokens[owner],
            self.prompt_tokens_owner_max,
        )
        in_all = _WaitingBound(
            "in all",
            "waiting-max",
            waiting.tasks.total(),
            self.tasks_max,
            waiting.prompt_tokens.total(),
            self.prompt_tokens_max,
        )
        return yours.refusal(ticket.prompt_tokens) or in_all.refusal(ticket.prompt_tokens)


@dataclass(frozen=True, slots=True)
class _WaitingBound:
    """Waiting tasks and prompt tokens, of one owner or in total, with their bounds."""

    whose: str
    setting: str
    """The common suffix of both settings' names."""
    tasks: int
    tasks_max: int
    tokens: int
    tokens_max: int

    def refusal(self, prompt_tokens: int) -> Refusal | None:
        """Return why a prompt is refused; None: it is admitted.

        A prompt is admitted if no other waits: otherwise a long one would always be refused.
        """
        if self.tasks >= self.tasks_max:
            why = f"{self.tasks} tasks wait ({self.whose}); the limit is {self.tasks_max}"
            return Refusal(f"tasks-{self.setting}", why)
        if self.tasks and self.tokens + prompt_tokens > self.tokens_max:
            why = (
                f"{self.tokens} prompt tokens wait ({self.whose}), this prompt has"
                f" {prompt_tokens} more; the limit is {self.tokens_max}"
            )
            return Refusal(f"prompt-tokens-{self.setting}", why)
        return None
