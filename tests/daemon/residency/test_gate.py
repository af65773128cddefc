"""Admission of requests to models that share memory, on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inferd.backends.errors import Busy, Cancelled, ReaderTimeout, ShuttingDown, Timeout
from inferd.testing import RunningDaemon
from tests.raw import RawClient
from tests.waiting import wait_until

from .test_budget import daemon_with, echo, load, model, states

MODELS = tuple(echo(name, 600, slots=2) for name in "abc")
SLOW = "x" * 100
"""A prompt that takes a slow model a second."""


def slow(name: str, slots: int = 2) -> str:
    return echo(name, 600, slots=slots) + "step_ms = 10\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """A daemon in whose memory one of three models fits; `a` is slow."""
    with daemon_with(slow("a"), *MODELS[1:]) as running:
        yield running


def contexts(client: RawClient, names: str = "cba") -> dict[str, int]:
    """Return a context of each model; the last one is then in memory."""
    return {name: client.context(name) for name in names}


def chat(client: RawClient, context: int, prompt: str, **params: Any) -> int:
    return client.start_request("chat", context=context, prompt=prompt, raw=True, **params)


def said(client: RawClient, number: int) -> bytes:
    return bytes(client.wait_result(number)["text"])


def first_token(client: RawClient) -> None:
    client.events.append(client.read_message())


def stats(client: RawClient) -> dict[str, Any]:
    return dict(client.call("stats")["stats"])


def begin(client: RawClient, context: int, **params: Any) -> int:
    """Start a slow turn, and return once it runs."""
    number = chat(client, context, SLOW, **params)
    wait_until(lambda: stats(client)["running"])
    return number


def loads(daemon: RunningDaemon) -> list[str]:
    """Return the models in the order in which they were loaded."""
    lines = [line for line in daemon.log.splitlines() if "model.loaded" in line]
    return [next(name for name in "abc" if f"model={name}" in _plain(line)) for line in lines]


def _plain(line: str) -> str:
    return "".join(c for c in line if c.isprintable()).replace("[36m", "").replace("[0m", "")


def test_a_leased_but_unused_model_is_evicted_and_its_sessions_continue(raw: RawClient) -> None:
    context = contexts(raw)
    for text in ("one", "two"):
        for name in "abc":
            assert said(raw, chat(raw, context[name], text)) == text.encode()
    for name in "abc":
        assert raw.metadata(context[name])["input_tokens"] >= len("oneonetwo")
    assert sorted(states(raw).values()).count("ready") == 1


def test_a_model_that_computes_stays_until_its_turn_is_done(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    context = contexts(raw, "ba")
    turn = begin(raw, context["a"])
    other = chat(raw, context["b"], "b")
    wait_until(lambda: stats(raw)["waiting"])
    assert states(raw)["a"] == "ready"
    assert said(raw, turn) == SLOW.encode()
    assert said(raw, other) == b"b"
    assert loads(daemon)[-2:] == ["a", "b"]


def test_requests_that_wait_for_a_model_are_served_together(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    """ABCABC becomes AABBCC: the second task of a model does not wait for its next load."""
    first, second = contexts(raw, "abc"), contexts(raw, "abc")
    before = len(loads(daemon))
    turns = [begin(raw, first["a"])]
    turns += [chat(raw, c[n], n) for c, n in ((first, "b"), (first, "c"))]
    wait_until(lambda: stats(raw)["waiting"] == 2)
    turns += [chat(raw, second[name], name) for name in "abc"]
    texts = [said(raw, turn) for turn in turns]
    assert texts == [SLOW.encode(), b"b", b"c", b"a", b"b", b"c"]
    assert loads(daemon)[before:] == ["a", "b", "c"]


def test_without_a_residency_later_tasks_are_served_after_all_earlier_ones() -> None:
    with (
        daemon_with(slow("a"), *MODELS[1:], residency_s=0) as daemon,
        RawClient(daemon.socket) as client,
    ):
        context, other = contexts(client, "ba"), client.context("a")
        before = len(loads(daemon))
        turn = begin(client, context["a"])
        waits = daemon.log.count("model.waiting")
        turns = [turn, chat(client, context["b"], "b")]
        wait_until(lambda: daemon.log.count("model.waiting") > waits)
        turns.append(chat(client, other, "a"))
        for turn in turns:
            client.wait_result(turn)
        assert loads(daemon)[before:] == ["b", "a"]


def test_the_more_urgent_task_has_its_model_loaded_first(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    context = contexts(raw)
    turn = begin(raw, context["a"])
    turns = [turn, chat(raw, context["b"], "b")]
    wait_until(lambda: stats(raw)["waiting"])
    turns.append(chat(raw, context["c"], "c", priority="urgent"))
    for turn in turns:
        raw.wait_result(turn)
    assert loads(daemon)[-2:] == ["c", "b"]


# Waiting tasks.


def test_a_waiting_task_is_counted_listed_and_bounded() -> None:
    settings = {"tasks_waiting_max": 1}
    with (
        daemon_with(slow("a"), *MODELS[1:], **settings) as daemon,
        RawClient(daemon.socket) as client,
    ):
        context = contexts(client)
        turn = begin(client, context["a"])
        waits = chat(client, context["b"], "b", priority="high")
        wait_until(lambda: stats(client)["waiting"] == 1)

        listed = client.call("queue")["tasks"]
        assert [(t["model"], t["state"], t["priority"]) for t in listed] == [
            ("a", "running", "normal"),
            ("b", "waiting", "high"),
        ]
        assert listed[1]["context"] == context["b"] and listed[1]["age_s"] > 0
        with pytest.raises(Busy) as caught:
            said(client, chat(client, context["c"], "c"))
        assert caught.value.data["queue_length"] == 1
        assert said(client, turn) == SLOW.encode()
        assert said(client, waits) == b"b"
        assert stats(client)["waiting"] == 0
        assert said(client, chat(client, context["c"], "c")) == b"c", "all places are free again"


@pytest.mark.parametrize(("key", "which"), [("queue_timeout_s", "queue"), ("timeout_s", "total")])
def test_the_wait_of_a_task_is_bounded(key: str, which: str, raw: RawClient) -> None:
    context = contexts(raw, "ba")
    turn = begin(raw, context["a"])
    with pytest.raises(Timeout, match="not in memory") as caught:
        said(raw, chat(raw, context["b"], "b", **{key: 0.05}))
    assert caught.value.data["timeout"] == which
    assert stats(raw)["waiting"] == 0 and states(raw)["a"] == "ready"
    raw.wait_result(turn)
    assert said(raw, chat(raw, context["b"], "again")) == b"again"


def test_a_waiting_task_can_be_cancelled_by_context_and_by_request(raw: RawClient) -> None:
    context = contexts(raw)
    turn = begin(raw, context["a"])
    waits = [chat(raw, context[name], name) for name in "bc"]
    wait_until(lambda: stats(raw)["waiting"] == 2)
    assert raw.call("cancel", context=context["b"]) == {"cancelled": True}
    assert raw.call("cancel", request=waits[1]) == {"cancelled": True}
    for number in waits:
        with pytest.raises(Cancelled):
            raw.wait_result(number)
    assert stats(raw)["waiting"] == 0
    raw.wait_result(turn)
    assert said(raw, chat(raw, context["b"], "again")) == b"again"


def test_a_waiting_task_is_refused_when_the_daemon_drains() -> None:
    with daemon_with(slow("a"), *MODELS[1:]) as daemon, RawClient(daemon.socket) as client:
        context = contexts(client, "ba")
        turn = begin(client, context["a"])
        waits = chat(client, context["b"], "b")
        wait_until(lambda: stats(client)["waiting"])
        client.call("drain")
        with pytest.raises(ShuttingDown):
            client.wait_result(waits)
        assert said(client, turn) == SLOW.encode()


def test_an_input_for_a_cold_model_waits_its_turn_too(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    context = contexts(raw, "ba")
    turn = begin(raw, context["a"])
    tensor = {"data": b"said by b", "dimensions": [1], "type": 3}
    given = raw.start_request("set_input", context=context["b"], index=0, tensor=tensor)
    assert states(raw)["a"] == "ready" and stats(raw)["waiting"] == 0
    raw.wait_result(turn)
    raw.wait_result(given)
    assert loads(daemon)[-2:] == ["a", "b"]
    raw.call("compute", context=context["b"])
    assert raw.output(context["b"]) == b"said by b"


# No deadlocks.


def test_one_program_pulls_from_two_models_alternately(raw: RawClient) -> None:
    context = contexts(raw, "ba")
    for name in "ab":
        raw.set_input(context[name], f"said by {name}".encode())
    texts = dict.fromkeys("ab", b"")
    for _ in range(4):
        for name in "ab":
            texts[name] += raw.compute_single(context[name])
    assert texts == {"a": b"said", "b": b"said"}


def test_an_unread_stream_is_evicted_and_continues_once_it_is_read(raw: RawClient) -> None:
    """The program reads a token of one model, and queries another one about it."""
    context = contexts(raw, "ba")
    number = raw.start_request("stream", context=context["a"], prompt="abcdef", raw=True, credit=1)
    first_token(raw)
    assert said(raw, chat(raw, context["b"], "b")) == b"b"
    assert states(raw)["a"] != "ready"
    assert model(raw, "a")["tasks"] == 1
    raw.write([5, number, 1000])
    assert raw.wait_result(number)["metadata"]["output_tokens"] == 7, "and the end"
    text = b"".join(event[2]["text"] for event in raw.events)
    assert text == b"abcdef"


def test_an_evicted_stream_ends_if_it_is_never_read() -> None:
    with (
        daemon_with(*MODELS, reader_timeout_s=0.5) as daemon,
        RawClient(daemon.socket) as client,
    ):
        context = contexts(client, "ba")
        number = client.start_request(
            "stream", context=context["a"], prompt="abcdef", raw=True, credit=1
        )
        first_token(client)
        assert said(client, chat(client, context["b"], "b")) == b"b"
        with pytest.raises(ReaderTimeout):
            client.wait_result(number)
        assert model(client, "a")["tasks"] == 0


def test_an_evicted_turn_ends_when_its_model_is_swapped() -> None:
    with daemon_with(*MODELS) as daemon, RawClient(daemon.socket) as client:
        context = contexts(client, "ba")
        client.set_input(context["a"], b"abcdef")
        assert client.compute_single(context["a"]) == b"a"
        assert said(client, chat(client, context["b"], "b")) == b"b"
        assert model(client, "a")["tasks"] == 1
        client.call("unload_model", name="b", force=True)
        client.call("swap", name="a", to="c")
        assert model(client, "a")["tasks"] == 0
        with pytest.raises(Cancelled, match="was swapped"):
            client.call("compute_single", context=context["a"])


# Models that are loaded again.


def test_a_session_with_an_id_computes_only_new_tokens_when_its_model_is_loaded_again() -> None:
    with daemon_with(*MODELS, kv_ram_bytes=1 << 20) as daemon, RawClient(daemon.socket) as client:
        kept = {}
        for name in "ab":
            graph = load(client, name)["graph"]
            kept[name] = client.call(
                "init_execution_context_with_session_id", graph=graph, session_id=name
            )["context"]
        for turn in range(3):
            for name in "ab":
                said(client, chat(client, kept[name], f"turn {turn} " * 20))
                metadata = client.metadata(kept[name])
                new = len(f"turn {turn} ") * 20 + 3
                assert metadata["input_tokens"] - metadata["cached_tokens"] <= new + 1, metadata
        assert len(loads(daemon)) >= 6
