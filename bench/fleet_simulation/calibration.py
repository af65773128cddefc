"""The same trace on a real daemon and in the simulation of one node."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from bench.texts import story
from inferd import AsyncClient
from inferd.scheduler.policy.cost import CostCoefficients, StepCost, StepLoad

from .engine import SimulatedEngine
from .states import SessionStates
from .turns import Session, Turn, TurnPlan

SLOTS = 4
_CLASS_NAMES: Sequence[Literal["low", "normal", "high", "urgent"]] = (
    "low",
    "normal",
    "high",
    "urgent",
)
KV_BYTES, TOKEN_BYTES = 1 << 30, 1 << 12
TOLERANCE = 0.1
WARM_UP_TURNS, WARM_UP_TOKENS = 4, 32
POLL_S = 0.5
"""The time between two requests for the learned costs."""


class Arrival(NamedTuple):
    """A session of a trace, its turns, and when it begins."""

    at_s: float
    priority: int
    turns: Sequence[TurnPlan]


@dataclass(frozen=True)
class Observed:
    """The turns of a trace as they went."""

    total_s: float
    turn_s: float
    wait_s: float
    cached_share: float

    def errors(self, other: Observed) -> dict[str, float]:
        """Return by how much *other* differs, as a share of the value here."""
        pairs = {
            "total time": (self.total_s, other.total_s),
            "mean turn": (self.turn_s, other.turn_s),
            "mean wait": (self.wait_s, other.wait_s),
        }
        return {name: there / here - 1 for name, (here, there) in pairs.items()}


def synthetic_trace(
    sessions: int, seconds: float, answer_tokens: int, seed: int = 1, new_tokens: int = 60
) -> list[Arrival]:
    """Return the sessions of a trace whose arrivals take *seconds*. Half of them are in a burst."""
    rng = random.Random(seed)
    trace = []
    for number in range(sessions):
        at = rng.uniform(0, seconds) if number % 2 else rng.uniform(0.4, 0.5) * seconds
        turns = [
            TurnPlan(
                rng.randint(new_tokens // 2, new_tokens * 2),
                rng.randint(answer_tokens // 2, answer_tokens * 3 // 2),
                rng.uniform(0.2, 1.5) if turn else 0.0,
            )
            for turn in range(rng.choice((1, 1, 2, 3)))
        ]
        trace.append(Arrival(at, rng.choices(range(4), (2, 6, 1, 1))[0], turns))
    return sorted(trace)


@dataclass(frozen=True)
class NodeCosts:
    """The learned step costs of a node, and the times that it takes beside its steps. *between_s*
    is the time between two steps; *request_s* is that of a turn until it is queued and after its
    last step.
    """

    cost: StepCost
    between_s: float = 0.0
    request_s: float = 0.0


class Record(NamedTuple):
    """A turn of the trace on the daemon."""

    requested_s: float
    ended_s: float
    wait_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    token_s: float
    """The mean time between two tokens."""


async def run_trace(
    socket: str, model: str, trace: Sequence[Arrival], *, echoes: bool
) -> tuple[list[list[Record]], NodeCosts]:
    """Run a trace on a daemon; return the turns of each session, and the costs of the node."""
    async with AsyncClient(socket) as client:
        before = await _measure_overheads(client, model, echoes=echoes)
        begin_s = time.perf_counter() + 0.1
        sessions = asyncio.gather(
            *(
                _run_session(client, model, arrival, number, begin_s, echoes=echoes)
                for number, arrival in enumerate(trace, 1)
            )
        )
        known = []
        while not sessions.done():
            await asyncio.wait([sessions], timeout=POLL_S)
            found = (await client.stats())["models"][model]["step_cost"]
            known.append(CostCoefficients(**found))
    cost = StepCost.from_coefficients(mean_cost(known))
    return await sessions, replace(before, cost=cost)


def mean_cost(known: Sequence[CostCoefficients]) -> CostCoefficients:
    """Return the mean of costs that were learned at different times of a trace. An engine forgets
    the steps before the last hundred, and other programs change the speed of the machine. By the
    cost learned at the end, two traces would have taken 18 and 29 % less time than they did.
    """
    return CostCoefficients(
        statistics.fmean(one.ubatch_s for one in known),
        statistics.fmean(one.token_s for one in known),
        statistics.fmean(one.position_s for one in known),
        min(one.token_s_least for one in known),
    )


async def _measure_overheads(client: AsyncClient, model: str, *, echoes: bool) -> NodeCosts:
    """Measure the time that a node takes beside its steps, by turns before the trace."""
    now = time.perf_counter()
    one = Arrival(0.0, 1, [TurnPlan(WARM_UP_TOKENS, WARM_UP_TOKENS, 0.0)])
    for _ in range(2):  # the first time loads the model and learns its costs
        streams = await asyncio.gather(
            *(
                _run_session(client, model, one, -number, now, echoes=echoes)
                for number in range(SLOTS)
            )
        )
    lone = Arrival(0.0, 1, [TurnPlan(WARM_UP_TOKENS, 1, 0.0)] * WARM_UP_TURNS)
    short = await _run_session(client, model, lone, -SLOTS, now, echoes=echoes)
    found = (await client.stats())["models"][model]["step_cost"]
    cost = StepCost.from_coefficients(CostCoefficients(**found))
    chunks = [(stream[0].prompt_tokens + WARM_UP_TOKENS // 2, 1) for stream in streams]
    step_s = statistics.fmean(stream[0].token_s for stream in streams)
    between_s = max(0.0, step_s - cost.predict(StepLoad.of_chunks(chunks)))
    request_s = statistics.median(
        turn.ended_s - turn.requested_s - cost.predict(StepLoad.of_chunks([_computed(turn)]))
        for turn in short
    )
    return NodeCosts(cost, between_s, max(0.0, request_s - between_s))


def _computed(turn: Record) -> tuple[int, int]:
    return turn.cached_tokens, turn.prompt_tokens - turn.cached_tokens


async def _run_session(
    client: AsyncClient,
    model: str,
    arrival: Arrival,
    number: int,
    begin_s: float,
    *,
    echoes: bool,
) -> list[Record]:
    rng = random.Random(f"{begin_s} {number}")  # no text is in a cache
    await asyncio.sleep(begin_s + arrival.at_s - time.perf_counter())
    priority = _CLASS_NAMES[arrival.priority]
    records = []
    async with client.session(model, raw=True) as session:
        for turn in arrival.turns:
            await asyncio.sleep(turn.think_s)
            text = _text(turn, rng, echoes=echoes)
            options = {"temp": 0, "n-predict": turn.answer_tokens}
            if not echoes:
                options["ignore-eos"] = True
            requested_s = time.perf_counter()
            stream = session.stream(text, options=options, priority=priority)
            times = [time.perf_counter() async for _ in stream]
            ended_s = time.perf_counter()
            found = session.metadata
            records.append(
                Record(
                    requested_s - begin_s,
                    ended_s - begin_s,
                    found["queue_ms"] / 1000,
                    found["input_tokens"],
                    found["cached_tokens"],
                    found["output_tokens"],
                    (times[-1] - times[0]) / max(1, found["output_tokens"] - 1),
                )
            )
    return records


def _text(turn: TurnPlan, rng: random.Random, *, echoes: bool) -> str:
    """Return a text with about the turn's tokens. The echo model needs at least as many as its
    answer has.
    """
    if echoes:
        size = max(turn.new_tokens, turn.answer_tokens)
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=size))
    return " ".join(rng.choices(WORDS, k=turn.new_tokens))


WORDS = tuple(sorted({word.strip(".,:").lower() for word in story(random.Random(1), 2000).split()}))


def observed(records: Sequence[Sequence[Record]]) -> Observed:
    """Return the totals and means of the daemon's *records*."""
    turns = [record for session in records for record in session]
    return Observed(
        total_s=max(t.ended_s for t in turns) - min(t.requested_s for t in turns),
        turn_s=statistics.fmean(t.ended_s - t.requested_s for t in turns),
        wait_s=statistics.fmean(t.wait_s for t in turns),
        cached_share=sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns),
    )


def measured_sessions(
    trace: Sequence[Arrival], records: Sequence[Sequence[Record]]
) -> list[tuple[float, Session]]:
    """Return the trace's sessions with the tokens that the daemon counted."""
    sessions = []
    for number, (arrival, turns) in enumerate(zip(trace, records, strict=True)):
        plans, history = [], 0
        for turn, record in zip(arrival.turns, turns, strict=True):
            new = record.prompt_tokens - history
            plans.append(TurnPlan(new, record.output_tokens, turn.think_s))
            history = record.prompt_tokens + record.output_tokens
        sessions.append((arrival.at_s, Session(number, 0, "", arrival.priority, 0, plans)))
    return sessions


def simulate(
    sessions: Sequence[tuple[float, Session]], costs: NodeCosts, steps_max: int = 1 << 30
) -> tuple[Observed, SimulatedEngine]:
    """Run sessions on one simulated engine of `SLOTS` slots."""
    states = SessionStates(KV_BYTES, TOKEN_BYTES, costs.cost.recompute_s)
    engine = SimulatedEngine(
        SLOTS, costs.cost, states, between_s=costs.between_s, steps_max=steps_max
    )
    waiting = [
        (at + session.plans[0].think_s + costs.request_s, number, session, 0)
        for number, (at, session) in enumerate(sessions)
    ]
    heapq.heapify(waiting)
    turns: list[Turn] = []
    while waiting or engine.due_at < math.inf:
        if waiting and waiting[0][0] <= engine.due_at:
            now, _, session, at = heapq.heappop(waiting)
            engine.add_turn(Turn(session, at, now), now)
            continue
        now = engine.due_at
        for turn in engine.advance(now):
            turns.append(turn)
            following = turn.number + 1
            if following < len(turn.session.plans):
                arrives_at = now + turn.session.plans[following].think_s + costs.request_s
                heapq.heappush(waiting, (arrives_at, len(turns) << 20, turn.session, following))
    return Observed(
        total_s=max(t.ended_at for t in turns) - min(t.arrived_at for t in turns) + costs.request_s,
        turn_s=statistics.fmean(t.ended_at - t.arrived_at for t in turns) + costs.request_s,
        wait_s=statistics.fmean(t.started_at - t.noticed_at for t in turns),
        cached_share=sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns),
    ), engine
