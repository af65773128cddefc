"""Turns of a runner on a real daemon, without HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from inferd import AsyncClient
from inferd.backends.errors import QuotaExceeded, Timeout
from inferd.gateways.http.callers.caller import Caller
from inferd.gateways.http.limits import Limits
from inferd.gateways.http.turns import Answer, ConnectionPool, TurnRequest, TurnRunner
from inferd.testing import RunningDaemon
from tests.echo import echo_model

pytestmark = pytest.mark.asyncio
CONFIG = echo_model("echo")


@asynccontextmanager
async def runner_of(daemon: RunningDaemon, **limits: float) -> AsyncIterator[TurnRunner]:
    """Yield a runner whose callers are all the test's own user."""
    pool = ConnectionPool(lambda _: AsyncClient(daemon.socket), 1)
    runner = TurnRunner(pool, Limits(**limits))  # type: ignore[arg-type]
    try:
        yield runner
    finally:
        runner.precheck.close()
        await pool.close()


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
