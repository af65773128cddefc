"""Counts over all models: who waits, with how many prompt tokens, and when there is room again."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from ...backends.errors import Busy, QuotaExceeded
from ...scheduler.messages import TurnStats
from ...scheduler.policy.wait_estimate import Quotient
from ..table import ACTIVE, State
from ..turn import Turn
from ..worker_client import ModelSource
from .forecast import Forecast, Ticket
from .forecast_accuracy import Accuracy
from .quotas import RULES, Quota, Spending, check_priority, no_quota

if TYPE_CHECKING:
    from ..session.session import Session

__all__ = ("Ledger",)

TURN_S_DEFAULT = 5.0
RETRY_S_MIN = 0.1
RETRY_MARGIN = 1.25
"""Who comes too early is refused again, who comes late has lost little; and a slot that is free
is given with the next step, which the reckoning does not see.
"""
_FORECASTS_MAX = 256
"""Models whose pace is remembered; models from descriptors have names that never come again."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """What waits against two bounds: tasks and prompt tokens, of one owner or in all."""

    whose: str
    setting: str
    """What the setting of either bound is called, less what is bounded."""
    tasks: int
    tasks_max: int
    tokens: int
    tokens_max: int

    def refuses(self, prompt_tokens: int) -> tuple[str, str] | None:
        """Return the setting that leaves a prompt no room, and why, or None.

        Alone, any prompt has room: it would find none at any other time either.
        """
        if self.tasks >= self.tasks_max:
            why = f"{self.tasks} tasks wait ({self.whose}); the limit is {self.tasks_max}"
            return f"tasks-{self.setting}", why
        if self.tasks and self.tokens + prompt_tokens > self.tokens_max:
            why = (
                f"{self.tokens} prompt tokens wait ({self.whose}), this prompt has"
                f" {prompt_tokens} more; the limit is {self.tokens_max}"
            )
            return f"prompt-tokens-{self.setting}", why
        return None


class Ledger:
    """Bounds the turns that wait and their prompt tokens, in all and per owner; hands out task
    ids.

    Owned by the daemon's event loop. `turn_s` is the running mean of how long a slot was held.
    """

    def __init__(
        self,
        waiting_max: int,
        waiting_owner_max: int,
        seconds: Callable[[], float] = time.monotonic,
        *,
        prompt_tokens_max: int = 1 << 20,
        prompt_tokens_owner_max: int = 1 << 19,
    ):
        self.seconds = seconds
        self.waiting_max, self.waiting_owner_max = waiting_max, waiting_owner_max
        self.prompt_tokens_max = prompt_tokens_max
        self.prompt_tokens_owner_max = prompt_tokens_owner_max
        self.refused = 0
        self.accuracy = Accuracy()
        self.on_begin: Callable[[Session, Turn], None] = lambda *_: None
        """Hears of each turn that begins, in the task of its call, and of its session."""
        self.on_end: Callable[[ModelSource, Turn], None] = lambda *_: None
        """Hears of each turn that has ended, and of which model it was."""
        self.quota_of: Callable[[int], Quota] = no_quota
        """Says what bounds a user has of his own."""
        self.spending = Spending()
        self._waiting: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        self._tickets: dict[Ticket, None] = {}
        """The turns that are under way, in order of arrival."""
        self._entered: list[Ticket] = []
        """Of turns whose model is there, and which have not been admitted yet."""
        self._forecasts: OrderedDict[str, Forecast] = OrderedDict()
        self._turn = Quotient(TURN_S_DEFAULT)
        self._ids = count(1)

    @property
    def turn_s(self) -> float:
        """How long a turn held its slot, by the running mean."""
        return self._turn.value

    @property
    def waiting(self) -> int:
        """Turns that wait, in all."""
        return self._waiting.total()

    @property
    def waiting_prompt_tokens(self) -> int:
        """Their prompt tokens."""
        return self._tokens.total()

    def task_id(self) -> int:
        """Return a number that no task has had."""
        return next(self._ids)

    def hold(self, ticket: Ticket) -> None:
        """Take one more waiting turn whose model is not in memory, so that its prompt's tokens are
        not known. Once it has entered, `admit` lets a turn in on this ticket.

        :raises Busy: a bound is reached.
        """
        self._take(ticket)

    def enter(self, ticket: Ticket) -> None:
        """Note that the model of a turn that was held is there."""
        self._entered.append(ticket)

    def let_go(self, ticket: Ticket) -> None:
        """Hold a turn no more, if it still is."""
        if ticket in self._entered:
            self._entered.remove(ticket)
        if ticket in self._tickets:
            self.move(ticket, State.READY)

    def admit(self, ticket: Ticket) -> None:
        """Take one more waiting turn, or refuse it where a bound is reached.

        :raises PermissionDenied: its class is above the highest that its owner may have.
        :raises QuotaExceeded: a bound of its owner's own is reached.
        :raises Busy: with the queue's length, the caller's place on its model, and when there
            will be room.
        """
        held = (ticket.owner, ticket.model)
        for other in self._entered:
            if (other.owner, other.model) == held:
                self.let_go(other)
                ticket.goes_on = True
                break
        self._take(ticket)

    def check_tokens(self, owner: int) -> None:
        """Refuse more turns of a user who has used his tokens of a minute.

        :raises QuotaExceeded: with when he has some again.
        """
        quota = self.quota_of(owner)
        if quota.tokens_per_minute is not None:
            mine = [t for t in self._tickets if t.owner == owner]
            under_way = sum(self._forecast(t.model).taken(t) for t in mine)
            self.spending.check(owner, quota, under_way, self.seconds())

    def _take(self, ticket: Ticket) -> None:
        check_priority(self.quota_of(ticket.owner), ticket.priority)
        if not ticket.goes_on:
            self.check_tokens(ticket.owner)
        refusal = self._refusal(ticket, self._waiting, self._tokens)
        if refusal is None:
            self._forecast(ticket.model).arrive(
                ticket.owner, {t.owner for t in self._tickets if t.model == ticket.model}
            )
            self._tickets[ticket] = None
            self._count(ticket, 1)
            return
        self.refused += 1
        bound, why = refusal
        retry_after_s = round(max(RETRY_S_MIN, RETRY_MARGIN * self._room_in_s(ticket)), 3)
        self.accuracy.refused(ticket, self.seconds(), retry_after_s)
        raise (QuotaExceeded if bound.startswith(RULES) else Busy)(
            why,
            hint=f"try again in {retry_after_s:g} s, or raise {bound} in the configuration",
            data={
                "bound": bound,
                "queue_length": self.waiting,
                "position": self._position(ticket),
                "retry_after_s": retry_after_s,
            },
        )

    def move(self, ticket: Ticket, after: State) -> None:
        """Note that a turn's session went to another state."""
        before, ticket.state = ticket.state, after
        if before is after:
            return
        if before is State.WAITING:
            self._count(ticket, -1)
            ticket.began = self.seconds()
            self.accuracy.moved(ticket.began, self._has_room)
        if after not in ACTIVE:
            del self._tickets[ticket]
            self._forecast(ticket.model).leave(ticket)
            if before is not State.WAITING:
                self._charge(ticket, self._forecast(ticket.model).taken(ticket))

    def ended(self, ticket: Ticket, stats: TurnStats) -> None:
        """Learn from a turn that has ended well."""
        self._turn.add((stats.prompt_ms + stats.predicted_ms) / 1000, 1)
        self._forecast(ticket.model).learn(ticket, stats)

    def settle(self, ticket: Ticket, stats: TurnStats) -> None:
        """Count for its owner what a turn has computed, now that it is known."""
        computed = stats.prompt_tokens - stats.cached_tokens + stats.output_tokens
        self._charge(ticket, computed - ticket.before)

    def _charge(self, ticket: Ticket, tokens: int) -> None:
        """Count so many tokens for a turn that has ended, in the place of what was counted."""
        owner, more = ticket.owner, tokens - ticket.counted
        self.spending.add(owner, self.quota_of(owner), more, self.seconds())
        ticket.counted = tokens

    def _forecast(self, model: str) -> Forecast:
        forecast = self._forecasts.setdefault(model, Forecast())
        self._forecasts.move_to_end(model)
        if len(self._forecasts) > _FORECASTS_MAX:
            self._forecasts.popitem(last=False)
        return forecast

    def _count(self, ticket: Ticket, sign: int) -> None:
        for counter, amount in ((self._waiting, 1), (self._tokens, ticket.prompt_tokens)):
            counter[ticket.owner] += sign * amount
            if not counter[ticket.owner]:
                del counter[ticket.owner]

    def _refusal(
        self, ticket: Ticket, waiting: Counter[int], tokens: Counter[int]
    ) -> tuple[str, str] | None:
        """Return the setting that leaves a turn no room while so much waits, and why, or None."""
        owner = ticket.owner
        quota = self.quota_of(owner)
        if quota.tasks_waiting_max is not None and waiting[owner] >= quota.tasks_waiting_max:
            why = f"{waiting[owner]} tasks wait (yours); the limit is {quota.tasks_waiting_max}"
            return quota.bound("tasks-waiting-max"), why
        yours = _Bound(
            "yours",
            "waiting-owner-max",
            waiting[owner],
            self.waiting_owner_max,
            tokens[owner],
            self.prompt_tokens_owner_max,
        )
        in_all = _Bound(
            "in all",
            "waiting-max",
            waiting.total(),
            self.waiting_max,
            tokens.total(),
            self.prompt_tokens_max,
        )
        return yours.refuses(ticket.prompt_tokens) or in_all.refuses(ticket.prompt_tokens)

    def _has_room(self, ticket: Ticket) -> bool:
        return self._refusal(ticket, self._waiting, self._tokens) is None

    # When there is room.

    def _position(self, ticket: Ticket) -> int:
        """Return the place that a refused turn would have in its model's queue."""
        others = [t for t in self._tickets if t.model == ticket.model]
        return self._forecast(ticket.model).order([*others, ticket]).index(ticket) + 1

    def _room_in_s(self, ticket: Ticket) -> float:
        """Return when a refused turn would find room: the waiting ones get slots one by one, each
        model's at its own pace, until no bound is in its way.
        """
        waiting, tokens = self._waiting.copy(), self._tokens.copy()
        room_s = 0.0
        for start_s, other in sorted(self._starts(), key=lambda start: start[0]):
            if self._refusal(ticket, waiting, tokens) is None:
                break
            if other.state is State.WAITING:
                waiting[other.owner] -= 1
                tokens[other.owner] -= other.prompt_tokens
                room_s = start_s
        return room_s

    def _starts(self) -> Iterator[tuple[float, Ticket]]:
        by_model: dict[str, list[Ticket]] = {}
        for ticket in self._tickets:
            by_model.setdefault(ticket.model, []).append(ticket)
        for model, tickets in by_model.items():
            yield from self._forecast(model).starts(tickets, self.seconds())
