"""The progress of a prompt, sent before the first token of a stream that requests it."""

from __future__ import annotations

from typing import Any

import inferd
from inferd.daemon.calls.turns import PROMPT_EVENTS_MAX
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.raw import RawClient

CONFIG = echo_model("echo", **{"batch-size": 16, "ctx-size": 16384})
STEP = 16


def progress_of(stream: Any) -> tuple[list[dict[str, Any]], str]:
    """Return a stream's events about its prompt, and its text."""
    found: list[dict[str, Any]] = []
    return found, "".join(stream(found.append))


def test_each_step_of_a_prompt_is_reported_before_the_first_token(client: inferd.Client) -> None:
    with client.session("echo") as session:
        order: list[str] = []
        seen: list[dict[str, Any]] = []

        def note(progress: dict[str, Any]) -> None:
            order.append("prompt")
            seen.append(progress)

        stream = session.stream("x" * 98, raw=True, on_prompt=note, options={"n-predict": 3})
        order.extend("text" for _ in stream)
        total = stream.metadata["input_tokens"]
        assert order == ["prompt"] * len(seen) + ["text"] * 3
        assert [each["processed"] for each in seen] == [*range(0, total, STEP), total]
        assert {(each["total"], each["cache"]) for each in seen} == {(total, 0)}
        times = [each["time_ms"] for each in seen]
        assert times == sorted(times) and times[0] == 0
        assert times[-1] == stream.metadata["prompt_ms"]


def test_the_first_event_counts_the_cached_tokens_as_processed(client: inferd.Client) -> None:
    with client.session("echo") as session:
        session.chat("y" * 40, raw=True)
        seen, _ = progress_of(lambda note: session.stream("z" * 40, raw=True, on_prompt=note))
        first, last = seen[0], seen[-1]
        assert 0 < first["cache"] == first["processed"] < first["total"]
        assert last["processed"] == last["total"] and last["cache"] == first["cache"]


def test_nothing_is_sent_unless_it_is_requested(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as raw:
        context = raw.context("echo")
        raw.call("stream", context=context, prompt="hello", raw=True)
        raw.call("chat", context=context, prompt="hello", raw=True, prompt_progress=True)
        assert raw.events and not any("prompt_progress" in event[2] for event in raw.events)


def test_the_events_use_no_credit_and_are_bounded(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as raw:
        context, size = raw.context("echo"), STEP * (PROMPT_EVENTS_MAX + 200)
        params = {"context": context, "prompt": "w" * size, "raw": True, "prompt_progress": True}
        raw.call("stream", credit=1, options={"n-predict": 1}, **params)
        found = [event[2].get("prompt_progress") for event in raw.events]
        progress = [each for each in found if each]
        assert PROMPT_EVENTS_MAX // 2 < len(progress) <= PROMPT_EVENTS_MAX + 1
        assert progress[-1]["processed"] == progress[-1]["total"] >= size
        assert found[-1] is None, "the answer's token"


def test_each_of_several_clients_gets_the_progress_of_its_own_prompt(
    client: inferd.Client,
) -> None:
    with client.session("echo") as one, client.session("echo") as two:
        streams = []
        for session, size in ((one, 200), (two, 100)):
            seen: list[dict[str, Any]] = []
            stream = session.stream("v" * size, raw=True, on_prompt=seen.append)
            streams.append((stream, seen))
        texts = ["".join(stream) for stream, _ in streams]
        assert [len(text) for text in texts] == [200, 100]
        for stream, seen in streams:
            assert {each["total"] for each in seen} == {stream.metadata["input_tokens"]}
