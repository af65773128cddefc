"""Scenario of models swapped under streams: the streams' pauses and the new model's first turn.

Most streams of a run are turns, labelled with the fingerprint that answered. The others are the
operator's actions: loads of one model alone, and swaps.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from bench import daemon, texts
from bench import streams as s
from bench.clients import Request, gather_all
from bench.daemon import Inferd, StreamClient
from bench.machine import MODEL
from bench.runs import Figure, Target
from bench.streams import Stream, gap_worst_s
from inferd import AsyncClient
from inferd.backends.errors import Busy
from tools.get_models import MODELS_DIR, SOURCES

from .base import INFERD, Scenario, Side, Started, Work

T = TypeVar("T")
PROGRAMS, TOKENS = 16, 48
SLOTS = PROGRAMS + 1
"""One more than programs, for the request that goes to the new model at once."""
CTX_SIZE, HISTORY_MAX = 1024, 500
SWAPS, APART_S = 2, 1.5
ONE = f"{INFERD}, one vocabulary"
TWO = f"{INFERD}, two vocabularies"
OTHERS = {
    ONE: (SOURCES["smollm2"].file, SLOTS + 1),
    TWO: (SOURCES["gemma3"].file, SLOTS),
}
"""The file and the slots of the model to which each side swaps. With other slots, the same file is
another model.
"""
LOAD, SWAP = "load", "swap"


def configuration(side: str) -> str:
    """Return the configuration of a side, with both models of the swap."""
    file, slots = OTHERS[side]
    text = daemon.configuration(SLOTS, CTX_SIZE)
    return f"""{text}
[models.first]
file = "{MODEL}"
[models.second]
file = "{MODELS_DIR / file}"
slots = {slots}
"""


class Programs:
    """Programs that run turn after turn until `over` is set."""

    def __init__(self, work: Work):
        self.work, self.rng = work, work.rng()
        self.count, self.tokens = (4, 16) if work.small else (PROGRAMS, TOKENS)
        self.turns: list[Stream] = []
        self.swaps: list[Stream] = []
        self.over = False
        self._answered_by: dict[StreamClient, str] = {}
        """The fingerprint that answered a program's last turn."""
        self._turned = asyncio.Condition()

    async def run_program(self, client: StreamClient) -> None:
        """Run one program."""
        name = texts.names(self.rng, 1)[0]
        while not self.over:
            text = f"{self.work.mark} {texts.question(self.rng, name)}"
            turn = await send_turn(client, Request(text, self.tokens, name))
            self.turns.append(turn)
            if turn.input_tokens > HISTORY_MAX:
                await client.client.reset(client.session.context)
            async with self._turned:
                self._answered_by[client] = turn.label
                self._turned.notify_all()

    async def wait_settled(self, fingerprint: str = "") -> None:
        """Wait until one model has answered the last turn of every program, or until a turn has
        failed. With *fingerprint*, wait for that model.
        """
        async with self._turned:
            await self._turned.wait_for(partial(self._is_settled, fingerprint))

    def _is_settled(self, fingerprint: str) -> bool:
        last = list(self._answered_by.values())
        one = len(last) == self.count and len(set(last)) == 1 and fingerprint in ("", last[0])
        return one or any(turn.error for turn in self.turns)


async def send_turn(client: StreamClient, request: Request) -> Stream:
    """Return a turn, labelled with the fingerprint that answered it."""
    turn = await client.send_request(request)
    if turn.error:
        return turn
    return replace(turn, label=str(client.session.metadata["fingerprint"]))


async def timed(label: str, call: Callable[[], Awaitable[T]]) -> tuple[Stream, T]:
    """Return the duration of a call, as a stream of one piece, and its result."""
    requested_s = time.perf_counter()
    result = await call()
    return Stream(requested_s, (time.perf_counter(),), 1, 1, label), result


async def load_alone(client: AsyncClient, name: str) -> Stream:
    """Load a model while nothing runs, and unload it again, twice.

    The first load also estimates its memory and reads its file from disk.
    """
    for _ in range(2):
        load, graph = await timed(LOAD, lambda: client.load_by_name(name))
        await client.unload(graph)
        await client.unload_model(name, force=True)
    return replace(load, label=f"{LOAD} {graph.fingerprint}")


async def swap(client: AsyncClient, to: str) -> Stream:
    """Swap as soon as the previous swap is over."""
    while True:
        try:
            call, done = await timed(SWAP, lambda: client.swap(MODEL.stem, to))
        except Busy:
            await asyncio.sleep(0.05)
        else:
            return replace(call, label=f"{SWAP} {done.previous_fingerprint} {done.fingerprint}")


async def swap_under(programs: Programs, probe: StreamClient) -> None:
    """Swap there and back while the programs talk. Each swap begins when one model alone answers,
    and the new model gets a request at once.
    """
    await programs.wait_settled()
    for number in range(SWAPS):
        await asyncio.sleep(APART_S)
        done = await swap(probe.client, ("second", "first")[number % 2])
        programs.swaps.append(done)
        text = f"{programs.work.mark} {number}"
        programs.turns.append(await send_turn(probe, Request(text, 4)))
        await probe.client.reset(probe.session.context)
        await programs.wait_settled(done.label.split()[-1])
    programs.over = True


def side_of(server: Inferd) -> Side:
    """Return the side that runs on *server*."""

    async def side(work: Work) -> list[Stream]:
        programs = Programs(work)
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(server.client()) for _ in range(programs.count + 1)
            ]
            operator = clients[-1].client
            loads = [await load_alone(operator, name) for name in ("first", "second")]
            for client in clients:
                await client.open_session()
            talking = [programs.run_program(client) for client in clients[:-1]]
            await gather_all([swap_under(programs, clients[-1]), *talking])
        return [*loads, *programs.swaps, *programs.turns]

    return side


@dataclass(frozen=True)
class Swap:
    """A swap from one model to another, by their fingerprints, and the time until the next swap."""

    call: Stream
    until_s: float

    @property
    def before(self) -> str:
        """Fingerprint of the old model."""
        return self.call.label.split()[1]

    @property
    def after(self) -> str:
        """Fingerprint of the new model."""
        return self.call.label.split()[2]

    def step_s(self, turns: Sequence[Stream]) -> float:
        """Return the old model's step just before the swap: the median gap of its streams."""
        gaps = (gap for turn in turns if turn.label == self.before for gap in turn.gaps())
        requested_s = self.call.requested_s
        return statistics.median(
            b - a for a, b in gaps if requested_s - APART_S <= a < b <= requested_s
        )

    def silence_steps(self, turns: Sequence[Stream]) -> float:
        """Return the longest silence of a stream after the swap, in steps before it."""
        return gap_worst_s(turns, self.call.requested_s, self.until_s) / self.step_s(turns)

    def begins_s(self, turns: Sequence[Stream]) -> float:
        """Return the time from the request for the swap until the new model began to compute a
        turn. It is at least the duration of the swap.
        """
        new = [t for t in turns if t.label == self.after and t.first_s >= self.call.ended_s]
        begun_s = min(turn.requested_s + turn.waited_s for turn in new)
        return max(begun_s, self.call.ended_s) - self.call.requested_s


def swaps_of(streams: Sequence[Stream]) -> Iterator[Swap]:
    """Yield the swaps among *streams* in order."""
    calls = sorted((x for x in streams if x.label.startswith(SWAP)), key=lambda x: x.requested_s)
    ends_s = [*(x.requested_s for x in calls[1:]), max(x.ended_s for x in streams)]
    for call, end_s in zip(calls, ends_s, strict=True):
        yield Swap(call, end_s)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the worst silence of a stream, and how much later a turn begins than after a load
    alone.
    """
    s.check_complete(streams)
    loads = {x.label.split()[1]: x.ttft_s for x in streams if x.label.startswith(LOAD)}
    turns = [x for x in streams if x.label.split()[0] not in (LOAD, SWAP)]
    swaps = list(swaps_of(streams))
    known = {fingerprint for swap in swaps for fingerprint in (swap.before, swap.after)}
    assert {turn.label for turn in turns} <= known, "a turn of a model outside the swaps"
    silences = [swap.silence_steps(turns) for swap in swaps]
    return {
        "silence_steps": max(silences),
        "silence_median_steps": statistics.median(silences),
        "late_s": max(swap.begins_s(turns) - loads[swap.after] for swap in swaps),
        "begins_s": statistics.median(swap.begins_s(turns) for swap in swaps),
        "load_s": statistics.median(loads.values()),
        "turns": len(turns),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon for each side."""
    running = {
        name: await stack.enter_async_context(daemon.running(configuration(name)))
        for name in OTHERS
    }
    return Started({name: side_of(server) for name, server in running.items()}, {})


SCENARIO = Scenario(
    name="swap",
    title="Swapping models under streams",
    about=f"""\
{PROGRAMS} programs run turn after turn of {TOKENS} tokens while the model behind their name is
swapped {SWAPS} times, there and back; each swap comes {APART_S:g} s after the new model has
answered a turn of every program. **{ONE}** swaps between SmolLM2 135M and the same model with one
more slot; **{TWO}** between SmolLM2 135M and Gemma 3 270M. A run in which a turn failed or was cut
short is rejected. The silence is the longest pause of a stream within a turn, in steps (the median
gap between its tokens) of the old model before the swap. A load alone runs beside nothing and is
the model's second: the first also estimates its memory. A turn begins when its computation begins,
counted from the request for the swap. {SLOTS} slots of {CTX_SIZE} tokens.""",
    figures=(
        Figure("silence_steps", "worst silence of a stream, steps", 1),
        Figure("silence_median_steps", "median of the swaps' worst silences, steps", 1),
        Figure("late_s", "new model's first turn begins after a load alone, worst, s"),
        Figure("begins_s", "new model's first turn begins, median, s"),
        Figure("load_s", "a load alone, s"),
        Figure("turns", "turns, all answered", 0),
    ),
    targets=tuple(
        target
        for side in OTHERS
        for target in (
            Target("silence_steps", side, most=5.0),
            Target("late_s", side, most=0.5),
        )
    ),
    start=start,
    measure=measure,
    pictures=(),
)
