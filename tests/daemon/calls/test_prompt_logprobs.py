"""`prompt-logprobs` and prompts of token ids, over a real socket."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import psutil
import pytest

from inferd import Client
from inferd.backends import SamplingParams
from inferd.backends.echo.model import DISTANCE
from inferd.backends.echo.options import PROMPT_BEGIN, PROMPT_END, VOCAB_SIZE
from inferd.backends.errors import InvalidArgument
from inferd.backends.params import read_options
from inferd.ipc import messages as w
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner
from inferd.sessions.turn.options import PROMPT_LOGPROBS_MAX, Parameters
from inferd.sessions.turn.turn import Turn
from inferd.testing import running_daemon
from tests.raw import RawClient

CONFIG = """
[models.wide]
backend = "echo"
ctx-size = 50000
batch-size = 8192
"""
PROMPT = [PROMPT_BEGIN, *b"abc", PROMPT_END]
SCORED = {"prompt-logprobs": 1, "n-predict": 1}


def assert_scored(found: list[dict[str, Any]], tokens: list[int] = PROMPT, top: int = 1) -> None:
    assert [one["id"] for one in found] == tokens
    assert found[0]["logprob"] is None and found[0]["top_logprobs"] == []
    assert "rank" not in found[0]
    for before, one in itertools.pairwise(found):
        assert one["logprob"] == -abs(one["id"] - before["id"]) / DISTANCE
        assert [other["id"] for other in one["top_logprobs"][:1]] == [before["id"]][:top]
        assert len(one["top_logprobs"]) == top
        assert (one["rank"] == 1) == (one["id"] == before["id"])


def test_a_whole_answer_has_the_logprobs_of_its_prompt(raw: RawClient) -> None:
    context = raw.context("echo")
    turn = raw.call("chat", context=context, prompt="abc", raw=True, options=SCORED)
    assert_scored(turn["metadata"]["prompt_logprobs"])
    assert turn["text"] == b"a" and raw.metadata(context) == turn["metadata"]
    turn = raw.call("chat", context=raw.context("echo"), prompt="abc", raw=True)
    assert "prompt_logprobs" not in turn["metadata"]


@pytest.mark.parametrize("top", [0, 3])
def test_a_history_is_a_prompt_whose_cached_tokens_are_computed_again(
    client: Client, top: int
) -> None:
    with client.session("echo") as session:
        session.chat("abc", raw=True)
        cached = session.chat("d", raw=True)
        assert cached.metadata["cached_tokens"] > 0
        options = {"prompt-logprobs": top, "n-predict": 0}
        reply = session.chat("e", raw=True, options=options)
        assert reply == "" and reply.metadata["cached_tokens"] == 0
        found = reply.metadata["prompt_logprobs"]
        assert len(found) == reply.metadata["input_tokens"]
        assert_scored(found, [one["id"] for one in found], top)


@pytest.mark.parametrize("credit", [1, 2, 64])
def test_a_stream_has_them_before_its_first_token_and_not_again(
    raw: RawClient, client: Client, credit: int
) -> None:
    text = "a long prompt " * 20
    context = raw.context("echo")
    options = {"prompt-logprobs": 1, "n-predict": 3}
    request = raw.start_request(
        "stream", context=context, prompt=text, raw=True, options=options, credit=credit
    )
    found: list[dict[str, Any]] = []
    tokens: list[int] = []
    while (message := raw.read_message())[0] == w.Kind.EVENT:
        event = message[2]
        assert not (event.get("tokens") and event.get("prompt_logprobs"))
        if "prompt_logprobs" in event:
            assert not tokens and event.get("prompt_offset", 0) == len(found)
        found += event.get("prompt_logprobs", [])
        tokens += event.get("tokens", [])
        raw.write([w.Kind.CREDIT, request, 1])
    assert_scored(found, [PROMPT_BEGIN, *text.encode(), PROMPT_END])
    assert bytes(tokens) == b"a l" and "prompt_logprobs" not in message[2]["metadata"]
    with client.session("echo") as session:
        stream = session.stream(text, raw=True, options=options)
        pieces = iter(stream)
        next(pieces)
        assert stream.prompt_logprobs == found
        assert list(pieces) and stream.prompt_logprobs == found


def test_only_the_first_of_several_answers_has_them(client: Client) -> None:
    with client.session("echo", options={"prompt-logprobs": 1}) as session:
        first, *others = session.answers("abc", 3, raw=True)
        assert_scored(first.metadata["prompt_logprobs"])
        assert others == ["abc", "abc"]
        assert all("prompt_logprobs" not in other.metadata for other in others)


def test_pulled_tokens_and_compute_have_them_in_output_1(raw: RawClient) -> None:
    for call in ("compute", "compute_single"):
        context = raw.context("echo")
        raw.set_input(context, b"abc")
        raw.set_input(context, b'{"prompt_logprobs": 1}', index=1)
        raw.call(call, context=context)
        assert_scored(raw.metadata(context)["prompt_logprobs"])


@pytest.mark.parametrize("top", [15, 99])
def test_too_many_are_refused_before_anything_is_computed(client: Client, top: int) -> None:
    most = PROMPT_LOGPROBS_MAX // (1 + top)
    options = {"prompt-logprobs": top, "n-predict": 0}
    with client.session("wide") as session:
        with pytest.raises(InvalidArgument, match="at most 32768 are returned") as refused:
            session.chat([97] * (most + 1), options=options)
        assert refused.value.data["prompt_tokens"] == most + 1
        reply = session.chat([97] * most, options=options)
        assert len(reply.metadata["prompt_logprobs"]) == most


def test_a_stream_continues_after_them_in_another_worker() -> None:
    """Its first worker dies in the middle of the prompt, while the reader takes nothing."""
    text = "x" * 200
    with (
        running_daemon(CONFIG) as daemon,
        RawClient(daemon.socket) as raw,
        Client(daemon.socket) as client,
    ):
        context = raw.context("echo")
        request = raw.start_request(
            "stream", context=context, prompt=text, raw=True, options=SCORED, credit=2
        )
        found: list[dict[str, Any]] = []
        for _ in range(2):
            found += raw.read_message()[2]["prompt_logprobs"]
        [worker] = [child.pid for child in psutil.Process(daemon.pid).children()]
        os.kill(worker, signal.SIGKILL)
        with client.session("echo") as session:
            assert session.chat("the next worker is there") == "the next worker is there"
        raw.write([w.Kind.CREDIT, request, 100])
        while (message := raw.read_message())[0] == w.Kind.EVENT:
            found += message[2].get("prompt_logprobs", [])
        assert message[2]["metadata"]["stop_reason"] == "length"
        assert_scored(found, [PROMPT_BEGIN, *text.encode(), PROMPT_END])


def test_a_whole_turn_keeps_those_of_its_first_worker() -> None:
    tokens = [97] * 10
    spec = m.TaskSpec(
        id=1,
        owner=Owner(1),
        tokens=m.pack_tokens(tokens),
        sampling=SamplingParams(),
        prompt_logprobs=0,
    )
    turn = Turn(None, spec, lambda _: None)  # type: ignore[arg-type]
    one = m.TokenLogprob(97, b"a", -1.0, rank=1)
    before = turn.kept_bytes
    turn.report(m.PromptLogprobs(1, 0, [one] * 4))
    resumed = turn.continue_on(None)  # type: ignore[arg-type]
    assert resumed is not None and resumed.resume_point is not None
    assert resumed.resume_point.prompt_logprobs == 4
    turn.report(m.PromptLogprobs(1, 4, [one] * 6))
    assert len(turn.prompt_logprobs) == 10 and turn.kept_bytes >= before + 1000
    assert turn.first_token_at is None


# Prompts of token ids.


def test_token_ids_are_a_prompt_as_they_are(raw: RawClient, client: Client) -> None:
    with client.session("echo") as session:
        assert session.chat(PROMPT) == "abc"
        more = [PROMPT_BEGIN, *b"de", PROMPT_END]
        assert "".join(session.stream(more)) == "de"
        assert session.answers(more, 2) == ["de", "de"]
    context = raw.context("echo")
    turn = raw.call("chat", context=context, prompt="ignored", prompt_tokens=PROMPT)
    assert turn["text"] == b"abc" and turn["metadata"]["input_tokens"] == len(PROMPT)
    plain = raw.call("chat", context=raw.context("echo"), prompt_tokens=[97, 98])
    assert plain["metadata"]["input_tokens"] == 2, "no mark was added"


@pytest.mark.parametrize(
    "tokens", [[], [-1], [97, -2], [-(1 << 31)], [97, VOCAB_SIZE], [1 << 40], [97, -(1 << 62)]]
)
def test_token_ids_outside_the_vocabulary_leave_the_session_as_it_was(
    raw: RawClient, tokens: list[int]
) -> None:
    context = raw.context("echo")
    raw.call("chat", context=context, prompt_tokens=PROMPT)
    before = raw.metadata(context)
    with pytest.raises(InvalidArgument, match="prompt_tokens"):
        raw.call("chat", context=context, prompt_tokens=tokens)
    assert raw.metadata(context) == before
    raw.call("chat", context=context, prompt_tokens=PROMPT)
    assert raw.metadata(context)["input_tokens"] == 2 * len(PROMPT) + 3


def test_an_embedding_has_no_logprobs() -> None:
    """A step would compute few of its tokens, as if each needed logits."""
    parameters = Parameters({})
    parameters.apply(read_options({"prompt-logprobs": 1}))
    spec = m.TaskSpec(id=1, owner=Owner(1), tokens=b"", sampling=SamplingParams())
    assert parameters.fill(spec, 259).prompt_logprobs == 1
    parameters.apply(read_options({"embedding": True}))
    assert parameters.fill(spec, 259).prompt_logprobs is None
