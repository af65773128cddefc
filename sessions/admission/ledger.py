"""Admission of turns of all models: bounds, quotas, and statistics for the next refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from ...backends.errors import Busy, QuotaExceeded
from ...scheduler.messages import TurnStats
from ...scheduler.policy.wait_estimate import RunningRatio
from ..table import ACTIVE, SessionState
from ..turn import TurnListener
from .bounds import AdmissionBounds, Refusal, WaitingCounts
from .forecast import Ticket
from .forecast_accuracy import ForecastAccuracy
from .model_forecasts import ModelForecasts
from .quotas import RULES, Spending, check_priority

TURN_S_DEFAULT = 5.0
RETRY_S_MIN = 0.1
RETRY_MARGIN = 1.25
"""An early client is refused again, a late one loses little. A free slot is given at the next step,
which the estimate does not include.
"""


class Ledger:
    """The tickets of all waiting and running turns, and the source of task ids.

    Owned by the daemon's event loop.
    """

    def __init__(self, bounds: AdmissionBounds, seconds: Callable[[], float] = time.monotonic):
        self.bounds = bounds
        self.seconds = seconds
        self.refused = 0
        self.accuracy = ForecastAccuracy()
        self.spending = Spending()
        self.turn_listeners: list[TurnListener] = []
        self.waiting = WaitingCounts()
        self._tickets: dict[Ticket, None] = {}
        """Turns under way, in order of arrival."""
        self._placeholders: list[Ticket] = []
        """Tickets of turns whose model is loaded, and which are not admitted yet."""
        self._forecasts = ModelForecasts()
        self._turn_s = RunningRatio(TURN_S_DEFAULT)
        self._ids = count(1)

    @property
    def turn_s(self) -> float:
        """The running mean of the time that a turn holds its slot."""
        return self._turn_s.value

    def new_task_id(self) -> int:
        """Return an unused task id."""
        return next(self._ids)

    def hold_place(self, ticket: Ticket) -> None:
        """Count a waiting turn whose model is not loaded, so that its prompt cannot be tokenized.
        Once the model is loaded, `admit_turn` admits a turn in this place.

        :raises Busy: a bound is reached.
        """
        self._add_ticket(ticket)

    def model_loaded(self, ticket: Ticket) -> None:
        """Note that the model of a held place is loaded."""
        self._placeholders.append(ticket)

    def release_place(self, ticket: Ticket) -> None:
        """Release a turn's place, if it is still held."""
        if ticket in self._placeholders:
            self._placeholders.remove(ticket)
        if ticket in self._tickets:
            self.move_ticket(ticket, SessionState.READY)

    def admit_turn(self, ticket: Ticket) -> None:
        """Count a waiting turn, or refuse it if a bound is reached.

        :raises PermissionDenied: its priority is above its owner's highest one.
        :raises QuotaExceeded: its owner's own bound is reached.
        :raises Busy: with the queue's length, the turn's place on its model, and the time until it
            would be admitted.
        """
        held = (ticket.owner, ticket.model)
        for other in self._placeholders:
            if (other.owner, other.model) == held:
                self.release_place(other)
                ticket.goes_on = True
                break
        self._add_ticket(ticket)

    def check_tokens(self, owner: int) -> None:
        """Refuse a turn of a user whose tokens a minute are used.

        :raises QuotaExceeded: with the time until a token is available.
        """
        quota = self.bounds.quota_of(owner)
        if quota.tokens_per_minute is not None:
            own = [t for t in self._tickets if t.owner == owner]
            under_way = sum(self._forecasts[t.model].tokens_used(t) for t in own)
            self.spending.check(owner, quota, under_way, self.seconds())

    def _add_ticket(self, ticket: Ticket) -> None:
        check_priority(self.bounds.quota_of(ticket.owner), ticket.priority)
        if not ticket.goes_on:
            self.check_tokens(ticket.owner)
        refusal = self.bounds.refusal(ticket, self.waiting)
        if refusal is not None:
            raise self._refuse(ticket, refusal)
        self._forecasts[ticket.model].add_turn(
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
        self.accuracy.add_refusal(ticket, now, retry_after_s)
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
        """Note the new state of a turn's session."""
        before, ticket.state = ticket.state, after
        if before is after:
            return
        if before is SessionState.WAITING:
            self.waiting.remove_ticket(ticket)
            ticket.began = self.seconds()
            self.accuracy.count_admissible(ticket.began, self._admits)
        if after not in ACTIVE:
            del self._tickets[ticket]
            forecast = self._forecasts[ticket.model]
            forecast.remove_turn(ticket)
            if before is not SessionState.WAITING:
                self._charge(ticket, forecast.tokens_used(ticket))

    def _admits(self, ticket: Ticket) -> bool:
        return self.bounds.refusal(ticket, self.waiting) is None

    def learn_from_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        """Learn from a finished turn."""
        self._turn_s.add_sample((stats.prompt_ms + stats.predicted_ms) / 1000, 1)
        self._forecasts[ticket.model].learn_from_turn(ticket, stats)

    def charge_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        """Charge the owner for a turn's computed tokens, which its statistics have."""
        computed = stats.prompt_tokens - stats.cached_tokens + stats.output_tokens
        self._charge(ticket, computed - ticket.before)

    def _charge(self, ticket: Ticket, tokens: int) -> None:
        """Charge *tokens* for an ended turn, in place of an earlier charge."""
        owner, more = ticket.owner, tokens - ticket.charged
        self.spending.add(owner, self.bounds.quota_of(owner), more, self.seconds())
        ticket.charged = tokens
