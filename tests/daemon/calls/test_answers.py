"""Several answers to one prompt: computed once, each with a seed and an end of its own."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from inferd import AsyncClient, Client
from inferd.backends.errors import Busy, Cancelled, InvalidArgument, SessionBusy
from inferd.daemon.calls.turns import ANSWERS_MAX
from inferd.scheduler.engine.steps import END_TOKENS
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.models import ONE_THREAD, short_smollm2
from tests.raw import RawClient

PROMPT = "A prompt too short for tasks to wait for each other"
"""Below `shared-prefix-tokens-min`: nothing but the call itself lets it be computed once."""
CONFIG = "[daemon]\nsessions-max = 20\n" + echo_model("slow", step_ms=20)
CONFIG += "".join(
    echo_model(f"{memory}-{slots}", slots=slots, memory=memory)
    for memory in ("plain", "window", "recurrent")
    for slots in (1, 4)
)


def counters(client: Client, model: str) -> dict[str, int]:
    return dict(client.stats()["models"][model])


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("memory", ["plain", "window", "recurrent"])
def test_the_prompt_is_computed_once(client: Client, memory: str, slots: int) -> None:
    model = f"{memory}-{slots}"
    with client.session(model, raw=True) as session:
        answers = session.answers(PROMPT, n=5)

    assert answers == [PROMPT] * 5
    prompt = answers[0].metadata["input_tokens"]
    assert answers[0].metadata["cached_tokens"] == 0
    ends = [prompt - answer.metadata["cached_tokens"] for answer in answers[1:]]
    # A window is cut where the first answer has left its slot, and else is read from a checkpoint.
    assert set(ends) <= ({1, END_TOKENS} if memory == "window" else {1})
    assert counters(client, model)["prompt"] == prompt + sum(ends), "the end again for each branch"


def test_each_answer_has_its_own_seed_and_the_first_continues_the_conversation(
    client: Client,
) -> None:
    with client.session("plain-4", raw=True) as session:
        given = session.answers(PROMPT, n=3, options={"seed": (1 << 32) - 2})
        assert [a.metadata["seed"] for a in given] == [(1 << 32) - 2, (1 << 32) - 1, 0]
        sampled = session.answers("and more", n=16)
        assert len({a.metadata["seed"] for a in sampled}) == 16
        assert session.metadata == sampled[0].metadata and sampled == ["and more"] * 16
        assert sampled[0].metadata["input_tokens"] > 2 * len(PROMPT), "the first answer is kept"
    assert client.sessions() == [], "the branches are closed"


def test_a_single_answer_is_a_turn(client: Client) -> None:
    with client.session("plain-4", raw=True) as session:
        assert session.answers(PROMPT, n=1) == [PROMPT]
        assert session.answers(PROMPT, n=2, options={"n-predict": 0}) == ["", ""]


@pytest.mark.parametrize("n", [0, -1, ANSWERS_MAX + 1])
def test_the_number_of_answers_is_bounded(client: Client, n: int) -> None:
    with client.session("plain-4", raw=True) as session:
        with pytest.raises(InvalidArgument, match=f"1 … {ANSWERS_MAX}"):
            session.answers(PROMPT, n=n)
        with pytest.raises(InvalidArgument, match="a prompt or messages"):
            session.answers(n=2)
        assert session.chat("x") == "x"


def test_a_call_refused_for_its_branches_changes_nothing(client: Client) -> None:
    with client.session("plain-4", raw=True) as session:
        others = session.fork(10)
        with pytest.raises(Busy, match="20"):
            session.answers(PROMPT, n=16)
        assert len(client.sessions()) == 11
        assert session.answers(PROMPT, n=2) == [PROMPT] * 2
        assert session.metadata["input_tokens"] == len(PROMPT) + 2, "the refused one was added"
        for other in others:
            other.delete()


def test_answers_use_the_input_of_set_input(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        context = client.context("plain-4")
        client.set_input(context, b"hello")
        result = client.call("answers", context=context, n=2)
        assert [a["text"] for a in result["answers"]] == [b"hello"] * 2
        assert [a["error"] for a in result["answers"]] == [None] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_one_answer_is_cancelled_and_the_others_continue(
    daemon: RunningDaemon, which: int
) -> None:
    async with (
        AsyncClient(daemon.socket) as client,
        AsyncClient(daemon.socket) as other,
        client.session("slow", raw=True) as session,
        anyio.create_task_group() as group,
    ):
        contexts: list[int] = []

        async def cancel() -> None:
            while not await other.cancel(contexts[which]):
                await anyio.lowlevel.checkpoint()

        def on_contexts(found: list[int]) -> None:
            contexts.extend(found)
            group.start_soon(cancel)

        answers = await session.answers(PROMPT, n=3, on_contexts=on_contexts)

        for number, answer in enumerate(answers):
            if number == which:
                assert isinstance(answer.error, Cancelled)
                assert PROMPT.startswith(answer) and answer != PROMPT
            else:
                assert answer == PROMPT and answer.error is None


@pytest.mark.asyncio
async def test_all_answers_are_cancelled_with_the_call(daemon: RunningDaemon) -> None:
    async with (
        AsyncClient(daemon.socket) as client,
        AsyncClient(daemon.socket) as other,
        client.session("slow", raw=True) as session,
    ):
        begun = anyio.Event()

        async def request_answers() -> None:
            await session.answers(PROMPT, n=3, on_contexts=lambda _: begun.set())

        async with anyio.create_task_group() as group:
            group.start_soon(request_answers)
            await begun.wait()
            while len(await other.queue()) < 3:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(SessionBusy):
                await client.compute(session.context)
            group.cancel_scope.cancel()
        while len(await other.sessions()) > 1 or await other.queue():
            await anyio.lowlevel.checkpoint()
        assert await session.chat("x") == "x"


@pytest.mark.model
def test_a_real_model_gives_different_answers(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").symlink_to(short_smollm2())
    options = {"temp": 1.5, "n-predict": 16, "seed": 7}
    with (
        running_daemon(ONE_THREAD, models_dir=tmp_path) as daemon,
        Client(daemon.socket) as client,
    ):
        with client.session("smollm2") as session:
            answers = session.answers("A new thought:", n=4, options=options)
        assert len(set(answers)) == 4 and all(answers)
        prompt = answers[0].metadata["input_tokens"]
        assert counters(client, "smollm2")["prompt"] == prompt + 3
