"""Deaths of a worker that several users share: the blame falls on evidence, and on its owner."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import anyio
import pytest

from inferd import AsyncClient
from inferd.backends.errors import InferdError, LoadFailed, QuotaExceeded, WorkerCrashed
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.processes import running_children
from tests.raw import RawClient

STORY = "Once upon a time there was a king who had three sons, and each went his way. "
GRAMMAR = 'root ::= "die now"'


def workers_of(daemon: RunningDaemon) -> list[int]:
    """Return the workers' process ids."""
    return [child.pid for child in running_children(daemon.pid)]


def kill_workers(daemon: RunningDaemon) -> None:
    for pid in workers_of(daemon):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.asyncio
async def test_kills_from_outside_refuse_no_stream_and_no_pull_reader() -> None:
    """The kernel's OOM killer sends SIGKILL: the tasks of the step did nothing wrong."""
    streams, pulls, kills = 16, 4, 6
    texts = [f"{number} {STORY}" for number in range(streams + pulls)]
    received = ["" for _ in texts]
    shares = [sum(map(len, texts)) * n // (kills + 1) for n in range(1, kills + 1)]
    config = echo_model("m", slots=streams + pulls, step_ms=1)
    async with running_daemon(config) as daemon, AsyncClient(daemon.socket) as client:

        async def read_turn(number: int) -> None:
            """Read a turn; kill the worker when all readers together have another share."""
            text = texts[number]
            async with client.session("m", raw=True) as session:
                async for piece in session.stream(text) if number < streams else session.pull(text):
                    received[number] += piece
                    if shares and sum(map(len, received)) >= shares[0]:
                        del shares[0]
                        kill_workers(daemon)

        async with anyio.create_task_group() as group:
            for number in range(len(texts)):
                group.start_soon(read_turn, number)
        assert daemon.log.count("worker.died") >= kills // 2
        assert "task.quarantined" not in daemon.log
    assert received == texts


def crashing(place: str, **options: object) -> str:
    """Return the tables of a model that the text "die now" crashes in a *place*."""
    return echo_model("m", slots=4, step_ms=1, abort_on="die now", abort_in=place, **options)


def crash(attacker: RawClient, context: int, prompt: str, **options: object) -> InferdError:
    """Return the error of a turn that crashes the worker."""
    with pytest.raises(InferdError) as caught:
        attacker.call("chat", context=context, prompt=prompt, raw=True, options=options)
    return caught.value


def test_a_known_prompt_with_a_killing_grammar_is_refused_to_its_owner_only() -> None:
    with (
        daemon_for_all(crashing("grammar")) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        mine, theirs, beside = ada.context("m"), bob.context("m"), bob.context("m")
        stream = bob.begin_stream(beside, STORY * 10)
        assert isinstance(crash(ada, mine, "What is new?", grammar=GRAMMAR), WorkerCrashed)
        deaths = daemon.log.count("worker.died")
        assert deaths == 2, "once, and once more alone"

        said = bob.call("chat", context=theirs, prompt="What is new?", raw=True)
        assert bytes(said["text"]) == b"What is new?"
        mine = ada.context("m")
        said = ada.call("chat", context=mine, prompt="What is new?", raw=True)
        assert bytes(said["text"]) == b"What is new?", "the plain prompt did nothing"
        mine = ada.context("m")
        assert crash(ada, mine, "Another prompt.", grammar=GRAMMAR).data["cause"] == "input"
        assert daemon.log.count("worker.died") == deaths, "the grammar is known"
        bob.wait_result(stream)
        assert bob.streamed_text == STORY * 10


def test_a_text_that_kills_while_it_is_tokenized_is_refused_at_once() -> None:
    with (
        daemon_for_all(crashing("tokenize")) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        mine, beside = ada.context("m"), bob.context("m")
        stream = bob.begin_stream(beside, STORY * 10)
        for _ in range(2):
            assert crash(ada, mine, "please die now").data["cause"] == "input"
            assert daemon.log.count("worker.died") == 1
        bob.wait_result(stream)
        assert bob.streamed_text == STORY * 10


def test_a_long_text_that_kills_in_a_thread_is_found_and_no_task_of_the_step_is_refused() -> None:
    with (
        daemon_for_all(crashing("tokenize", **{"ctx-size": 100_000})) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        mine, beside = ada.context("m"), bob.context("m")
        stream = bob.begin_stream(beside, STORY * 10)
        assert crash(ada, mine, "long " * 5000 + "die now").data["cause"] == "input"
        assert daemon.log.count("worker.died") == 2, "once in the thread, and once more alone"
        bob.wait_result(stream)
        assert bob.streamed_text == STORY * 10
        assert "task.quarantined" not in daemon.log


def test_the_third_crash_within_an_hour_excludes_its_owner_and_nobody_else() -> None:
    with (
        daemon_for_all(crashing("step")) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        theirs = bob.context("m")
        stream = bob.begin_stream(theirs, STORY * 10)
        for number in range(3):
            assert isinstance(crash(ada, ada.context("m"), f"{number} die now"), WorkerCrashed)
        refused = crash(ada, ada.context("m"), "hello")
        assert isinstance(refused, QuotaExceeded) and 500 < refused.retry_after_s <= 600
        bob.wait_result(stream)
        assert bob.streamed_text == STORY * 10
        assert daemon.log.count("worker.died") == 6


def test_a_model_that_cannot_compute_a_token_is_to_blame_itself() -> None:
    with running_daemon(echo_model("m", crash_at_step=1)) as daemon, RawClient(daemon.socket) as me:
        error = crash(me, me.context("m"), "hello")
        assert isinstance(error, LoadFailed) and error.data["cause"] == "crashed"
        assert "task.quarantined" not in daemon.log
