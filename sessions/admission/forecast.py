"""Forecast of a model's queue: the order in which turns get slots, and when.

The engine decides; the daemon estimates it from the reports of turns.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

from ...scheduler.messages import TurnStats
from ...scheduler.policy.wait_estimate import (
    RemainingWork,
    RunningRatio,
    TurnEstimator,
    expected_starts,
)
from ...scheduler.priority import Priority
from ..table import SessionState

_OWNERS_MAX = 4096
"""Owners whose computed tokens a model remembers."""
PROMPT_S_MIN = 1e-9
"""Avoids division by zero when the clock has not advanced."""


@dataclass(eq=False)
class Ticket:
    """A turn's place in the ledger, from its admission to its end. *limit* bounds its output."""

    owner: int
    model: str
    slots: int
    priority: Priority
    prompt_tokens: int
    limit: int = -1
    output: Sized = ()
    """The turn's output so far; only its length is used."""
    state: SessionState = SessionState.WAITING
    began: float = 0.0
    """The time at which it got its slot."""
    goes_on: bool = False
    """The call's first turn was admitted: the token quota was checked with that."""
    before: int = 0
    """Tokens of its output that an interrupted turn has computed before."""
    charged: int = 0
    """Tokens that its owner was charged at its end."""


class Forecast:
    """Statistics of one model's turns: its pace, the computed share of prompts, and the tokens
    computed for each owner, by which the engine orders owners fairly.
    """

    def __init__(self) -> None:
        self._estimator = TurnEstimator()
        self._computed = RunningRatio(1.0)
        self._served: Counter[int] = Counter()

    def add_turn(self, owner: int, active: set[int]) -> None:
        """Note a turn of *owner*, while *active* owners have turns. An owner who returns starts at
        the level of the least served of them.
        """
        if owner not in active:
            floor = min((self._served[o] for o in active), default=0)
            self._served[owner] = max(self._served[owner], floor)
        if len(self._served) > _OWNERS_MAX:
            keep = active | {owner}
            self._served = Counter({o: n for o, n in self._served.items() if o in keep})

    def remove_turn(self, ticket: Ticket) -> None:
        """Count the tokens computed for an ended turn."""
        self._served[ticket.owner] += self._computed_so_far(ticket)

    def learn_from_turn(self, ticket: Ticket, stats: TurnStats) -> None:
        """Learn from a finished turn."""
        computed = stats.prompt_tokens - stats.cached_tokens
        self._computed.add_sample(computed, stats.prompt_tokens)
        self._estimator.learn_length(stats.output_tokens, ticket.limit)
        if not stats.parks:
            prompt_s, output_s = stats.prompt_ms / 1000, stats.predicted_ms / 1000
            self._estimator.learn_rates(computed, prompt_s, stats.output_tokens, output_s)

    def slot_times(self, tickets: Sequence[Ticket], now: float) -> Iterator[tuple[float, Ticket]]:
        """Return the seconds from *now* until each waiting ticket of the model gets a slot."""
        running = [t for t in tickets if t.state is SessionState.RUNNING]
        queue = self.slot_order(tickets)
        starts = expected_starts(
            [self._remaining_work(t, now) for t in running],
            [self._remaining_work(t, now) for t in queue],
            tickets[-1].slots,
            self._estimator.token_times,
        )
        return zip(starts, queue, strict=True)

    def slot_order(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Return the waiting tickets in the expected order of the engine: by priority, then by the
        tokens computed for their owner, then by arrival. Ages are unknown here.
        """
        served = self._served.copy()
        waiting: dict[int, dict[int, deque[Ticket]]] = {}
        for ticket in tickets:
            if ticket.state is SessionState.RUNNING:
                served[ticket.owner] += self._computed_at_end(
                    ticket
                )  # most of it, by the next free slot
            else:
                owners = waiting.setdefault(-ticket.priority, {})
                owners.setdefault(ticket.owner, deque()).append(ticket)
        return [
            t for _, owners in sorted(waiting.items()) for t in self._fair_order(owners, served)
        ]

    def _fair_order(
        self, owners: dict[int, deque[Ticket]], served: Counter[int]
    ) -> Iterator[Ticket]:
        """Yield the tickets of one priority, those of the least served owner first."""
        heap = [(served[owner], place, owner) for place, owner in enumerate(owners)]
        heapq.heapify(heap)
        while heap:
            _, place, owner = heapq.heappop(heap)
            ticket = owners[owner].popleft()
            served[owner] += self._computed_at_end(ticket)
            if owners[owner]:
                heapq.heappush(heap, (served[owner], place, owner))
            yield ticket

    def tokens_used(self, ticket: Ticket) -> int:
        """Return a turn's computed tokens; its whole prompt counts from the start."""
        return round(self._prompt_to_compute(ticket)) + len(ticket.output) - ticket.before

    def _prompt_to_compute(self, ticket: Ticket) -> float:
        """Return the expected number of a turn's prompt tokens that are not cached."""
        return ticket.prompt_tokens * self._computed.value

    def _computed_so_far(self, ticket: Ticket) -> int:
        """Return the tokens computed for a turn so far; 0 before its first output token."""
        output = len(ticket.output)
        return round(self._prompt_to_compute(ticket)) + output if output else 0

    def _computed_at_end(self, ticket: Ticket) -> int:
        """Return the expected number of tokens computed for a turn at its end."""
        output = len(ticket.output)
        rest = self._estimator.remaining_work(0, output, ticket.limit)
        return round(self._prompt_to_compute(ticket) + output + rest.output_tokens)

    def _remaining_work(self, ticket: Ticket, now: float) -> RemainingWork:
        """Return the rest of a turn's work; the progress of a prompt is estimated by its time."""
        prompt, output = self._prompt_to_compute(ticket), len(ticket.output)
        if output:
            prompt = 0.0
        elif ticket.state is SessionState.RUNNING:
            prompt_s = max(self._estimator.token_times.prompt_s, PROMPT_S_MIN)
            prompt = max(0.0, prompt - (now - ticket.began) / prompt_s)
        return self._estimator.remaining_work(round(prompt), output, ticket.limit)
