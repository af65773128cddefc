"""The load of a node, from a daemon's answers to `stats`, `models` and `queue`, and its reports to
the entries that are connected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import anyio

from ....backends.errors import ConnectionLost, InferdError
from ....ipc.client import AsyncClient
from ....wire.frames import pack_frame
from ..link import BUFFER_BYTES, PING_S, REPORT_S, ReportKind, set_options
from ..routing.choice import TURN_TOKENS
from ..routing.loads import CLASSES, NONE, TOKEN_S_DEFAULT, ByClass, ModelLoad, NodeLoad

ANSWER_TOKENS_MIN = 16
"""Tokens that an answer is expected to have still to come, however long it is already."""
LOAD_S_MIN, LOAD_BYTES_S = 1.0, 500e6
"""Assumed for a load: the time to start a worker, and the bytes of the file read in a second."""
PROMPT_STEP_TOKENS = 512
"""Tokens of a step of a long prompt."""
LEARN = 0.2
"""Weight of the newest interval in the learned time of a token."""


class TokenTimeLearner:
    """The time that each model's engine takes for a token while it has work, learned from its
    counters. Owned by the reporter.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._last: dict[str, tuple[float, int, bool]] = {}

    def observe(self, model: str, now: float, tokens: int, *, has_work: bool) -> None:
        """Note that an engine has computed *tokens* so far. An interval counts if the engine had
        work at both of its ends.
        """
        before = self._last.get(model)
        self._last[model] = now, tokens, has_work
        if before is None or not (has_work and before[2]):
            return
        seconds, computed = now - before[0], tokens - before[1]
        if seconds > 0 and computed > 0:
            known = self._times.get(model, seconds / computed)
            self._times[model] = known + LEARN * (seconds / computed - known)

    def token_s(self, model: str) -> float:
        """Return the learned time, or an assumption before the first one is learned."""
        return self._times.get(model, TOKEN_S_DEFAULT)


def node_load(
    instance: int,
    stats: Mapping[str, Any],
    models: Sequence[Mapping[str, Any]],
    tasks: Iterable[Mapping[str, Any]],
    times: TokenTimeLearner,
) -> NodeLoad:
    """Return the load that a daemon's answers describe. Models from descriptors belong to one
    connection, and are left out. All names of a model have the load of its process.
    """
    bases = {model["name"]: model.get("of") or model["name"] for model in models}
    queues: dict[str, _Queue] = {base: _Queue() for base in bases.values()}
    for task in tasks:
        if task["model"] in bases:
            queues[bases[task["model"]]].add_task(task)
    return NodeLoad(
        instance=instance,
        draining=stats["draining"],
        sessions=stats["sessions"] + stats["sessions_waiting"],
        sessions_max=stats["sessions_max"],
        free_bytes=stats["memory"].get("load_free_bytes"),
        evictable_bytes=stats["memory"].get("load_evictable_bytes", 0),
        models={
            model["name"]: _model_load(
                model,
                queues[bases[model["name"]]],
                times.token_s(bases[model["name"]]),
                prompt_token_s(stats["models"].get(bases[model["name"]], {})),
            )
            for model in models
            if model["file"] or model["backend"] == "echo"
        },
    )


def prompt_token_s(counters: Mapping[str, Any]) -> float | None:
    """Return the time of a token of a long prompt, by the step cost that the engine has learned."""
    cost = counters.get("step_cost")
    if cost is None:
        return None
    mean_s = cost["ubatch_s"] / PROMPT_STEP_TOKENS + cost["token_s"]
    seconds: float = max(cost["token_s_least"], mean_s)
    return seconds


def _model_load(
    model: Mapping[str, Any], queue: _Queue, token_s: float, prompt_token_s: float | None
) -> ModelLoad:
    return ModelLoad(
        loaded=model["state"] == "ready",
        loading=model["state"] == "loading",
        failed=model["state"] == "failed",
        slots=model["slots"],
        running=as_counts(queue.running),
        waiting=as_counts(queue.waiting),
        running_tokens=as_counts(queue.running_tokens),
        waiting_tokens=as_counts(queue.waiting_tokens),
        token_s=token_s,
        prompt_token_s=prompt_token_s,
        load_s=_load_s(model),
        need_bytes=model.get("need_bytes"),
    )


def _load_s(model: Mapping[str, Any]) -> float:
    """Return the time of a load: that of the last load, or an estimate by the file's size; for a
    load under way, the rest.
    """
    load_s: float = model.get("load_s") or LOAD_S_MIN + model["size_bytes"] / LOAD_BYTES_S
    return load_s * (1 - model["progress"]) if model["state"] == "loading" else load_s


class _Queue:
    """The turns of a model by class, and the tokens that they still compute."""

    def __init__(self) -> None:
        self.running, self.waiting = [*NONE], [*NONE]
        self.running_tokens, self.waiting_tokens = [*NONE], [*NONE]

    def add_task(self, task: Mapping[str, Any]) -> None:
        """Count a turn in the answer to `queue`."""
        at = CLASSES.index(task["effective_priority"] or task["priority"])
        if task["state"] == "running" and not task["position"]:
            turns, tokens = self.running, self.running_tokens
        else:
            turns, tokens = self.waiting, self.waiting_tokens
        turns[at] += 1
        tokens[at] += tokens_left(task)


def tokens_left(task: Mapping[str, Any]) -> int:
    """Return the tokens that a turn is expected to compute from now on."""
    computed, written = int(task["computed_tokens"] or 0), int(task["output_tokens"])
    prompt = max(0, int(task["prompt_tokens"]) - computed)
    return prompt + max(ANSWER_TOKENS_MIN, TURN_TOKENS - written)


def as_counts(numbers: list[int]) -> ByClass:
    """Return four numbers as a tuple."""
    low, normal, high, urgent = numbers
    return low, normal, high, urgent


CALL_S_MAX = 5.0
"""Time that the daemon has to answer before it counts as not reachable."""


class LoadQuery:
    """Queries a daemon repeatedly, and learns its engines' times for a token from that."""

    def __init__(self) -> None:
        self._times = TokenTimeLearner()

    async def run(self, client: AsyncClient) -> NodeLoad:
        """Return the load.

        :raises InferdError: the daemon was lost, or does not answer.
        """
        with anyio.move_on_after(CALL_S_MAX):
            tasks = await client.queue(all_users=True)
            stats = await client.stats()
            # After `stats`, so that memory which a model has just left is not yet free in the load.
            models: list[Any] = await client.models()
            now = time.monotonic()
            for name, counters in stats["models"].items():
                if "batch_tokens" in counters:  # a graph has none
                    has_work = bool(counters["running"])
                    self._times.observe(name, now, counters["batch_tokens"], has_work=has_work)
            return node_load(client.server.instance, stats, models, tasks, self._times)
        raise ConnectionLost(f"the daemon has not answered within {CALL_S_MAX:g} s")


RETRY_S = 0.2


class Subscriber(asyncio.Protocol):
    """An entry's report connection. *on_change* is called when it opens and when it ends."""

    def __init__(self, on_change: Callable[[Subscriber, bool], object]):
        self._on_change = on_change
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to receive reports."""
        self._transport = cast("asyncio.Transport", transport)
        set_options(transport.get_extra_info("socket"))
        self._on_change(self, True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_change(self, False)

    def data_received(self, data: bytes) -> None:
        """End: an entry sends nothing here."""
        self.end()

    def send(self, frame: bytes) -> None:
        """Send a frame. An entry that reads nothing misses it; the next frame replaces it."""
        assert self._transport is not None
        if self._transport.get_write_buffer_size() < BUFFER_BYTES:
            self._transport.write(frame)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class LoadReporter:
    """Queries the daemon while an entry listens, and sends every entry the same reports. Lives on
    the relay's event loop. *connect* makes a client of the daemon.
    """

    def __init__(self, connect: Callable[[], AsyncClient]):
        self._connect = connect
        self._subscribers: set[Subscriber] = set()
        self._wanted = anyio.Event()
        self._query = LoadQuery()
        self._state = b""
        """The frames with which an entry begins: the daemon's hello and last load, or its loss."""

    def new_subscriber(self) -> Subscriber:
        """Return the protocol of a new report connection."""
        return Subscriber(self._change_subscriber)

    def _change_subscriber(self, subscriber: Subscriber, is_open: bool) -> None:
        if is_open:
            self._subscribers.add(subscriber)
            subscriber.send(pack_frame([ReportKind.PING]) + self._state)
            self._wanted.set()
        else:
            self._subscribers.discard(subscriber)

    def close(self) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber.end()

    async def run(self) -> None:
        """Report until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_pings)
            while True:
                await self._wait_wanted()
                try:
                    async with self._connect() as client:
                        await self._report(client)
                except InferdError as exc:
                    self._publish(pack_frame([ReportKind.DAEMON_LOST, exc.to_wire()]))
                await anyio.sleep(RETRY_S)

    async def _wait_wanted(self) -> None:
        if not self._subscribers:
            self._wanted = anyio.Event()
            self._state = b""  # what was known is old when the next entry comes
            await self._wanted.wait()

    async def _report(self, client: AsyncClient) -> None:
        """Report while entries listen.

        :raises InferdError: the daemon was lost, or does not answer.
        """
        hello = pack_frame([ReportKind.HELLO, client.server])
        begin = hello
        while self._subscribers:
            load = await self._query.run(client)
            self._publish(begin + pack_frame([ReportKind.LOAD, load]), hello)
            begin = b""
            await anyio.sleep(REPORT_S)

    def _publish(self, frames: bytes, hello: bytes = b"") -> None:
        self._state = frames if frames.startswith(hello) else hello + frames
        for subscriber in tuple(self._subscribers):
            subscriber.send(frames)

    async def _send_pings(self) -> None:
        while True:
            await anyio.sleep(PING_S)
            for subscriber in tuple(self._subscribers):
                subscriber.send(pack_frame([ReportKind.PING]))
