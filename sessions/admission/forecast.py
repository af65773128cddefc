"""What a model's queue will do, as far as the daemon can tell: in which order turns get slots, and
when. The engine decides; this is reckoned from what turns have told of themselves.
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
"""Owners whose served tokens a model remembers."""
PROMPT_S_MIN = 1e-9
"""A clock that stands still measures no time."""


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
    """What the turn has said so far; its length counts."""
    state: SessionState = SessionState.WAITING
    began: float = 0.0
    """When it got its slot."""
    goes_on: bool = False
    """Of a call whose first turn was admitted: its tokens were decided on with that."""
    before: int = 0
    """Tokens of its output that an earlier turn has computed, which this one goes on with."""
    counted: int = 0
    """What its owner was counted for it at its end."""


class Forecast:
    """One model's turns so far: its pace, what share of a prompt it has to compute, and the tokens
    that it computed for each owner, by which the engine's fair order goes.
    """

    def __init__(self) -> None:
        self._estimator = TurnEstimator()
        self._computed = RunningRatio(1.0)
        self._served: Counter[int] = Counter()

    def arrive(self, owner: int, active: set[int]) -> None:
        """Note a turn of *owner*, while *active* owners have turns: who returns starts level."""
        if owner not in active:
            floor = min((self._served[o] for o in active), default=0)
            self._served[owner] = max(self._served[owner], floor)
        if len(self._served) > _OWNERS_MAX:
            keep = active | {owner}
            self._served = Counter({o: n for o, n in self._served.items() if o in keep})

    def leave(self, ticket: Ticket) -> None:
        """Count what was computed for a turn that is over."""
        self._served[ticket.owner] += self._done(ticket)

    def learn(self, ticket: Ticket, stats: TurnStats) -> None:
        """Learn from a turn that has ended well."""
        computed = stats.prompt_tokens - stats.cached_tokens
        self._computed.add_sample(computed, stats.prompt_tokens)
        self._estimator.learn_length(stats.output_tokens, ticket.limit)
        if not stats.parks:
            prompt_s, output_s = stats.prompt_ms / 1000, stats.predicted_ms / 1000
            self._estimator.learn_rates(computed, prompt_s, stats.output_tokens, output_s)

    def starts(self, tickets: Sequence[Ticket], now: float) -> Iterator[tuple[float, Ticket]]:
        """Return when those of a model's *tickets* that wait get slots: seconds from *now*."""
        running = [t for t in tickets if t.state is SessionState.RUNNING]
        queue = self.order(tickets)
        starts = expected_starts(
            [self._left(t, now) for t in running],
            [self._left(t, now) for t in queue],
            tickets[-1].slots,
            self._estimator.token_times,
        )
        return zip(starts, queue, strict=True)

    def order(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Return those that wait as the engine is expected to take them: by class, then by what
        was computed for their owner, then by arrival. Ages are not known here.
        """
        served = self._served.copy()
        waiting: dict[int, dict[int, deque[Ticket]]] = {}
        for ticket in tickets:
            if ticket.state is SessionState.RUNNING:
                served[ticket.owner] += self._whole(ticket)  # most of it, by the next free slot
            else:
                owners = waiting.setdefault(-ticket.priority, {})
                owners.setdefault(ticket.owner, deque()).append(ticket)
        return [t for _, owners in sorted(waiting.items()) for t in self._turns(owners, served)]

    def _turns(self, owners: dict[int, deque[Ticket]], served: Counter[int]) -> Iterator[Ticket]:
        """Let the owners of one class take turns, whoever was served least first."""
        heap = [(served[owner], place, owner) for place, owner in enumerate(owners)]
        heapq.heapify(heap)
        while heap:
            _, place, owner = heapq.heappop(heap)
            ticket = owners[owner].popleft()
            served[owner] += self._whole(ticket)
            if owners[owner]:
                heapq.heappush(heap, (served[owner], place, owner))
            yield ticket

    def taken(self, ticket: Ticket) -> int:
        """Return what a turn has computed, or is about to: its prompt counts before it is."""
        return round(self._prompt(ticket)) + len(ticket.output) - ticket.before

    def _prompt(self, ticket: Ticket) -> float:
        """Return how many of a turn's prompt tokens are expected to be computed."""
        return ticket.prompt_tokens * self._computed.value

    def _done(self, ticket: Ticket) -> int:
        """Return what was computed for a turn so far, as far as its output tells."""
        said = len(ticket.output)
        return round(self._prompt(ticket)) + said if said else 0

    def _whole(self, ticket: Ticket) -> int:
        """Return what a turn is expected to have computed at its end."""
        said = len(ticket.output)
        left = self._estimator.remaining_work(0, said, ticket.limit)
        return round(self._prompt(ticket) + said + left.output_tokens)

    def _left(self, ticket: Ticket, now: float) -> RemainingWork:
        """Return what is left of a turn: of a prompt under way, by the time that it has had."""
        prompt, said = self._prompt(ticket), len(ticket.output)
        if said:
            prompt = 0.0
        elif ticket.state is SessionState.RUNNING:
            prompt_s = max(self._estimator.token_times.prompt_s, PROMPT_S_MIN)
            prompt = max(0.0, prompt - (now - ticket.began) / prompt_s)
        return self._estimator.remaining_work(round(prompt), said, ticket.limit)
