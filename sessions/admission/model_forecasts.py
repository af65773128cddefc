"""Forecasts of all models, and the time until a refused turn would be admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from ..table import SessionState
from .bounds import AdmissionBounds, WaitingCounts
from .forecast import Forecast, Ticket

_FORECASTS_MAX = 256
"""Models whose forecast is kept; names of models from descriptors are never used again."""


class ModelForecasts:
    """Forecasts by model name. Owned by the ledger."""

    def __init__(self) -> None:
        self._forecasts: OrderedDict[str, Forecast] = OrderedDict()

    def __getitem__(self, model: str) -> Forecast:
        forecast = self._forecasts.setdefault(model, Forecast())
        self._forecasts.move_to_end(model)
        if len(self._forecasts) > _FORECASTS_MAX:
            self._forecasts.popitem(last=False)
        return forecast

    def __len__(self) -> int:
        return len(self._forecasts)

    def position(self, ticket: Ticket, tickets: Iterable[Ticket]) -> int:
        """Return the place of a refused turn in its model's queue, if it were admitted."""
        others = [t for t in tickets if t.model == ticket.model]
        return self[ticket.model].slot_order([*others, ticket]).index(ticket) + 1

    def admitted_in_s(
        self,
        ticket: Ticket,
        tickets: Iterable[Ticket],
        waiting: WaitingCounts,
        bounds: AdmissionBounds,
        now: float,
    ) -> float:
        """Return the seconds until a refused turn would be admitted: waiting turns get slots, each
        model's at its own pace, until no bound refuses it.
        """
        waiting, admitted_in_s = waiting.copy(), 0.0
        for start_s, other in sorted(self._slot_times(tickets, now), key=lambda start: start[0]):
            if bounds.refusal(ticket, waiting) is None:
                break
            if other.state is SessionState.WAITING:
                waiting.remove_ticket(other)
                admitted_in_s = start_s
        return admitted_in_s

    def _slot_times(self, tickets: Iterable[Ticket], now: float) -> Iterator[tuple[float, Ticket]]:
        by_model: dict[str, list[Ticket]] = {}
        for ticket in tickets:
            by_model.setdefault(ticket.model, []).append(ticket)
        for model, of_model in by_model.items():
            yield from self[model].slot_times(of_model, now)
