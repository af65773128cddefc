"""Admission of turns of all models: bounds, quotas, and statistics for the next refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from ...backends.errors import Busy, QuotaExceeded
from ...scheduler.messages import TurnStats
from ...scheduler.owner import Owner, Priority, Requester
from ...scheduler.settings import EngineSettings
from ...scheduler.waiting import RunningRatio
from ..media_store import NO_DIRECTORY, MediaStore
from ..table import ACTIVE, SessionState
from ..turn.turn import TurnListener
from .bounds import (
    RULES,
    AdmissionBounds,
    KeptBytes,
    OwnerCounts,
    Refusal,
    Spending,
    Ticket,
    WaitingCounts,
    check_priority,
)
from .forecast import ForecastAccuracy, ModelForecasts

TURN_S_DEFAULT = 5.0
RETRY_S_MIN = 0.1
RETRY_MARGIN = 1.25
"""Factor on the estimated wait, because a client that retries early is refused again, and one that
retries late loses little. A free slot is leased at the next step, which the estimate does not
include.
"""


class Ledger:
    """The tickets of all waiting and running turns, the source of task ids, and the bytes and media
    that sessions keep.

    Owned by the daemon's event loop.
    """

    def __init__(
        self,
        bounds: AdmissionBounds,
        seconds: Callable[[], float] = time.monotonic,
        settings: EngineSettings = EngineSettings(),  # noqa: B008 (it is frozen)
        media: MediaStore | None = None,
    ):
        self.bounds = bounds
        self.media = MediaStore(NO_DIRECTORY) if media is None else media
        """The images and sounds of sessions."""
        self.seconds = seconds
        self.refused = 0
        self.accuracy = ForecastAccuracy()
        self.spending = Spending()
        self.kept_bytes = KeptBytes(bounds)
        self.turn_listeners: list[TurnListener] = []
        self.waiting = WaitingCounts()
        self._tickets: dict[Ticket, None] = {}
        """Turns under way, in order of arrival."""
        self._replaceable: list[Ticket] = []
        """Tickets of load waits whose model is loaded now; a turn will replace each."""
        self._forecasts = ModelForecasts(settings)
        self._turn_s = RunningRatio(TURN_S_DEFAULT)
        self._ids = count(1)

    @property
    def turn_s(self) -> float:
        """The running mean of the time that a turn has its slot."""
        return self._turn_s.value

    def requester(self, owner: Owner, priority: Priority) -> Requester:
        """Return *owner* with this class, or with the user's highest one if that is lower."""
        return Requester(owner, min(priority, self.bounds.quota_of(owner.user).priority_max))

    def new_task_id(self) -> int:
        return next(self._ids)

    def add_ticket(self, ticket: Ticket) -> None:
        """Count a waiting turn, or refuse it if a bound is reached. A turn whose model must be
        loaded first has no prompt tokens yet; once it is loaded, `admit_turn` replaces its ticket.

        :raises PermissionDenied: its priority is above its user's highest one.
        :raises QuotaExceeded: its user's own bound is reached.
        :raises Busy: another bound is reached. The data has the queue's length, the turn's position
            on its model, and the time until it would be admitted.
        """
        ticket.state_since = self.seconds()
        check_priority(self.bounds.quota_of(ticket.owner.user), ticket.priority)
        if not ticket.quota_checked:
            self.check_tokens(ticket.owner)
        refusal = self.bounds.refusal(ticket, self.waiting)
        if refusal is not None:
            raise self._refuse(ticket, refusal)
        self._forecasts[ticket.model].add_turn(
            ticket.owner, {t.owner for t in self._tickets if t.model == ticket.model}
        )
        self._tickets[ticket] = None
        self.waiting.count_ticket(ticket, 1)

    def model_loaded(self, ticket: Ticket) -> None:
        """Let the next turn of the ticket's owner and model replace the ticket."""
        self._replaceable.append(ticket)

    def remove_load_wait(self, ticket: Ticket) -> None:
        """Remove a ticket that waited for its model, unless a turn has replaced it."""
        if ticket in self._replaceable:
            self._replaceable.remove(ticket)
        if ticket in self._tickets:
            self.move_ticket(ticket, SessionState.READY)

    def admit_turn(self, ticket: Ticket) -> None:
        """Count a waiting turn whose model is loaded; it replaces a ticket that waited for that.

        :raises InferdError: it is refused, as in `add_ticket`.
        """
        key = (ticket.owner, ticket.model)
        for other in self._replaceable:
            if (other.owner, other.model) == key:
                self.remove_load_wait(other)
                ticket.quota_checked = True
                break
        self.add_ticket(ticket)

    def check_tokens(self, owner: Owner) -> None:
        """Check that a user has not used up their tokens a minute.

        :raises QuotaExceeded: they have; the data has the time until a token is available.
        """
        quota = self.bounds.quota_of(owner.user)
        if quota.tokens_per_minute is not None:
            under_way = OwnerCounts()
            for ticket in self._tickets:
                if ticket.owner.user == owner.user:
                    under_way.add(ticket.owner, self._forecasts[ticket.model].tokens_used(ticket))
            self.spending.check(owner, quota, under_way, self.seconds())

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
                "position": self._forecasts.position(ticket, self._tickets, now),
                "retry_after_s": retry_after_s,
            },
        )

    def move_ticket(self, ticket: Ticket, after: SessionState) -> None:
        """Note the new state of a turn's session."""
        before, ticket.state = ticket.state, after
        if before is after:
            return
        ticket.state_since = now = self.seconds()
        if before is SessionState.WAITING:
            self.waiting.count_ticket(ticket, -1)
            self.accuracy.count_admissible(
                now, lambda other: self.bounds.refusal(other, self.waiting) is None
            )
        if after not in ACTIVE:
            del self._tickets[ticket]
            forecast = self._forecasts[ticket.model]
            forecast.remove_turn(ticket)
            if before is not SessionState.WAITING:
                self._charge(ticket, forecast.tokens_used(ticket))

    def learn_from_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        self._turn_s.add_sample((stats.prompt_ms + stats.predicted_ms) / 1000, 1)
        self._forecasts[ticket.model].learn_from_turn(ticket, stats)

    def charge_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        """Charge the user for the computed tokens in a turn's statistics."""
        computed = stats.prompt_tokens - stats.cached_tokens + stats.output_tokens
        self._charge(ticket, computed - ticket.resumed_tokens)

    def _charge(self, ticket: Ticket, tokens: int) -> None:
        """Charge *tokens* for an ended turn, in place of an earlier charge."""
        owner, more = ticket.owner, tokens - ticket.charged
        self.spending.add(owner, self.bounds.quota_of(owner.user), more, self.seconds())
        ticket.charged = tokens
