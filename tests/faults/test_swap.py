"""Swapping models under load: no request fails, and one model computes each turn."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from inferd import AsyncClient, AsyncSession, Metadata
from inferd.backends.errors import (
    Busy,
    Cancelled,
    InvalidArgument,
    LoadFailed,
    ModelNotFound,
    OutOfMemory,
    Timeout,
    UnsupportedOperation,
)
from inferd.daemon.models.swap import SWAPS_WAITING_MAX, Mode
from inferd.ipc.messages import SwapResult
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.faults.test_worker_death import workers_of
from tests.models import ONE_THREAD, short_smollm2
from tests.repetitions import repetitions
from tests.small_gemma import small_gemma3
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.asyncio

CONFIG = """
[daemon]
swap_grace_s = 60
[models.broken]
file = "no-such-file.gguf"
"""
CONFIG += echo_model("live", slots=16, step_ms=1)
CONFIG += echo_model("one", slots=16, step_ms=1, variant="one")
CONFIG += echo_model("two", slots=16, step_ms=1, variant="two")
CONFIG += echo_model("other", slots=16, step_ms=1, vocabulary=7)
SLOW = CONFIG.replace("step_ms = 1", "step_ms = 4")
"""Models slow enough that sixteen streams leave CPU time to the loads, and a turn of some sentences
outlasts a swap.
"""
SHORT_GRACE = SLOW.replace("swap_grace_s = 60", "swap_grace_s = 0.1")
ONE_SLOT = CONFIG.replace("slots = 16", "slots = 1")
TIGHT = """
[daemon]
memory_bytes = 100_000
[models.broken]
file = "no-such-file.gguf"
"""
TIGHT += echo_model("live", weight_bytes=50_000)
TIGHT += echo_model("heavy", weight_bytes=40_000, token_bytes=1, variant="heavy")
TIGHT += echo_model("light", variant="light") + echo_model("huge", weight_bytes=200_000)
STORY = "Once upon a time there was a king who had three sons. "


@pytest.mark.parametrize(
    ("other", "mode"), [("two", "migrate"), ("other", "migrate"), ("other", "drain")]
)
async def test_swaps_under_sixteen_streams_and_no_request_fails(other: str, mode: Mode) -> None:
    """Between models of one vocabulary, and between two vocabularies."""
    turns = 0
    async with running_daemon(SLOW) as daemon, AsyncClient(daemon.socket) as client:
        graph = await client.load_by_name("live")
        fingerprints = {graph.fingerprint}
        swapped, ended = anyio.Event(), anyio.Semaphore(0)

        async def talk(number: int) -> None:
            nonlocal turns
            seen = set()
            async with client.session("live", raw=True) as session:
                while not swapped.is_set():
                    text = f"{number} {turns} {STORY}"
                    output = "".join([p async for p in session.stream(text)])
                    assert output == text, session.metadata
                    seen.add(session.metadata["fingerprint"])
                    turns += 1
                    ended.release()
                    if session.metadata["input_tokens"] > 400:
                        await client.reset(session.context)
            assert seen <= fingerprints

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(talk, number)
            for number in range(repetitions(3)):
                await ended.acquire()  # a turn, so that others are under way
                fingerprints.add(await swap(client, ("one", other)[number % 2], mode))
            swapped.set()
        assert len(fingerprints) == 3
        assert turns > 16
        await await_one_worker(daemon)
        assert await client.init_execution_context(graph), "the handle is the name's"


@asynccontextmanager
async def talking(config: str) -> AsyncIterator[tuple[RunningDaemon, AsyncClient, AsyncSession]]:
    """Yield a daemon, a client of it, and a session on `live`."""
    async with (
        running_daemon(config) as daemon,
        AsyncClient(daemon.socket) as client,
        client.session("live", raw=True) as session,
    ):
        yield daemon, client, session


async def swap(client: AsyncClient, to: str, mode: Mode = "migrate") -> str:
    """Swap `live` once the previous swap has ended, and return the new fingerprint."""
    done = await client.swap("live", to, mode=mode)
    assert done.mode == mode
    return done.fingerprint


async def state_of(client: AsyncClient, session: AsyncSession) -> str:
    """Return the state of a session."""
    found = await client.sessions()
    return next(str(s["state"]) for s in found if s["context"] == session.context)


async def await_event(daemon: RunningDaemon, event: str) -> None:
    """Wait until the daemon has logged an *event*."""
    with anyio.fail_after(60):
        while True:
            if daemon.log.count(event):
                return
            await anyio.sleep(0.01)


async def await_state(client: AsyncClient, session: AsyncSession, state: str) -> None:
    """Wait until a session is in *state*."""
    with anyio.fail_after(60):
        while True:
            if await state_of(client, session) == state:
                return
            await anyio.sleep(0.01)


async def compute_refused(client: AsyncClient, session: AsyncSession) -> None:
    """Compute; expect a refusal that may be retried."""
    with pytest.raises(Busy, match="before the turn had begun"):
        await client.compute(session.context)


async def set_input_fails(client: AsyncClient, session: AsyncSession) -> None:
    """Set an input; expect the error that the model cannot be loaded."""
    with pytest.raises(LoadFailed):
        await client.set_input(session.context, 0, b"b")


async def await_one_worker(daemon: RunningDaemon) -> None:
    """Wait until only one worker is left."""
    for _ in range(1000):
        if len(workers_of(daemon)) == 1:
            return
        await anyio.sleep(0.01)
    raise AssertionError("the old model's worker was not unloaded")


async def test_a_turn_ends_on_its_model_and_the_next_runs_on_the_new_model() -> None:
    async with talking(CONFIG) as (_, client, session):
        stream = session.stream(STORY * 3)
        output = await anext(stream)
        before = session.graph.fingerprint
        after = (await client.swap("live", "one")).fingerprint
        output += "".join([p async for p in stream])
        assert output == STORY * 3
        assert stream.metadata["fingerprint"] == before != after
        assert await session.chat("next") == "next"
        assert session.metadata["fingerprint"] == after


async def test_a_swap_waits_until_the_old_worker_of_the_previous_one_has_ended() -> None:
    async with talking(CONFIG) as (daemon, client, session):
        stream = session.stream(STORY)
        output = await anext(stream)
        [old] = workers_of(daemon)
        os.kill(old, signal.SIGSTOP)
        first = await client.swap("live", "one")
        with pytest.raises(Timeout):
            await client.swap("live", "two", timeout=0.2)

        undone: list[SwapResult] = []

        async def undo() -> None:
            undone.append(await client.swap("live", "live"))

        async with anyio.create_task_group() as group:
            group.start_soon(undo)
            await anyio.wait_all_tasks_blocked()
            await client.stats()
            assert not undone
            os.kill(old, signal.SIGCONT)
            output += "".join([p async for p in stream])
        assert output == STORY
        [second] = undone
        assert second.fingerprint == first.previous_fingerprint
        assert second.previous_fingerprint == first.fingerprint, (
            "the swap that timed out did nothing"
        )
        assert await session.chat("next") == "next"
        assert session.metadata["fingerprint"] == second.fingerprint


async def test_a_swap_fails_at_once_if_too_many_wait() -> None:
    async with talking(CONFIG) as (daemon, client, session):
        stream = session.stream(STORY)
        output = await anext(stream)
        [old] = workers_of(daemon)
        os.kill(old, signal.SIGSTOP)
        await client.swap("live", "one")
        fingerprints: list[str] = []

        async def swap_once(to: str) -> None:
            try:
                fingerprints.append((await client.swap("live", to)).fingerprint)
            except Busy as exc:
                assert exc.hint == "try again once they have ended"
                os.kill(old, signal.SIGCONT)

        async with anyio.create_task_group() as group:
            for number in range(SWAPS_WAITING_MAX + 1):
                group.start_soon(swap_once, ("two", "one")[number % 2])
        assert output + "".join([p async for p in stream]) == STORY
        assert len(fingerprints) == SWAPS_WAITING_MAX
        assert len(set(fingerprints)) == 2


async def test_a_swap_that_fails_changes_nothing() -> None:
    async with talking(CONFIG) as (_, client, session):
        before = session.graph.fingerprint
        for to, error in (("broken", LoadFailed), ("nobody", ModelNotFound)):
            with pytest.raises(error):
                await client.swap("live", to)
        assert await session.chat("hello") == "hello"
        assert session.metadata["fingerprint"] == before


async def test_a_history_moves_by_token_ids_and_its_output_can_still_be_read() -> None:
    async with running_daemon(CONFIG) as daemon, AsyncClient(daemon.socket) as client:
        graph = await client.load_by_name("live")
        context = await client.init_execution_context(graph)
        await client.set_input(context, 0, b"first")
        await client.compute(context)
        await client.swap("live", "one")
        assert await client.get_output(context, 0) == b"first"
        await client.set_options(context, {"append": True})
        await client.set_input(context, 0, b"second")
        await client.compute(context)
        assert await client.get_output(context, 0) == b"second"


async def test_turns_that_outlast_the_grace_continue_on_the_new_model() -> None:
    async with talking(SHORT_GRACE) as (_, client, session):
        stream = session.stream(STORY * 3)
        output = await anext(stream)
        after = await client.swap("live", "one")
        output += "".join([p async for p in stream])
        assert output == STORY * 3
        assert stream.metadata["fingerprint"] == after.fingerprint
        assert (await client.stats())["recovered"] == 1


async def test_waiting_turns_move_at_once_and_the_running_turn_stays() -> None:
    async with running_daemon(ONE_SLOT) as daemon, AsyncClient(daemon.socket) as client:
        runs, waits = (client.session("live", raw=True) for _ in range(2))
        async with runs, waits, anyio.create_task_group() as group:
            await client.set_input(waits.context, 0, b"waits")
            stream = runs.stream(STORY)
            output = await anext(stream)
            [old] = workers_of(daemon)
            os.kill(old, signal.SIGSTOP)  # it begins no further turn
            group.start_soon(client.compute, waits.context)
            await await_state(client, waits, "waiting")

            after = await client.swap("live", "one")
            await await_state(client, waits, "done")
            assert await client.get_output(waits.context, 0) == b"waits"
            metadata = json.loads(await client.get_output(waits.context, 1))
            assert metadata["fingerprint"] == after.fingerprint
            os.kill(old, signal.SIGCONT)
            output += "".join([p async for p in stream])
            assert output == STORY
            assert stream.metadata["fingerprint"] == after.previous_fingerprint


async def test_turns_that_outlast_the_grace_end_if_the_vocabulary_differs() -> None:
    """A turn that had not begun may be requested again, and then runs on the new model."""
    config = SHORT_GRACE.replace("slots = 16", "slots = 1")
    async with running_daemon(config) as daemon, AsyncClient(daemon.socket) as client:
        runs, waits = (client.session("live", raw=True) for _ in range(2))
        async with runs, waits:
            await client.set_input(waits.context, 0, b"waits")
            stream = runs.stream(STORY * 3)  # more than it has credit for
            await anext(stream)
            [old] = workers_of(daemon)
            os.kill(old, signal.SIGSTOP)
            async with anyio.create_task_group() as group:
                group.start_soon(compute_refused, client, waits)
                await await_state(client, waits, "waiting")
                await client.swap("live", "other")
                with pytest.raises(Cancelled, match="was swapped"):
                    assert [p async for p in stream]
            os.kill(old, signal.SIGCONT)
            await client.compute(waits.context)
            assert await client.get_output(waits.context, 0) == b"waits"
            assert await runs.chat("next") == "next"
            assert runs.metadata["input_tokens"] > len(STORY), "the history is there"


async def test_an_old_worker_that_dies_while_histories_migrate_loses_none() -> None:
    async with talking(CONFIG) as (daemon, client, session):
        await session.chat(STORY)
        [old] = workers_of(daemon)
        os.kill(old, signal.SIGSTOP)
        after = await client.swap("live", "other")
        os.kill(old, signal.SIGKILL)

        assert await session.chat("next") == "next"
        assert session.metadata["fingerprint"] == after.fingerprint
        assert session.metadata["input_tokens"] > len(STORY)
        await await_one_worker(daemon)


async def test_the_old_worker_is_unloaded_while_a_turn_runs_on_the_new_one() -> None:
    async with running_daemon(SLOW) as daemon, AsyncClient(daemon.socket) as client:
        raw, chat = client.session("live", raw=True), client.session("live")
        async with raw, chat:
            for session in (raw, chat):
                await session.chat("hello")
            [old] = workers_of(daemon)
            os.kill(old, signal.SIGSTOP)  # so that the raw history waits for its migration
            after = await client.swap("live", "other")
            stream = chat.stream(STORY * 6)
            await anext(stream)
            os.kill(old, signal.SIGCONT)
            await await_one_worker(daemon)
            assert "".join([p async for p in stream]).endswith(STORY)
            assert stream.metadata["fingerprint"] == after.fingerprint
            assert await raw.chat("next") == "next"


async def test_a_drain_holds_new_turns_back_until_the_new_model_is_loaded() -> None:
    async with running_daemon(SLOW) as daemon, AsyncClient(daemon.socket) as client:
        runs, comes = (client.session("live", raw=True) for _ in range(2))
        async with runs, comes:
            stream = runs.stream(STORY * 3)
            output = await anext(stream)
            old = workers_of(daemon)
            async with anyio.create_task_group() as group:
                group.start_soon(swap, client, "other", "drain")
                await await_event(daemon, "model.draining")  # then the swap waits for the stream
                group.start_soon(comes.chat, "comes")
                await anyio.wait_all_tasks_blocked()
                await client.stats()
                assert await state_of(client, comes) == "empty" and workers_of(daemon) == old
                output += "".join([p async for p in stream])
            assert output == STORY * 3
            assert stream.metadata["fingerprint"] != comes.metadata["fingerprint"] == "echo-8"
            assert await runs.chat("next") == "next"
            assert runs.metadata["input_tokens"] > 6 * len(STORY), "the history is there"


async def test_turns_that_outlast_a_drain_continue_on_the_new_model_or_end() -> None:
    """They continue if the new model has the same vocabulary."""
    for to, ends in (("one", False), ("other", True)):
        async with talking(SHORT_GRACE) as (_, client, session):
            stream = session.stream(STORY * 3)
            output = await anext(stream)
            after = await client.swap("live", to, mode="drain")
            if ends:
                with pytest.raises(Cancelled, match="was swapped"):
                    assert [p async for p in stream]
            else:
                output += "".join([p async for p in stream])
                assert output == STORY * 3
                assert stream.metadata["fingerprint"] == after.fingerprint
            assert await session.chat("next") == "next"
            assert session.metadata["input_tokens"] > 3 * len(STORY), "the history is there"


@pytest.mark.parametrize("to", ["broken", "huge"])
async def test_the_old_model_is_loaded_again_if_the_new_one_cannot_be(to: str) -> None:
    async with talking(TIGHT) as (daemon, client, session):
        await session.chat(STORY)
        before, [old] = session.metadata["fingerprint"], workers_of(daemon)
        with pytest.raises((LoadFailed, OutOfMemory)):
            await client.swap("live", to, mode="drain")
        assert await session.chat("next") == "next"
        assert session.metadata["fingerprint"] == before
        assert session.metadata["input_tokens"] > 2 * len(STORY)
        assert workers_of(daemon) not in (set(), {old})


async def test_a_drain_does_not_wait_for_callers_of_a_model_that_cannot_be_loaded_again(
    tmp_path: Path,
) -> None:
    """The old worker dies during a query, and its file is damaged: the new model is loaded."""
    file = write_tiny("llama", tmp_path).rename(tmp_path / "tiny.gguf")
    async with (
        running_daemon(models_dir=tmp_path) as daemon,
        AsyncClient(daemon.socket) as client,
        client.session("tiny", raw=True) as session,
    ):
        await client.set_input(session.context, 0, b"a")
        [old] = workers_of(daemon)
        os.kill(old, signal.SIGSTOP)
        async with anyio.create_task_group() as group:
            group.start_soon(set_input_fails, client, session)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(partial(client.swap, "tiny", "echo", mode="drain"))
            await client.models()
            file.write_bytes(b"damaged")
            os.kill(old, signal.SIGKILL)
        assert (await client.load_by_name("tiny")).fingerprint == "echo-1"


async def test_swapping_to_a_model_too_large_even_alone_changes_nothing() -> None:
    async with talking(TIGHT) as (daemon, client, session):
        await session.chat("hello")
        old = workers_of(daemon)
        with pytest.raises(OutOfMemory):
            await client.swap("live", "huge")
        assert workers_of(daemon) == old


async def test_a_swap_of_models_that_do_not_fit_together_is_a_drain() -> None:
    """Neither model gets smaller through it."""
    async with talking(TIGHT) as (_, client, session):
        await session.chat(STORY)
        done = await client.swap("live", "heavy")
        assert done.mode == "drain"
        assert await session.chat("next") == "next"
        assert session.metadata["fingerprint"] == done.fingerprint != done.previous_fingerprint
        [model] = [m for m in await client.models() if m["name"] == "live"]
        assert tuple((model["info"] or {})[key] for key in ("slots", "ctx_size")) == (4, 4096)
        assert (await client.swap("live", "light")).mode == "migrate"


async def test_a_session_dormant_after_a_swap_becomes_active_with_its_history() -> None:
    async with running_daemon(CONFIG) as daemon, AsyncClient(daemon.socket) as client:
        async with client.session("live", session_id="diary", raw=True) as session:
            await session.chat(STORY)
            await client.swap("live", "other")
            await await_one_worker(daemon)
        async with client.session("live", session_id="diary", raw=True) as session:
            assert await session.chat("next") == "next"
            assert session.metadata["input_tokens"] > 2 * len(STORY)


async def test_a_raw_history_of_another_vocabulary_cannot_be_rewound_by_its_old_turns() -> None:
    async with talking(CONFIG) as (daemon, client, session):
        for text in ("one", "two"):
            await session.chat(text)
        await client.swap("live", "other")
        await await_one_worker(daemon)
        with pytest.raises(InvalidArgument, match="turns back in a history of 0"):
            await session.rewind(turns=1)
        await session.chat("three")
        size = session.metadata["input_tokens"]
        await session.chat("four")
        await session.rewind(turns=1)
        await session.chat("five")
        assert session.metadata["input_tokens"] == size + len("three") + 2 + len("five")


@pytest.mark.model
async def test_histories_move_between_vocabularies_as_text_and_messages() -> None:
    config = f"""
{ONE_THREAD}
[models.live]
file = "{short_smollm2()}"
slots = 2
ctx-size = 512
[models.smollm2]
file = "{short_smollm2()}"
slots = 2
ctx-size = 512
[models.gemma]
file = "{small_gemma3()}"
slots = 2
ctx-size = 512
"""
    options = {"n-predict": 4, "temp": 0}
    async with running_daemon(config) as daemon, AsyncClient(daemon.socket) as client:
        chat = client.session("live", system="Be brief.", options=options)
        raw = client.session("live", raw=True, options=options | {"append": True})
        async with chat, raw:
            await chat.chat("My name is Ada.")
            output = "The capital of France is" + await raw.chat("The capital of France is")
            first = chat.metadata["fingerprint"]

            second = (await client.swap("live", "gemma")).fingerprint
            answer = await raw.chat(" and of Italy")
            assert raw.metadata["fingerprint"] == second != first
            before = await client.tokenize(raw.graph, output, bos=True)
            added = await client.tokenize(raw.graph, " and of Italy")
            assert raw.metadata["input_tokens"] == len(before) + len(added)
            output += " and of Italy" + answer
            await chat.chat("What is my name?")
            assert "role: text" in chat.metadata["adjusted"]["chat-template"]

            assert await swap(client, "smollm2") == first
            await raw.chat(" too")
            before = await client.tokenize(raw.graph, output, bos=True)
            added = await client.tokenize(raw.graph, " too")
            assert raw.metadata["input_tokens"] == len(before) + len(added)
            assert await chat.chat("What is my name?")
            assert chat.metadata["fingerprint"] == first


@pytest.mark.model
@pytest.mark.timeout(300)  # each swap may wait for the old model's turns, for a minute
async def test_swaps_of_real_models_with_two_vocabularies_under_streams() -> None:
    """No turn fails or is truncated, and a history grows only by the prompts and answers."""
    config = ONE_THREAD + "".join(
        f'[models.{name}]\nfile = "{file}"\nslots = 4\nctx-size = 512\n'
        for name, file in (
            ("live", short_smollm2()),
            ("smollm2", short_smollm2()),
            ("gemma", small_gemma3()),
        )
    )
    text, tokens = " Then the king said to the son:", 4
    options = {"n-predict": tokens, "temp": 0, "ignore-eos": True}
    async with running_daemon(config) as daemon, AsyncClient(daemon.socket) as client:
        graph = await client.load_by_name("live")
        fingerprints, grown = {graph.fingerprint}, defaultdict[str, set[int]](set)
        added: dict[str, int] = {}
        swapped, followed, has_followed = anyio.Event(), 0, anyio.Event()

        async def talk() -> None:
            nonlocal followed, has_followed
            before: Metadata | None = None
            async with client.session("live", raw=True, options=options) as session:
                while not swapped.is_set():
                    output = "".join([p async for p in session.stream(text)])
                    now = session.metadata
                    assert output and now["output_tokens"] == tokens
                    if before is not None and now["fingerprint"] == before["fingerprint"]:
                        growth = now["input_tokens"] - before["input_tokens"] - tokens
                        grown[now["fingerprint"]].add(growth)
                        followed += 1
                        has_followed.set()
                        has_followed = anyio.Event()
                    before = now
                    if now["input_tokens"] > 40:
                        await client.reset(session.context)
                        before = None
            assert now["fingerprint"] in fingerprints

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(talk)
            for number in range(repetitions(2)):
                target = followed + 2  # turns with the same model as their previous one
                while followed < target:
                    await has_followed.wait()
                fingerprint = await swap(client, ("gemma", "smollm2")[number % 2])
                fingerprints.add(fingerprint)
                if fingerprint not in added:
                    added[fingerprint] = len(await client.tokenize(graph, text, special=True))
            swapped.set()
        assert len(fingerprints) == 2
        assert all(growths == {added[model]} for model, growths in grown.items())
        await await_one_worker(daemon)


@pytest.mark.parametrize("mode", ["migrate", "drain"])
async def test_a_swap_to_an_encoder_under_chatting_sessions_needs_force(
    mode: Mode, tmp_path: Path
) -> None:
    write_tiny("bert", tmp_path).rename(tmp_path / "encoder.gguf")
    async with (
        running_daemon(CONFIG, models_dir=tmp_path) as daemon,
        AsyncClient(daemon.socket) as client,
        client.session("live") as session,
    ):
        assert await session.chat("hello") == "hello"

        with pytest.raises(UnsupportedOperation, match=r"'encoder\.gguf' generates no text"):
            await client.swap("live", "encoder", mode=mode)
        assert await session.chat("still here") == "still here"

        await client.swap("live", "encoder", mode=mode, force=True)
        with pytest.raises(UnsupportedOperation):
            await session.chat("no answer")


async def test_a_swap_to_an_encoder_needs_no_force_under_sessions_that_embed(
    tmp_path: Path,
) -> None:
    write_tiny("bert", tmp_path).rename(tmp_path / "encoder.gguf")
    async with (
        running_daemon(CONFIG, models_dir=tmp_path) as daemon,
        AsyncClient(daemon.socket) as client,
    ):
        graph = await client.load_by_name("live")
        context = await client.init_execution_context(graph)
        await client.set_options(context, {"embedding": True})
        await client.swap("live", "encoder")
