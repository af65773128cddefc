"""Forecasts of the models' queues: the order in which turns get slots, and when.

The engines decide; the daemon estimates it from the reports of turns.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy

from ...backends.recent_dict import RecentDict
from ...scheduler.messages import TurnStats
from ...scheduler.owner import PRIORITY_MAX, Owner, OwnerClock, Priority
from ...scheduler.record import Histogram
from ...scheduler.settings import EngineSettings
from ...scheduler.waiting import (
    QueuedTask,
    RemainingWork,
    RunningRatio,
    StartEstimator,
    TurnEstimator,
)
from ..table import SessionState
from .bounds import AdmissionBounds, Ticket, WaitingCounts

_FORECASTS_MAX = 256
"""Models whose forecast is kept. Names of models from descriptors are never used again."""
RATIOS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Upper bounds of the histogram's buckets for predicted seconds divided by measured seconds."""
OPEN_MAX = 32
"""Refusals whose forecasts are checked at a time; others are ignored."""
SECONDS_MIN = 1e-3


class Forecast:
    """Statistics of one model's turns: its pace, the share of prompt tokens that is not cached, and
    the tokens computed for each owner, by which the engine orders them fairly.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._estimator = TurnEstimator()
        self._uncached = RunningRatio(1.0)
        self._computed = OwnerClock()

    def add_turn(self, owner: Owner, active: set[Owner]) -> None:
        """Add a turn of *owner*, while *active* owners have turns."""
        self._computed.add_owner(owner, active)

    def remove_turn(self, ticket: Ticket) -> None:
        """Count the tokens computed for an ended turn; without output, count none."""
        if ticket.output:
            computed = round(self._prompt_to_compute(ticket)) + len(ticket.output)
            self._computed.count_work(ticket.owner, computed)

    def learn_from_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        computed = stats.prompt_tokens - stats.cached_tokens
        self._uncached.add_sample(computed, stats.prompt_tokens)
        self._estimator.learn_length(
            stats.output_tokens, ticket.n_predict, reasoning_tokens=stats.reasoning_tokens
        )
        if not stats.parks:
            prompt_s, output_s = stats.prompt_ms / 1000, stats.predicted_ms / 1000
            self._estimator.learn_rates(computed, prompt_s, stats.output_tokens, output_s)

    def slot_times(self, tickets: Sequence[Ticket], now: float) -> Iterator[tuple[float, Ticket]]:
        """Yield the seconds from *now* until each waiting turn of the model gets a slot."""
        running = [t for t in tickets if t.state is SessionState.RUNNING]
        queue, slots = self.slot_order(tickets, now), tickets[-1].slots
        estimator = StartEstimator(
            [self._queued(t, now, slots) for t in running],
            [self._queued(t, now, slots) for t in queue],
            slots,
            self._estimator.token_times,
            self._settings,
        )
        return zip(estimator.starts(), queue, strict=True)

    def _queued(self, ticket: Ticket, now: float, slots: int) -> QueuedTask:
        """Return a turn for the estimate of starts; the turns' order includes the users' shares."""
        ageing, age = self._settings.ageing_tokens, self._age(ticket, now, slots)
        state_s = now - ticket.state_since
        waited_s = 0.0 if ticket.state is SessionState.RUNNING else state_s
        return QueuedTask(
            self._remaining_work(ticket, now),
            ticket.priority,
            self._effective(ticket, age),
            rises_after=ageing - age % ageing,
            user=ticket.owner.user,
            quantum=int(state_s / self._estimator.token_times.output_s),
            idle_s=waited_s,
            passed_over_s=waited_s,
        )

    def _age(self, ticket: Ticket, now: float, slots: int) -> int:
        """Return the tokens that the model's slots can have computed since a turn began to wait."""
        if ticket.state is SessionState.RUNNING:
            return 0
        token_s = self._estimator.token_times.output_s / slots
        return int((now - ticket.state_since) / token_s)

    def _effective(self, ticket: Ticket, age: int) -> int:
        return min(PRIORITY_MAX, ticket.priority + age // self._settings.ageing_tokens)

    def slot_order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        """Return the waiting turns in the engine's expected order: by their class, which rises with
        their age, then by the tokens computed for their owner, then by arrival. Turns of several
        users are ordered by the owners first, except urgent ones, unless priorities are strict.
        """
        computed = self._computed.copy()
        by_class = self._settings.priority_strict or len({t.owner.user for t in tickets}) == 1
        waiting: dict[int, dict[Owner, deque[Ticket]]] = {}
        for ticket in tickets:
            if ticket.state is SessionState.RUNNING:
                # Most of it will be computed by the time that a slot is free.
                computed.count_work(ticket.owner, self._computed_at_end(ticket))
            else:
                effective = self._effective(ticket, self._age(ticket, now, tickets[-1].slots))
                level = effective if by_class else int(ticket.priority == Priority.URGENT)
                owners = waiting.setdefault(-level, {})
                owners.setdefault(ticket.owner, deque()).append(ticket)
        if not by_class:
            for owner, turns in waiting.get(0, {}).items():
                waiting[0][owner] = deque(sorted(turns, key=lambda t: -t.priority))
        return [
            t for _, owners in sorted(waiting.items()) for t in self._fair_order(owners, computed)
        ]

    def _fair_order(
        self, owners: dict[Owner, deque[Ticket]], computed: OwnerClock
    ) -> Iterator[Ticket]:
        """Yield the turns of one priority, those of the owner with the fewest tokens first.

        Each turn moves its user back, and its label among the user's labels. There is one heap for
        the users and one for each user's labels, so that many labels of a user take no longer than
        many users.
        """
        labels: dict[int, list[tuple[int, int, Owner]]] = {}
        for arrival, owner in enumerate(owners):
            labels.setdefault(owner.user, []).append((computed.served(owner)[1], arrival, owner))
        users: list[tuple[tuple[int, int], int, int]] = []

        def add_user(user: int) -> None:
            _, arrival, owner = labels[user][0]
            heapq.heappush(users, (computed.served(owner), arrival, user))

        for user, own in labels.items():
            heapq.heapify(own)
            add_user(user)
        while users:
            *_, user = heapq.heappop(users)
            _, arrival, owner = heapq.heappop(labels[user])
            ticket = owners[owner].popleft()
            computed.count_work(owner, self._computed_at_end(ticket))
            if owners[owner]:
                heapq.heappush(labels[user], (computed.served(owner)[1], arrival, owner))
            if labels[user]:
                add_user(user)
            yield ticket

    def tokens_used(self, ticket: Ticket) -> int:
        """Return a turn's computed tokens; its whole prompt counts from the start."""
        output = len(ticket.output) - ticket.resumed_tokens
        return round(self._prompt_to_compute(ticket)) + output

    def _prompt_to_compute(self, ticket: Ticket) -> float:
        """Return the expected number of a turn's prompt tokens that are not cached."""
        return ticket.prompt_tokens * self._uncached.value

    def _computed_at_end(self, ticket: Ticket) -> int:
        """Return the expected number of tokens computed for a turn at its end."""
        output = len(ticket.output)
        rest = self._estimator.remaining_work(0, output, ticket.n_predict, ticket.reasoning_budget)
        rest_tokens = min(rest.output_tokens, self._estimator.mean_length.value)
        return round(self._prompt_to_compute(ticket) + output + rest_tokens)

    def _remaining_work(self, ticket: Ticket, now: float) -> RemainingWork:
        """Return the rest of a turn's work; the progress of a prompt is estimated from its time."""
        prompt, output = self._prompt_to_compute(ticket), len(ticket.output)
        if output:
            prompt = 0.0
        elif ticket.state is SessionState.RUNNING:
            done = (now - ticket.state_since) / self._estimator.token_times.prompt_s
            prompt = max(0.0, prompt - done)
        return self._estimator.remaining_work(
            round(prompt), output, ticket.n_predict, ticket.reasoning_budget
        )


class ModelForecasts:
    """Forecasts by model name. Owned by the ledger."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._forecasts = RecentDict[str, Forecast](_FORECASTS_MAX)

    def __getitem__(self, model: str) -> Forecast:
        forecast = self._forecasts.get(model)
        if forecast is None:
            forecast = Forecast(self._settings)
        self._forecasts[model] = forecast
        return forecast

    def __len__(self) -> int:
        return len(self._forecasts)

    def position(self, ticket: Ticket, tickets: Iterable[Ticket], now: float) -> int:
        """Return the position that a refused turn would have in its model's queue."""
        others = [t for t in tickets if t.model == ticket.model]
        return self[ticket.model].slot_order([*others, ticket], now).index(ticket) + 1

    def admitted_in_s(
        self,
        ticket: Ticket,
        tickets: Iterable[Ticket],
        waiting: WaitingCounts,
        bounds: AdmissionBounds,
        now: float,
    ) -> float:
        """Return the seconds until a refused turn would be admitted. Waiting turns get slots, each
        model's at its own pace, until no bound refuses the turn.
        """
        waiting, admitted_in_s = deepcopy(waiting), 0.0
        for start_s, other in sorted(self._slot_times(tickets, now), key=lambda start: start[0]):
            if bounds.refusal(ticket, waiting) is None:
                break
            if other.state is SessionState.WAITING:
                waiting.count_ticket(other, -1)
                admitted_in_s = start_s
        return admitted_in_s

    def _slot_times(self, tickets: Iterable[Ticket], now: float) -> Iterator[tuple[float, Ticket]]:
        by_model: dict[str, list[Ticket]] = {}
        for ticket in tickets:
            by_model.setdefault(ticket.model, []).append(ticket)
        for model, of_model in by_model.items():
            yield from self[model].slot_times(of_model, now)


class ForecastAccuracy:
    """The ratios of `retry_after_s` to the time until admission. Owned by the ledger."""

    def __init__(self) -> None:
        self.ratios = Histogram(RATIOS)
        self._open: deque[tuple[Ticket, float, float]] = deque()
        """Turns, the times of their refusals, the predicted seconds."""

    def add_refusal(self, ticket: Ticket, at: float, predicted_s: float) -> None:
        """Add a refusal whose forecast is to be checked, unless there are `OPEN_MAX` already."""
        if len(self._open) < OPEN_MAX:
            self._open.append((ticket, at, predicted_s))

    def count_admissible(self, at: float, admits: Callable[[Ticket], bool]) -> None:
        """Count the refused turns that would be admitted now."""
        for refusal in [r for r in self._open if admits(r[0])]:
            self._open.remove(refusal)
            _, refused_at, predicted_s = refusal
            self.ratios.observe(predicted_s / max(at - refused_at, SECONDS_MIN))

    def counts_by_bound(self) -> dict[str, float]:
        """Return the counts by the buckets' upper bounds."""
        return dict(zip((*map(str, RATIOS), "inf"), self.ratios.counts, strict=True))
