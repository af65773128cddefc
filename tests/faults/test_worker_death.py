"""Workers die and hang under load: their tasks continue in another worker to the last token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from inferd import AsyncClient, AsyncSession
from inferd.backends.errors import InferdError, WorkerCrashed
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.models import ONE_THREAD, short_smollm2
from tests.processes import running_children

pytestmark = pytest.mark.asyncio

CONFIG = "[daemon]\nworker_hang_timeout_s = 1\n" + echo_model(
    "m", slots=4, step_ms=2, abort_on="die now"
)
STORY = "Once upon a time — «über» the hills — there was a king who had three sons. " * 2


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[RunningDaemon, AsyncSession]]:
    """Yield a daemon and a session on it."""
    async with (
        running_daemon(CONFIG) as daemon,
        AsyncClient(daemon.socket) as client,
        client.session("m", raw=True) as session,
    ):
        yield daemon, session


def workers_of(daemon: RunningDaemon) -> set[int]:
    return {child.pid for child in running_children(daemon.pid)}


def new_workers(daemon: RunningDaemon, before: set[int]) -> set[int]:
    """Return the workers not in *before*, as soon as there are any."""
    for _ in range(10_000):
        if new := workers_of(daemon) - before:
            return new
        time.sleep(0.001)
    raise AssertionError("no worker was started")


def end_worker(daemon: RunningDaemon, number: int = signal.SIGKILL) -> None:
    """Send a signal to the worker, if there is one; it may still be loading."""
    for pid in workers_of(daemon):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


async def stream_turn(
    session: AsyncSession,
    text: str,
    at: dict[int, Callable[[], None]] | None = None,
    **options: object,
) -> str:
    """Stream a turn; call the action in *at* for the number of pieces received."""
    pieces: list[str] = []
    async for piece in session.stream(text, options=options or None):
        pieces.append(piece)
        if at and len(pieces) in at:
            at[len(pieces)]()
    return "".join(pieces)


async def test_streams_continue_over_several_deaths_without_losing_or_repeating_a_character() -> (
    None
):
    texts = [f"{number} {STORY}" for number in range(12)]
    received: dict[int, str] = {}
    async with running_daemon(CONFIG) as daemon, AsyncClient(daemon.socket) as client:

        async def one(number: int) -> None:
            kill = {40: lambda: end_worker(daemon)} if number in (0, 5, 11) else None
            async with client.session("m", raw=True) as session:
                received[number] = await stream_turn(session, texts[number], kill)
                assert session.metadata["output_tokens"] == len(texts[number].encode()) + 1

        async with anyio.create_task_group() as group:
            for number in range(len(texts)):
                group.start_soon(one, number)

        assert daemon.log.count("worker.died") >= 1
    assert [received[number] for number in range(len(texts))] == texts


async def test_an_answer_with_drafts_continues_after_deaths() -> None:
    """The drafts of a step that was not reported are lost, and nothing else."""
    async with talking() as (daemon, session):
        text = "the quick brown fox; " * 40
        at = {pieces: lambda: end_worker(daemon) for pieces in (30, 45)}
        output = await stream_turn(session, text, at, speculation="ngram")
        assert output == text
        assert daemon.log.count("worker.died") >= 1
        metadata = session.metadata
        assert metadata["output_tokens"] == len(text) + 1
        assert 0 < metadata["accepted_tokens"] <= metadata["drafted_tokens"]


async def test_text_held_back_for_a_stop_text_is_held_back_in_the_new_worker_too() -> None:
    async with talking() as (daemon, session):
        at = {len("one "): lambda: end_worker(daemon)}
        output = await stream_turn(session, "one stop, then STOP and no more", at, stop=["STOP"])
        assert output == "one stop, then "
        assert session.metadata["stop_reason"] == "stop"


async def test_text_held_back_for_a_pattern_is_held_back_in_the_new_worker_too() -> None:
    async with talking() as (daemon, session):
        text = "one <a> two <b and so on: c> and no more"
        at = {len("one > two "): lambda: end_worker(daemon)}
        output = await stream_turn(session, text, at, **{"stop-patterns": ["<b.*>"]})
        assert output == "one <a> two "
        assert session.metadata["stop_reason"] == "pattern"
        assert session.metadata["stop_detail"] == "<b.*>"


async def test_pulled_tokens_continue_too() -> None:
    async with talking() as (daemon, session):
        pieces = []
        async for piece in session.pull("token by token"):
            pieces.append(piece)
            if len(pieces) in (2, 7):
                end_worker(daemon)
        assert "".join(pieces) == "token by token"


async def test_the_token_limit_counts_the_tokens_of_the_previous_worker() -> None:
    async with talking() as (daemon, session):
        at = {10: lambda: end_worker(daemon)}
        output = await stream_turn(session, STORY, at, **{"n-predict": 30})
        assert output.encode() == STORY.encode()[: len(output.encode())]
        assert session.metadata["output_tokens"] == 30
        assert session.metadata["input_tokens"] == len(STORY.encode()) + 2


async def test_a_task_that_kills_its_worker_is_found_and_the_others_continue() -> None:
    texts = [f"{number} {STORY}" for number in range(7)]
    received: dict[int, str] = {}
    errors: list[WorkerCrashed] = []
    async with running_daemon(CONFIG) as daemon, AsyncClient(daemon.socket) as client:
        others_stream = anyio.Event()

        async def one(number: int) -> None:
            async with client.session("m", raw=True) as session:
                received[number] = await stream_turn(session, texts[number], {5: others_stream.set})

        async def kill_worker() -> None:
            await others_stream.wait()
            async with client.session("m", raw=True) as session:
                with pytest.raises(WorkerCrashed) as caught:
                    await stream_turn(session, "you may die now, please")
                errors.append(caught.value)

        async with anyio.create_task_group() as group:
            group.start_soon(kill_worker)
            for number in range(len(texts)):
                group.start_soon(one, number)

        assert [received[number] for number in range(len(texts))] == texts
        deaths = daemon.log.count("worker.died")
        assert deaths == 2, "once, and once more on trial"

        await kill_worker()
        assert daemon.log.count("worker.died") == deaths, (
            "it is refused for an hour without a trial"
        )
        assert [error.data["cause"] for error in errors] == ["input", "input"]


async def test_a_worker_that_hangs_is_replaced() -> None:
    async with talking() as (daemon, session):
        assert await stream_turn(session, "hello") == "hello"
        at = {10: lambda: end_worker(daemon, signal.SIGSTOP)}
        assert await stream_turn(session, STORY, at) == STORY
        end_worker(daemon, signal.SIGSTOP)
        assert await stream_turn(session, "after it hung at rest") == "after it hung at rest"
        assert daemon.log.count("worker.hung") == 2


async def test_a_worker_that_hangs_while_it_is_unloaded_is_killed() -> None:
    """Neither the call that unloads the model nor the next request for it waits for ever."""
    async with running_daemon(CONFIG) as daemon, AsyncClient(daemon.socket) as client:
        graph = await client.load_by_name("m")
        end_worker(daemon, signal.SIGSTOP)
        await client.unload(graph)
        with anyio.fail_after(60):
            await client.unload_model("m")
        assert not workers_of(daemon)
        assert daemon.log.count("worker.hung") == 1
        async with client.session("m", raw=True) as session:
            assert await stream_turn(session, "hello") == "hello"


async def test_a_replacement_worker_that_dies_while_it_loads_is_replaced() -> None:
    async with (
        running_daemon(CONFIG + "load_ms = 300\n") as daemon,
        AsyncClient(daemon.socket) as client,
        client.session("m", raw=True) as session,
        anyio.create_task_group() as group,
    ):

        async def end_the_next(before: set[int]) -> None:
            for pid in await anyio.to_thread.run_sync(new_workers, daemon, before):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        def end_two() -> None:
            group.start_soon(end_the_next, workers_of(daemon))
            end_worker(daemon)

        assert await stream_turn(session, STORY, {20: end_two}) == STORY


async def test_a_daemon_that_is_stopped_while_a_worker_starts_ends() -> None:
    async with (
        running_daemon(CONFIG + "load_ms = 300\n") as daemon,
        AsyncClient(daemon.socket) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(ignore, client.load_by_name, "m")
        await anyio.to_thread.run_sync(new_workers, daemon, set())
        assert await anyio.to_thread.run_sync(daemon.stop) == 0
        assert "model.loaded" not in daemon.log


async def ignore(call: Callable[[str], Awaitable[object]], name: str) -> None:
    with pytest.raises(InferdError):
        await call(name)


async def test_worker_queries_are_sent_again() -> None:
    async with talking() as (daemon, session):
        for _ in range(5):
            end_worker(daemon)
            assert await stream_turn(session, "hello") == "hello"


async def test_cancelled_and_abandoned_turns_do_not_restart() -> None:
    async with talking() as (daemon, session):
        stream = session.stream(STORY)
        assert await anext(stream)
        end_worker(daemon)
        await stream.aclose()
        assert await stream_turn(session, "next") == "next"
        assert not await session._client.queue()


@pytest.mark.model
async def test_sixteen_streams_of_a_real_model_continue(tmp_path: Path) -> None:
    config = f'{ONE_THREAD}[models.m]\nfile = "{short_smollm2()}"\nslots = 16\nctx-size = 256\n'
    options = {"n-predict": 14, "ignore-eos": True, "temp": 0.8, "seed": 7}
    async with running_daemon(config) as daemon, AsyncClient(daemon.socket) as client:

        async def one(number: int) -> None:
            async with client.session("m", raw=True) as session:
                stream = session.stream(f"Tale number {number}: once", options=options)
                text, pieces = "", 0
                async for piece in stream:
                    text, pieces = text + piece, pieces + 1
                    if (number, pieces) in ((3, 4), (8, 9)):
                        end_worker(daemon)
                assert len(stream.tokens) == 14
                assert stream.metadata["output_tokens"] == 14
                output = await client.detokenize(session.graph, stream.tokens)
                assert text == output.decode(errors="replace")

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(one, number)
        assert daemon.log.count("worker.died") >= 1
