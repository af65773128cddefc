"""Admission of turns over all models: bounds, quotas, and what is learnt for the next refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from ...backends.errors import Busy, QuotaExceeded
from ...scheduler.messages import TurnStats
from ...scheduler.policy.wait_estimate import RunningRatio
from ..table import ACTIVE, SessionState
from ..turns.listener import TurnListener
from .bounds import AdmissionBounds, Refusal, WaitingCounts
from .forecast import Ticket
from .forecast_accuracy import Accuracy
from .model_forecasts import ModelForecasts
from .quotas import RULES, Spending, check_priority

TURN_S_DEFAULT = 5.0
RETRY_S_MIN = 0.1
RETRY_MARGIN = 1.25
"""A client that comes too early is refused again, one that comes late has lost little; and a slot
that is free is given with the next step, which the estimate does not see.
"""


class Ledger:
    """The tickets of all turns that wait or run; it hands out task ids.

    Owned by the daemon's event loop.
    """

    def __init__(self, bounds: AdmissionBounds, seconds: Callable[[], float] = time.monotonic):
        self.bounds = bounds
        self.seconds = seconds
        self.refused = 0
        self.accuracy = Accuracy()
        self.spending = Spending()
        self.turn_listeners: list[TurnListener] = []
        self.waiting = WaitingCounts()
        self._tickets: dict[Ticket, None] = {}
        """The turns that are under way, in order of arrival."""
        self._placeholders: list[Ticket] = []
        """Of turns whose model is loaded, and which have not been admitted yet."""
        self._forecasts = ModelForecasts()
        self._turn = RunningRatio(TURN_S_DEFAULT)
        self._ids = count(1)

    @property
    def turn_s(self) -> float:
        """How long a turn held its slot, by the running mean."""
        return self._turn.value

    def new_task_id(self) -> int:
        """Return a number that no task has had."""
        return next(self._ids)

    def hold_place(self, ticket: Ticket) -> None:
        """Count a waiting turn whose model is not in memory, so that its prompt's tokens are not
        known. Once the model is loaded, `admit_turn` admits a turn in this place.

        :raises Busy: a bound is reached.
        """
        self._add_ticket(ticket)

    def model_loaded(self, ticket: Ticket) -> None:
        """Note that the model of a turn whose place was held is loaded."""
        self._placeholders.append(ticket)

    def release_place(self, ticket: Ticket) -> None:
        """Hold a turn's place no longer, if it is still held."""
        if ticket in self._placeholders:
            self._placeholders.remove(ticket)
        if ticket in self._tickets:
            self.move_ticket(ticket, SessionState.READY)

    def admit_turn(self, ticket: Ticket) -> None:
        """Count a waiting turn, or refuse it where a bound is reached.

        :raises PermissionDenied: its class is above the highest that its owner may have.
        :raises QuotaExceeded: a bound of its owner's own is reached.
        :raises Busy: with the queue's length, the caller's place on its model, and when it would
            be admitted.
        """
        held = (ticket.owner, ticket.model)
        for other in self._placeholders:
            if (other.owner, other.model) == held:
                self.release_place(other)
                ticket.goes_on = True
                break
        self._add_ticket(ticket)

    def check_tokens(self, owner: int) -> None:
        """Refuse more turns of a user whose tokens of a minute are used.

        :raises QuotaExceeded: with when some have come back.
        """
        quota = self.bounds.quota_of(owner)
        if quota.tokens_per_minute is not None:
            mine = [t for t in self._tickets if t.owner == owner]
            under_way = sum(self._forecasts[t.model].taken(t) for t in mine)
            self.spending.check(owner, quota, under_way, self.seconds())

    def _add_ticket(self, ticket: Ticket) -> None:
        check_priority(self.bounds.quota_of(ticket.owner), ticket.priority)
        if not ticket.goes_on:
            self.check_tokens(ticket.owner)
        refusal = self.bounds.refusal(ticket, self.waiting)
        if refusal is not None:
            raise self._refuse(ticket, refusal)
        self._forecasts[ticket.model].arrive(
            ticket.owner, {t.owner for t in self._tickets if t.model == ticket.model}
        )
        self._tickets[ticket] = None
        self.waiting.add_ticket(ticket)

    def _refuse(self, ticket: Ticket, refusal: Refusal) -> Busy | QuotaExceeded:
        """Count a refusal and return its error."""
        self.refused += 1
        bound, now = refusal.bound, self.seconds()
        admitted_in_s = self._forecasts.admitted_in_s(
            ticket, self._tickets, self.waiting, self.bounds, now
        )
        retry_after_s = round(max(RETRY_S_MIN, RETRY_MARGIN * admitted_in_s), 3)
        self.accuracy.refused(ticket, now, retry_after_s)
        return (QuotaExceeded if bound.startswith(RULES) else Busy)(
            refusal.why,
            hint=f"try again in {retry_after_s:g} s, or raise {bound} in the configuration",
            data={
                "bound": bound,
                "queue_length": self.waiting.tasks.total(),
                "position": self._forecasts.position(ticket, self._tickets),
                "retry_after_s": retry_after_s,
            },
        )

    def move_ticket(self, ticket: Ticket, after: SessionState) -> None:
        """Note that a turn's session went to another state."""
        before, ticket.state = ticket.state, after
        if before is after:
            return
        if before is SessionState.WAITING:
            self.waiting.remove_ticket(ticket)
            ticket.began = self.seconds()
            self.accuracy.moved(ticket.began, self._admits)
        if after not in ACTIVE:
            del self._tickets[ticket]
            forecast = self._forecasts[ticket.model]
            forecast.leave(ticket)
            if before is not SessionState.WAITING:
                self._charge(ticket, forecast.taken(ticket))

    def _admits(self, ticket: Ticket) -> bool:
        return self.bounds.refusal(ticket, self.waiting) is None

    def learn_from_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        """Learn from a turn that has ended well."""
        self._turn.add_sample((stats.prompt_ms + stats.predicted_ms) / 1000, 1)
        self._forecasts[ticket.model].learn(ticket, stats)

    def charge_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        """Charge the owner for what a turn has computed, now that it is known."""
        computed = stats.prompt_tokens - stats.cached_tokens + stats.output_tokens
        self._charge(ticket, computed - ticket.before)

    def _charge(self, ticket: Ticket, tokens: int) -> None:
        """Charge *tokens* for a turn that has ended, in the place of what was charged."""
        owner, more = ticket.owner, tokens - ticket.counted
        self.spending.add(owner, self.bounds.quota_of(owner), more, self.seconds())
        ticket.counted = tokens
