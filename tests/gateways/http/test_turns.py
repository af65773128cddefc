"""Turns of a runner on a real daemon, without HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from inferd import AsyncClient, Piece, QueueEvent, Tensor
from inferd.backends.errors import ConnectionLost, QuotaExceeded, Timeout
from inferd.gateways.http.callers import Caller
from inferd.gateways.http.limits import Limits
from inferd.gateways.http.turns import Answer, ConnectionPool, TurnRequest, TurnRunner, pool
from inferd.gateways.http.turns.answers import TurnProgress
from inferd.ipc.names import Priority
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model

pytestmark = pytest.mark.asyncio
CONFIG = echo_model("echo") + echo_model("slow", step_ms=20)


@asynccontextmanager
async def runner_of(daemon: RunningDaemon, **limits: float) -> AsyncIterator[TurnRunner]:
    """Yield a runner whose callers are all the test's own user."""
    connections = ConnectionPool(lambda _: AsyncClient(daemon.socket, reconnect=True), 1)
    runner = TurnRunner(connections, Limits(**limits))  # type: ignore[arg-type]
    try:
        yield runner
    finally:
        runner.precheck.close()
        await connections.close()


async def test_an_answer_is_charged_before_its_note_is_stored(daemon: RunningDaemon) -> None:
    """A client that disconnects meanwhile has used its tokens. An exception stands for that."""
    caller = Caller(name="ada", tokens_per_minute=1)

    def note(_: Answer) -> bytes:
        raise ConnectionAbortedError

    request = TurnRequest(model="echo", prompt="hello", session_id="noted", note=note)
    async with runner_of(daemon) as runner:
        with pytest.raises(ConnectionAbortedError):
            await runner.collect(caller, request)
        with pytest.raises(QuotaExceeded):
            runner.quotas.begin_request(caller, time.monotonic())


class LeavingReader:
    """A reader whose client disconnects at the first piece."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()

    def note_opened(self, first: int) -> None: ...
    def note_place(self, answer: int, place: QueueEvent) -> None: ...
    def note_accepted(self, answer: int) -> None: ...
    def add_progress(self, answer: int, progress: TurnProgress) -> None: ...
    async def write_added(self) -> None: ...
    async def write_end(self, answer: int, end: Answer) -> None: ...

    def add_piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> None:
        self.scope.cancel()

    def write_now(self) -> bool:
        return False


async def test_a_client_that_disconnects_is_not_charged_for_cached_tokens(
    daemon: RunningDaemon,
) -> None:
    caller = Caller(name="ada", tokens_per_minute=1000)
    request = TurnRequest(model="slow", prompt="x" * 400, session_id="left")
    async with runner_of(daemon) as runner:
        first = await runner.collect(caller, replace(request, options={"n-predict": 1}))
        used = first[0].input_tokens + first[0].output_tokens
        reader = LeavingReader()
        with reader.scope:
            await runner.stream(caller, replace(request, prompt="and more"), reader)
        assert reader.scope.cancelled_caught
        runner.quotas.charge_tokens(caller, 1000 - used - 100, time.monotonic())
        runner.quotas.begin_request(caller, time.monotonic())  # at least one is left


async def test_all_prompts_are_detokenized_within_one_time(daemon: RunningDaemon) -> None:
    prompts = [[ord(letter)] for letter in "ab"] * 500
    async with runner_of(daemon) as runner:
        texts = await runner.detokenize(Caller(), "echo", prompts)
        began = time.monotonic()
        await runner.detokenize(Caller(), "echo", prompts[:1])
        once_s = time.monotonic() - began
    assert len(texts) == len(prompts) and texts[0] != texts[1]
    async with runner_of(daemon, turn_s_max=max(20 * once_s, 0.05)) as runner:
        with pytest.raises(Timeout):
            await runner.detokenize(Caller(), "echo", prompts * 20)


async def leases(daemon: RunningDaemon) -> int:
    async with AsyncClient(daemon.socket) as client:
        return next(info["leases"] for info in await client.models() if info["name"] == "echo")


async def test_requests_at_the_same_time_share_a_lease_until_the_last_one_ends(
    daemon: RunningDaemon,
) -> None:
    caller = Caller(name="ada")
    async with runner_of(daemon) as runner:
        async with runner.lease_graph(caller, "echo") as (_, first):
            async with runner.lease_graph(caller, "echo") as (_, second):
                assert (first, await leases(daemon)) == (second, 1)
            assert await leases(daemon) == 1
        assert await leases(daemon) == 0


async def test_a_request_gets_a_new_lease_after_a_while(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SHARED_S", 0.0)
    caller = Caller(name="ada")
    async with runner_of(daemon) as runner:
        lease = partial(runner.lease_graph, caller, "echo")
        async with lease() as (_, first), lease() as (_, second):
            assert (first != second, await leases(daemon)) == (True, 2)
        assert await leases(daemon) == 0


async def test_a_lease_ends_with_its_connection(daemon: RunningDaemon) -> None:
    caller = Caller(name="ada")
    async with runner_of(daemon) as runner, runner.lease_graph(caller, "echo") as (client, first):
        client._open_connection.lose(ConnectionLost("by the test"))
        async with runner.lease_graph(caller, "echo") as (_, second):
            assert second != first


async def test_all_whole_answers_of_a_request_end_their_reasoning(daemon: RunningDaemon) -> None:
    """Of a request that several answers are computed for, without a stream."""
    thought = "<think>" + "0123456789" * 12 + "</think>The answer."
    caller = Caller(name="ada")
    request = TurnRequest(
        model="slow",
        prompt=[{"role": "user", "content": thought}],
        options={"reasoning-format": "deepseek"},
        answers=3,
        answer_id="several",
    )
    async with runner_of(daemon) as runner, anyio.create_task_group() as group:
        assert await runner.end_reasoning(caller, "several") == []
        found = list[Answer]()

        async def collect() -> None:
            found.extend(await runner.collect(caller, request))

        group.start_soon(collect)
        ended = set[int]()
        while not found and len(ended) < request.answers:
            results = await runner.end_reasoning(caller, "several")
            ended |= {number for number, result in enumerate(results) if result.ended}
            await anyio.lowlevel.checkpoint()
    assert len(found) == 3
    assert ended == {0, 1, 2}
    assert [len(answer.reasoning) < 100 for answer in found] == [True] * 3
    assert [answer.text[-11:] for answer in found] == ["The answer."] * 3
    assert all(answer.metadata["reasoning_tokens"] < 100 for answer in found)


TENSOR = Tensor(data=bytes(8), dimensions=[2], type="fp32")


@asynccontextmanager
async def keeping(runner: TurnRunner) -> AsyncIterator[None]:
    """Keep leases on graphs for a while."""
    async with anyio.create_task_group() as group:
        group.start_soon(runner.pool.run)
        await anyio.lowlevel.checkpoint()
        yield
        group.cancel_scope.cancel()


@asynccontextmanager
async def context_of(runner: TurnRunner, priority: Priority = "normal") -> AsyncIterator[int]:
    """Yield the context of a computation."""
    lease = runner.pool.lease_context(Caller(), "echo", priority=priority, queue_timeout=60)
    async with lease as (client, context, _):
        await client.compute(context, {"x": TENSOR})
        yield context


async def take_no_memory(_: int) -> None:
    raise AssertionError("the outputs fit into a reply")


async def has_no_lease(daemon: RunningDaemon) -> bool:
    return await leases(daemon) == 0


async def has_expired(client: AsyncClient) -> bool:
    return bool((await client.stats())["sessions_expired"])


async def wait_true(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(60):
        for _ in count():
            if await condition():
                return
            await anyio.sleep(0.01)


async def test_a_context_is_kept_for_the_next_computation_for_a_while(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with runner_of(daemon) as runner:
        async with context_of(runner) as first:
            pass
        assert await leases(daemon) == 0, "nothing would end it"
        async with keeping(runner):
            async with context_of(runner) as second, context_of(runner) as other:
                assert len({first, second, other}) == 3
            async with context_of(runner) as third, context_of(runner, "low") as low:
                assert third in (second, other) and await leases(daemon) == 1
                assert low not in (second, other)
            await runner.pool.end_kept()
            assert await leases(daemon) == 0
            monkeypatch.setattr(pool, "IDLE_S", 0.01)
            async with context_of(runner) as last:
                assert last not in (second, other)
            await wait_true(lambda: has_no_lease(daemon))


async def test_a_context_is_not_used_again_after_an_error(daemon: RunningDaemon) -> None:
    async with runner_of(daemon) as runner, keeping(runner):
        with pytest.raises(ConnectionAbortedError):
            async with context_of(runner) as first:
                raise ConnectionAbortedError
        async with context_of(runner) as second:
            assert second != first


async def test_at_most_some_contexts_are_kept(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CONTEXTS_MAX", 1)
    async with runner_of(daemon) as runner, keeping(runner):
        async with context_of(runner) as first, context_of(runner) as second:
            pass
        async with context_of(runner) as third, context_of(runner) as fourth:
            assert third == second and fourth not in (first, second)


async def test_a_context_that_has_expired_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_S", 600.0)
    monkeypatch.setattr(pool, "SHARED_S", 600.0)
    config = "[daemon]\nidle-timeout-ms = 20\n" + CONFIG
    async with running_daemon(config) as own, runner_of(own) as runner, keeping(runner):
        async with AsyncClient(own.socket) as client:
            async with context_of(runner):
                pass
            await wait_true(lambda: has_expired(client))
        inputs = [("x", TENSOR)]
        outputs = await runner.compute_tensors(
            Caller(), "echo", inputs, "normal", 60, take_no_memory
        )
        assert outputs[0][1].data == TENSOR.data
