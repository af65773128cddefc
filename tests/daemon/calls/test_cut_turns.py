"""The metadata of turns that end before their answer does: cancelled, interrupted, or by a timeout.

They describe the progress up to that moment, wherever it is, and every way to them agrees.
"""

from __future__ import annotations

from typing import Any

import pytest

import inferd
from inferd.backends.errors import Cancelled, SessionBusy, Timeout
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

STEP = 16
CONFIG = echo_model("echo") + echo_model(
    "slow", step_ms=20, slots=1, **{"batch-size": STEP, "ctx-size": 16384}
)
LONG = "x" * 4000
"""A prompt of 250 steps of the model `slow`, which take 5 s."""
TIMES = ("queue_ms", "ttft_ms", "prompt_ms", "predicted_ms")


def next_event(client: RawClient, key: str) -> dict[str, Any]:
    """Return the next event that has *key*."""
    while key not in (message := client.read_message())[2]:
        pass
    event: dict[str, Any] = message[2]
    return event


def cancelled(client: RawClient, context: int, turn: int) -> dict[str, Any]:
    """Cancel a *turn*, and return its metadata, which its error has and the context too."""
    client.call("cancel", context=context)
    with pytest.raises(Cancelled) as caught:
        client.wait_result(turn)
    metadata: dict[str, Any] = caught.value.data["metadata"]
    assert metadata == client.metadata(context)
    return metadata


def begun_stream(client: RawClient, context: int, **params: Any) -> int:
    return client.start_request(
        "stream", context=context, raw=True, credit=1000, prompt_progress=True, **params
    )


def test_a_turn_that_is_cancelled_in_the_queue_has_waited_and_nothing_else(
    raw: RawClient, daemon: RunningDaemon
) -> None:
    begun_stream(raw, raw.context("slow"), prompt=LONG)
    next_event(raw, "prompt_progress")
    with RawClient(daemon.socket) as other:
        context = other.context("slow")
        turn = begun_stream(other, context, prompt="hello", queue_events=True)
        next_event(other, "waiting")
        found = cancelled(other, context, turn)
    assert found["queue_ms"] > 0
    counted = ("ttft_ms", "prompt_ms", "predicted_ms", "cached_tokens", "output_tokens", "parks")
    assert {key: found[key] for key in counted} == dict.fromkeys(counted, 0)
    assert found["input_tokens"] > 0 and found["stop_reason"] == "Cancelled"


def test_a_turn_that_is_cancelled_in_its_prompt_has_the_cached_tokens(raw: RawClient) -> None:
    context = raw.context("slow")
    raw.call("chat", context=context, prompt="y" * 40, raw=True, options={"n-predict": 1})
    turn = begun_stream(raw, context, prompt=LONG)
    progress = next_event(raw, "prompt_progress")["prompt_progress"]
    assert progress["cache"] > 0
    assert raw.metadata(context)["cached_tokens"] == progress["cache"], "while the turn runs, too"
    next_event(raw, "prompt_progress")
    found = cancelled(raw, context, turn)
    assert found["cached_tokens"] == progress["cache"]
    assert found["input_tokens"] == progress["total"]
    assert found["prompt_ms"] >= 20, "a step"
    assert found["ttft_ms"] == found["predicted_ms"] == found["output_tokens"] == 0


def test_a_turn_that_is_cancelled_in_its_answer_has_the_time_to_its_first_token(
    raw: RawClient,
) -> None:
    context = raw.context("slow")
    raw.call("chat", context=context, prompt="y" * 40, raw=True, options={"n-predict": 1})
    turn = begun_stream(raw, context, prompt="z" * 200)
    cached = next_event(raw, "prompt_progress")["prompt_progress"]["cache"]
    tokens = len(next_event(raw, "tokens")["tokens"]) + len(next_event(raw, "tokens")["tokens"])
    found = cancelled(raw, context, turn)
    assert found["cached_tokens"] == cached > 0
    assert found["output_tokens"] >= tokens
    assert 20 <= found["prompt_ms"] <= found["ttft_ms"]
    assert found["predicted_ms"] > 0
    assert found["ttft_ms"] == pytest.approx(found["queue_ms"] + found["prompt_ms"])


def test_a_turn_of_the_same_length_has_the_same_figures_whether_it_is_cut_or_not(
    raw: RawClient,
) -> None:
    whole, cut = raw.context("slow"), raw.context("slow")
    for context, text in ((whole, "a"), (cut, "b")):
        raw.call("chat", context=context, prompt=text * 40, raw=True, options={"n-predict": 1})
    raw.call("chat", context=whole, prompt="c" * 200, raw=True, options={"n-predict": 2})
    turn = begun_stream(raw, cut, prompt="c" * 200)
    next_event(raw, "tokens")
    found, expected = cancelled(raw, cut, turn), raw.metadata(whole)
    for key in ("input_tokens", "cached_tokens", "parks", "shifts", "shifted"):
        assert found[key] == expected[key], key
    assert found.keys() == expected.keys() - {"reasoning_tokens"} | {"error"}, "counted at the end"


def test_a_stream_that_is_left_has_the_metadata_of_the_cancelled_turn(
    client: inferd.Client,
) -> None:
    with client.session("slow") as session:
        first = session.chat("y" * 40, raw=True, options={"n-predict": 1})
        with session.stream("z" * 200, raw=True) as stream:
            next(stream)
        assert stream.metadata == session.metadata
        assert stream.metadata["stop_reason"] == "Cancelled"
        assert stream.metadata["cached_tokens"] >= first.metadata["input_tokens"]
        assert stream.metadata["ttft_ms"] >= 20


def test_a_turn_that_ends_by_a_timeout_has_its_progress(raw: RawClient) -> None:
    context = raw.context("slow")
    with pytest.raises(Timeout) as caught:
        raw.call("chat", context=context, prompt=LONG, raw=True, timeout_s=2.0)
    assert caught.value.data == {"timeout": "total"}
    found = raw.metadata(context)
    assert found["stop_reason"] == "Timeout" and found["ttft_ms"] == 0
    assert found["queue_ms"] + found["prompt_ms"] >= 250, "it begins late on a busy machine"


def test_a_turn_whose_client_disconnects_keeps_its_figures(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as raw:
        graph = raw.call("load_by_name", name="slow")["graph"]
        attach = {"graph": graph, "session_id": "left"}
        context = raw.call("init_execution_context_with_session_id", **attach)["context"]
        raw.call("chat", context=context, prompt="y" * 40, raw=True, options={"n-predict": 1})
        begun_stream(raw, context, prompt="z" * 200)
        cached = next_event(raw, "prompt_progress")["prompt_progress"]["cache"]
        next_event(raw, "tokens")

    with RawClient(daemon.socket) as again:
        attach["graph"] = again.call("load_by_name", name="slow")["graph"]

        def attached() -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = again.call(
                    "init_execution_context_with_session_id", **attach
                )
            except SessionBusy:  # the daemon has not read the end of the connection yet
                return None
            return found

        opened = wait_until(attached)
        assert opened["attached"]
        found = again.metadata(opened["context"])
        assert found["stop_reason"] == "detached" and "error" not in found
        assert found["cached_tokens"] == cached > 0
        assert found["output_tokens"] >= 1 and found["ttft_ms"] > 0


def test_the_time_to_the_first_token_is_0_without_a_token(raw: RawClient) -> None:
    context = raw.context("echo")
    assert [raw.metadata(context)[key] for key in TIMES] == [0, 0, 0, 0]
    result = raw.call("chat", context=context, prompt="", raw=True, options={"n-predict": 0})
    assert result["metadata"]["output_tokens"] == result["metadata"]["ttft_ms"] == 0
