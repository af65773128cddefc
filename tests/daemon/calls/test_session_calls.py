"""Branches, rewinding, deleting and the queue, over a real socket to a real daemon."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest

from inferd import AsyncClient, Client, QueueEvent
from inferd.backends.errors import (
    Busy,
    Cancelled,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    PromptTooLong,
    SessionBusy,
    ShuttingDown,
)
from inferd.daemon.config.settings import Config
from inferd.daemon.core import Daemon
from inferd.ipc.messages import CALLS, CREDIT_MAX, QueueParams
from inferd.ipc.server.connection import pack_error
from inferd.testing import RunningDaemon, running_daemon
from inferd.wire.frames import REPLY_BYTES_MAX, pack_frame
from tests.daemon.other_users import Stranger
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

CONFIG = """
[daemon]
sessions_max = 20
tasks_waiting_max = 6
prompt_tokens_waiting_user_max = 400

"""
CONFIG += echo_model("slow", slots=1, ctx_size=64, step_ms=20)
CONFIG += echo_model("slower", slots=1, step_ms=100)


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as raw:
        yield raw


def answer_to(client: RawClient, context: int, prompt: str, **params: Any) -> str:
    """Return the answer to *prompt*, which is added to the history unchanged."""
    result = client.call("chat", context=context, prompt=prompt, raw=True, **params)
    return str(result["text"].decode())


def queued(client: RawClient, count: int, first: int | None = None) -> list[dict[str, Any]]:
    """Return the queue once it has *count* tasks and the first is in its slot, if positions are
    reported. With *first*, the first task is that context's.
    """

    def tasks() -> list[dict[str, Any]] | None:
        found = list(client.call("queue")["tasks"])
        here = len(found) == count and found[0]["position"] in (0, None)
        return found if here and first in (None, found[0]["context"]) else None

    return wait_until(tasks)


# Branches.


def test_branches_share_one_state_which_is_not_computed_again(client: RawClient) -> None:
    context = client.context()
    answer_to(client, context, "shared")

    forked = client.call("fork_session", context=context, n=3)

    assert forked["tokens"] == forked["cached_tokens"] == 14
    assert "kv" not in forked, "the default, cached, is omitted"
    for branch, text in zip(forked["contexts"], ("one", "two", "three"), strict=True):
        assert answer_to(client, branch, text) == text
        assert client.metadata(branch)["cached_tokens"] >= 13
    states = {s["context"]: s["tokens"] for s in client.call("sessions")["sessions"]}
    assert [states[c] for c in (context, *forked["contexts"])] == [14, 22, 22, 26]


def test_the_cap_takes_all_branches_or_none(client: RawClient) -> None:
    context = client.context()
    client.call("fork_session", context=context, n=16)
    open_before = len(client.call("sessions")["sessions"])

    with pytest.raises(Busy):
        client.call("fork_session", context=context, n=16)

    assert len(client.call("sessions")["sessions"]) == open_before


def test_a_rewind_returns_the_remaining_and_kept_tokens(client: RawClient) -> None:
    context = client.context()
    for text in ("first", "second"):
        answer_to(client, context, text)

    assert client.call("rewind", context=context, turns=1) == {
        "tokens": 12, "turns": 1, "cached_tokens": 12,
    }  # fmt: skip
    assert client.call("rewind", context=context, tokens=4)["tokens"] == 4
    assert answer_to(client, context, "other") == "other"
    assert client.call("rewind", context=context, turns=2) == {}
    with pytest.raises(InvalidArgument):
        client.call("compute", context=context)


@pytest.mark.parametrize(
    "params", [{}, {"turns": 1, "tokens": 1}, {"turns": 0}, {"turns": 2}, {"tokens": 99}]
)
def test_an_invalid_rewind_is_refused(client: RawClient, params: dict[str, int]) -> None:
    context = client.context()
    answer_to(client, context, "x")

    with pytest.raises(InvalidArgument):
        client.call("rewind", context=context, **params)


def test_no_fork_or_rewind_during_a_turn(client: RawClient) -> None:
    context = client.context("slow")
    turn = client.start_request("stream", context=context, prompt="a long story", credit=1)
    queued(client, 1)

    for call, params in (("fork_session", {}), ("rewind", {"turns": 1})):
        with pytest.raises(SessionBusy):
            client.call(call, context=context, **params)
    client.call("cancel", request=turn)


def test_two_pulls_at_once_are_one_turn(client: RawClient) -> None:
    context = client.context("slow")
    client.set_input(context, b"abcdef")
    pulls = [client.start_request("compute_single", context=context) for _ in range(4)]

    outcomes = []
    for pull in pulls:
        try:
            client.wait_result(pull)
            outcomes.append("answered")
        except SessionBusy:
            outcomes.append("busy")

    assert outcomes[0] == "answered"
    assert len(client.call("queue")["tasks"]) == 1
    client.call("fini_single", context=context)
    assert client.call("queue")["tasks"] == [] and client.call("stats")["stats"]["waiting"] == 0


# Deleting.


def test_deleting_a_session_deletes_it_everywhere(client: RawClient, daemon: RunningDaemon) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]

    def opened(by: RawClient, on: int) -> dict[str, Any]:
        call = "init_execution_context_with_session_id"
        return dict(by.call(call, graph=on, session_id="diary"))

    context = opened(client, graph)["context"]
    answer_to(client, context, "secret")
    with RawClient(daemon.socket) as other:
        elsewhere = other.call("load_by_name", name="echo")["graph"]
        assert other.call("delete_session", session_id="diary") == {"deleted": True}
        assert "attached" not in opened(other, elsewhere)
    with pytest.raises(InvalidArgument):
        client.call("compute", context=context)
    back = opened(client, graph)
    assert back["attached"], "the other connection's session sleeps"
    assert client.call("delete_session", context=back["context"]) == {"deleted": True}
    assert client.call("delete_session", session_id="diary") == {"deleted": False}
    for params in ({}, {"context": context, "session_id": "diary"}, {"session_id": ""}):
        with pytest.raises(InvalidArgument):
            client.call("delete_session", **params)


def test_a_close_deletes_and_the_end_of_the_connection_does_not(
    daemon: RunningDaemon,
) -> None:
    with Client(daemon.socket) as client:
        graph = client.load_by_name("echo")
        one = client.init_execution_context_with_session_id(graph, "one", persist=False)
        client.init_execution_context_with_session_id(graph, "two")
        client.finalize_execution_context(one)
    with Client(daemon.socket) as client:
        graph = client.load_by_name("echo")
        attached = [
            client.init_execution_context_with_session_id(graph, name).attached
            for name in ("one", "two")
        ]
        assert attached == [False, True]
        assert client.delete_session(session_id="one") and client.delete_session(session_id="two")


# The queue.


def test_the_queue_shows_waiting_turns_and_their_expected_starts(
    client: RawClient,
) -> None:
    contexts = [client.context("slower") for _ in range(3)]
    long = {"prompt": "a long story " * 9, "credit": CREDIT_MAX}
    turns = [client.start_request("stream", context=c, **long) for c in contexts[:2]]
    turns.append(client.start_request("stream", context=contexts[2], priority="high", **long))

    tasks = queued(client, 3, first=contexts[2])  # a higher class takes the slot

    assert [t["position"] for t in tasks] == [0, 1, 2]
    assert {t["context"] for t in tasks} == set(contexts)
    assert {t["uid"] for t in tasks} == {os.getuid()}
    assert tasks[1]["starts_in_s"] <= tasks[2]["starts_in_s"]
    assert tasks[2]["starts_in_s"] > 0
    assert client.call("queue", all=True)["tasks"] != []
    for turn in turns:
        client.call("cancel", request=turn)


def test_a_worker_that_does_not_answer_has_no_positions() -> None:
    config = CONFIG.replace("step_ms = 20", "step_ms = 1500")
    with running_daemon(config) as stuck, RawClient(stuck.socket) as client:
        context = client.context("slow")
        turn = client.start_request("stream", context=context, prompt="x")
        [task] = queued(client, 1)
        assert (task["position"], task["starts_in_s"]) == (None, None)
        assert task["context"] == context
        client.call("cancel", request=turn)


def test_a_watching_client_gets_each_position_once_and_before_the_first_token(
    client: RawClient,
) -> None:
    contexts = [client.context("slow") for _ in range(4)]
    turns = [
        client.start_request(
            "stream", context=c, prompt="tale", credit=CREDIT_MAX, queue_events=True
        )
        for c in contexts
    ]

    for turn in turns:
        client.wait_result(turn)

    events = [e for e in client.events if e[1] == turns[3]]
    positions = [e[2]["position"] for e in events if "waiting" in e[2]]
    assert positions == sorted(positions, reverse=True)
    assert positions[-1] == 1 and len(positions) == len(set(positions))
    assert all("waiting" in e[2] for e in events[: len(positions)])
    assert not [e for e in client.events if e[1] == turns[0] and "waiting" in e[2]]


def test_positions_use_no_credit_and_only_watching_clients_get_them(client: RawClient) -> None:
    first, second, third = (client.context("slower") for _ in range(3))
    busy = client.start_request(
        "stream", context=first, prompt="a long story " * 9, credit=CREDIT_MAX
    )
    queued(client, 1)
    watching = client.start_request(
        "stream", context=second, prompt="x", credit=1, queue_events=True
    )
    other = client.start_request("stream", context=third, prompt="y", credit=CREDIT_MAX)
    queued(client, 3)
    client.call("cancel", request=busy)

    client.wait_result(other)
    client.call("cancel", request=watching)

    events = [e[2] for e in client.events if e[1] == watching]
    assert "waiting" in events[0]
    assert sum("waiting" not in event for event in events) == 1, "the credit is for tokens"
    assert not any("waiting" in e[2] for e in client.events if e[1] == other)


def test_a_turn_reports_its_start_after_its_places_and_before_its_tokens(
    client: RawClient,
) -> None:
    """Also one that has not waited. The event uses no credit."""
    contexts = [client.context("slow") for _ in range(2)]
    turns = [
        client.start_request(
            "stream", context=c, prompt="x", credit=2, queue_events=True, start_event=True
        )
        for c in contexts
    ]
    for turn in turns:
        client.wait_result(turn)
    for number, turn in enumerate(turns):
        events = [event[2] for event in client.events if event[1] == turn]
        assert [event.get("position") for event in events] == [*[1] * number, 0, None]
        assert events[number] == {"position": 0, "waiting": 0, "starts_in_s": 0.0}


@pytest.mark.parametrize(
    "params", [{"prompt": "x" * 100}, {"prompt": "x", "options": {"regex": "(("}}]
)
def test_a_turn_that_is_refused_reports_neither_place_nor_start(
    client: RawClient, params: dict[str, Any]
) -> None:
    first, second = client.context("slow"), client.context("slow")
    busy = client.start_request("stream", context=first, prompt="x" * 28, credit=CREDIT_MAX)
    queued(client, 1)
    refused = client.start_request(
        "stream", context=second, queue_events=True, start_event=True, **params
    )
    with pytest.raises((PromptTooLong, InvalidArgument)):
        client.wait_result(refused)
    assert not [event for event in client.events if event[1] == refused]
    client.call("cancel", request=busy)


def test_the_client_reports_the_start_of_a_turn(daemon: RunningDaemon) -> None:
    async def read() -> list[str]:
        found: list[str] = []
        async with AsyncClient(daemon.socket) as client, client.session("slow") as session:
            stream = session.stream("ab", on_start=lambda: found.append("start"))
            pieces = [piece async for piece in stream]
        return found + pieces

    assert anyio.run(read) == ["start", "a", "b"]


def test_the_client_reports_its_position(daemon: RunningDaemon) -> None:
    positions: list[QueueEvent] = []
    with Client(daemon.socket) as client, client.session("slow") as busy:
        stream = busy.stream("a long story")
        next(stream)
        with client.session("slow") as session:
            reader = session.stream("x", on_queue=positions.append)
            busy.cancel()
            assert list(reader) == ["x"]
            assert session.chat("y", on_queue=positions.append) == "y"
    assert all(p.waiting >= p.position >= 1 for p in positions)


def test_prompt_tokens_that_wait_are_bounded_and_the_refusal_says_when(
    client: RawClient,
) -> None:
    contexts = [client.context() for _ in range(2)]
    slow = [client.context("slower") for _ in range(6)]
    for context in slow:
        client.set_input(context, b"x" * 60)
    client.start_request("compute", context=slow[0])
    waiting = [client.start_request("compute", context=c) for c in slow[1:]]
    queued(client, 6)
    client.set_input(contexts[0], b"x" * 200)

    with pytest.raises(Busy) as caught:
        client.call("compute", context=contexts[0])

    assert "prompt tokens wait (yours)" in caught.value.message
    assert caught.value.data["queue_length"] >= 4
    assert caught.value.retry_after_s >= 0.1
    for turn in waiting:
        client.call("cancel", request=turn)
    client.call("cancel", context=slow[0])


def test_an_operator_sees_all_users_tasks(client: RawClient) -> None:
    assert client.call("queue", all=True) == {"tasks": []}


@pytest.mark.asyncio
async def test_other_users_see_only_their_tasks(tmp_path: Path) -> None:
    stranger = Stranger(os.getuid() + 1)
    folders: dict[str, Any] = {
        "socket": tmp_path / "s",
        "models_dir": tmp_path,
        "state_dir": tmp_path,
    }
    config = Config(**folders, cores=1, kv_ram_bytes=0)
    async with anyio.create_task_group() as group:
        daemon = Daemon(config, group, 1)
        request: Any = SimpleNamespace(
            row=CALLS["queue"],
            call="queue",
            number=1,
            params=QueueParams(all=True),
            connection=stranger,
        )
        with pytest.raises(PermissionDenied):
            await daemon.run_call(request)


def test_a_draining_daemon_makes_no_branches() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        context = client.context()
        client.call("drain")
        with pytest.raises(ShuttingDown):
            client.call("fork_session", context=context)
        assert client.call("rewind", context=context, tokens=0) == {}


def test_a_compute_whose_input_waited_begins_no_turn_in_a_draining_daemon() -> None:
    config = echo_model("slow", step_ms=500)
    with running_daemon(config=config) as daemon, RawClient(daemon.socket) as client:
        other, context = client.context("slow"), client.context("slow")
        streaming = client.begin_stream(other, "abc")
        inputs = [["prompt", {"data": b"hi"}], ["options", {"data": b'{"n-predict": 1}'}]]
        computing = client.start_request("compute", context=context, inputs=inputs)
        client.call("drain")
        with pytest.raises(ShuttingDown):
            client.wait_result(computing)
        client.wait_result(streaming)


# A context shift.


def test_a_shifted_session_continues_and_reports_the_shift(client: RawClient) -> None:
    context = client.context("slow")
    options = {"ctx-shift": True, "n-keep": 4, "n-predict": 36}
    client.call("set_options", context=context, options=options)

    answer_to(client, context, "abcdefghijklmnopqrstuvwxyz0123456789")

    metadata = client.metadata(context)
    assert metadata["shifts"] >= 1 and metadata["shifted"]
    assert metadata["output_tokens"] > 64 - 38, "it went on where the context was full"
    [session] = [s for s in client.call("sessions")["sessions"] if s["context"] == context]
    assert session["tokens"] < 64
    assert answer_to(client, context, "on", options={"n-predict": 2}) == "on"
    assert client.metadata(context)["cached_tokens"] == session["tokens"], (
        "both count the remaining tokens"
    )


POLICY = '{"memory_policy":{"context_shifting":false,"n_keep_tokens":8},"max_sessions":5}'


@pytest.mark.parametrize(
    ("config", "shifts"), [(None, False), ("", True), ('{"max_sessions":5}', True), (POLICY, False)]
)
def test_full_contexts_are_shifted_after_init_backend(
    client: RawClient, config: str | None, shifts: bool
) -> None:
    if config is not None:
        ignored = client.call("init_backend", config=config).get("ignored", [])
        assert ignored == (["max_sessions"] if "max" in config else [])
    context = client.context("slow")
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    for setting, expected in ((None, shifts), (False, False), (True, True)):
        client.call("reset", context=context)
        options = {"n-predict": 36} | ({} if setting is None else {"ctx-shift": setting})
        answer_to(client, context, text, options=options)
        metadata = client.metadata(context)
        assert (metadata["shifts"] > 0) == expected == metadata["shifted"], metadata
    client.call("deinit_backend")
    again = client.context("slow")
    answer_to(client, again, text, options={"n-predict": 36})
    assert client.metadata(again)["stop_reason"] == "context_full"


def in_force(client: RawClient, context: int) -> dict[str, tuple[Any, str]]:
    """Return the parameters in force that are not built in, with their origins."""
    found = client.call("parameters", context=context)["parameters"]
    return {p["name"]: (p["value"], p["origin"]) for p in found if p["origin"] != "built-in"}


def test_init_backend_gives_later_graphs_wasi_nn_backends_defaults(client: RawClient) -> None:
    usual = in_force(client, client.context("echo"))
    client.call("init_backend")
    theirs = in_force(client, client.context("echo"))
    assert {name: found for name, found in theirs.items() if found != usual.get(name)} == {
        "ctx-shift": (True, "backend"),
        "ctx-size": (2048, "backend"),
        "n-predict": (512, "backend"),
        "seed": (1234, "backend"),
        "temp": (0.7, "backend"),
        "top-k": (-1, "backend"),
        "min-p": (0.0, "backend"),
        "min-keep": (1, "backend"),
        "repeat-penalty": (1.1, "backend"),
        "last-n-penalty": (-1, "backend"),
        "dry-penalty-last-n": (-1, "backend"),
    }


def test_a_request_and_the_operator_come_before_the_defaults_of_init_backend() -> None:
    model = echo_model("echo", ctx_size=3000, temp=0.5, seed=7)
    with running_daemon(model) as daemon, RawClient(daemon.socket) as client:
        client.call("init_backend", config='{"memory_policy":{"n_keep_tokens":8}}')
        context = client.context("echo", config='{"n_predict":9,"sampling":{"temp":0}}')
        found = in_force(client, context)
        assert found["temp"] == (0.0, "graph") and found["n-predict"] == (9, "graph")
        assert found["seed"] == (7, "model") and found["ctx-size"] == (3000, "model")
        assert found["n-keep"] == (8, "backend") and found["min-p"] == (0.0, "backend")
        client.set_input(context, b'{"seed":8,"min_p":0.1}', index=1)
        answer_to(client, context, "on", options={"top-k": 3, "seed": 9})
        found = in_force(client, context)
        assert found["min-p"] == (0.1, "session")
        assert found["top-k"] == (3, "turn") and found["seed"] == (9, "turn")
        larger = client.call("load_by_name_with_config", name="echo", config='{"ctx_size":2500}')
        assert larger["ctx_size"] == 2500


# Credit and cancellation.


def test_credit_that_arrives_together_with_its_stream_counts(client: RawClient) -> None:
    context = client.context("echo")
    stream = [1, 99, "stream", {"context": context, "prompt": "abcdef", "raw": True, "credit": 1}]
    client.send_bytes(pack_frame(stream) + pack_frame([5, 99, 100]))
    assert client.wait_result(99)["metadata"]["stop_reason"] == "eos"
    assert client.streamed_text == "abcdef"


def test_credit_for_a_resumption_counts_from_the_start(daemon: RunningDaemon) -> None:
    call = "init_execution_context_with_session_id"
    with RawClient(daemon.socket) as client:
        graph = client.call("load_by_name", name="slow")["graph"]
        context = client.call(call, graph=graph, session_id="credit")["context"]
        client.begin_stream(context, "abcdef")
    with RawClient(daemon.socket) as client:
        graph = client.call("load_by_name", name="slow")["graph"]
        context = client.call(call, graph=graph, session_id="credit")["context"]
        resume = [1, 99, "resume", {"context": context, "credit": 1}]
        client.send_bytes(pack_frame(resume) + pack_frame([5, 99, 100]))
        assert client.wait_result(99)["metadata"]["stop_reason"] == "eos"
        assert client.streamed_text == "abcdef"


@pytest.mark.parametrize(
    ("call", "how"),
    [
        *itertools.product(("stream", "chat", "compute"), ("request", "context")),
        ("answers", "request"),
    ],
)
def test_the_error_of_a_cancelled_turn_has_its_metadata(
    client: RawClient, call: str, how: str
) -> None:
    context, prompt = client.context("slower"), "a long story " * 4
    if call == "compute":
        client.set_input(context, prompt.encode())
        number = client.start_request(call, context=context)
    else:
        number = client.start_request(call, context=context, prompt=prompt, raw=True)
    queued(client, 1)
    assert client.call("cancel", **{how: number if how == "request" else context})["cancelled"]
    with pytest.raises(Cancelled) as caught:
        client.wait_result(number)
    assert caught.value.data["metadata"] == client.metadata(context)
    assert caught.value.data["metadata"]["stop_reason"] == "Cancelled"


@pytest.mark.parametrize("how", ["request", "context"])
def test_the_error_of_a_pull_whose_token_is_not_awaited_has_metadata(
    client: RawClient, how: str
) -> None:
    client.begin_stream(client.context("slower"), "a long story " * 4)
    context = client.context("slower")
    client.set_input(context, b"another")
    number = client.start_request("compute_single", context=context)
    queued(client, 2)
    assert client.call("cancel", **{how: number if how == "request" else context})["cancelled"]
    with pytest.raises(Cancelled) as caught:
        client.wait_result(number)
    metadata = caught.value.data["metadata"]
    assert metadata["input_tokens"] == len("another") + 2
    assert metadata["stop_reason"] == ("Cancelled" if how == "context" else None)


def test_a_stream_left_early_has_its_metadata(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.session("slower", raw=True) as session:
        with session.stream("a long story") as stream:
            assert next(stream) == "a"
        assert stream.metadata["stop_reason"] == "Cancelled"
        assert stream.metadata["input_tokens"] == len("a long story") + 2
        assert stream.metadata["output_tokens"] >= 1
        assert session.metadata == stream.metadata


def test_an_error_reply_has_no_data_that_exceeds_a_frame() -> None:
    whole = pack_error(1, Cancelled("it was", data={"metadata": {"text": "x" * 1000}}))
    cut = pack_error(1, Cancelled("it was", data={"metadata": {"text": "x" * REPLY_BYTES_MAX}}))
    _, _, error = msgspec.msgpack.decode(whole[4:])
    assert len(error["data"]["metadata"]["text"]) == 1000
    _, _, error = msgspec.msgpack.decode(cut[4:])
    assert (error["name"], error["data"]) == ("Cancelled", {})


# The end of the client's requests.


def test_a_client_that_closes_after_its_last_request_is_cancelled(client: RawClient) -> None:
    with RawClient(str(client.socket.getpeername())) as leaving:
        context = leaving.context("slower")
        leaving.start_request("chat", context=context, prompt="a long story " * 20, raw=True)
        queued(client, 1)
        leaving.socket.shutdown(socket.SHUT_WR)
        connections = client.call("stats")["stats"]["connections"]
        assert len(queued(client, 1)) == 1
    wait_until(lambda: not client.call("queue")["tasks"])
    wait_until(lambda: client.call("stats")["stats"]["connections"] < connections)


# Refusals.


@pytest.mark.parametrize("call", ["chat", "stream"])
@pytest.mark.parametrize("raw", [True, False])
def test_a_refused_turn_leaves_nothing_of_its_input(
    client: RawClient, call: str, raw: bool
) -> None:
    """A refused client sends the same input again, which must be added only once."""
    context = client.context("echo")
    client.call("chat", context=context, prompt="first", raw=True)
    before, tokens = client.metadata(context), tokens_of(client, context)
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            client.call(call, context=context, prompt="x", raw=raw, options={"temp": -1})
    assert client.metadata(context) == before, "the turn before can still be read"
    assert client.output(context) == b"first"
    assert tokens_of(client, context) == tokens


@pytest.mark.parametrize("error", [PromptTooLong, InvalidArgument])
@pytest.mark.parametrize("call", ["chat", "stream", "answers", "run_inference", "prompt_compute"])
def test_a_turn_that_the_worker_refuses_leaves_nothing_of_its_input(
    client: RawClient, call: str, error: type[InferdError]
) -> None:
    context = client.context("echo")
    client.call("chat", context=context, prompt="first")
    text, options = "x" * 4094, {}
    if error is InvalidArgument:
        text, options = "x", {"stop-tokens": [10_000]}
    params: dict[str, Any] = {"prompt": text, "options": options}
    if call == "run_inference":
        params = {"tensor": {"data": text.encode()}, "config": json.dumps(options)}
    elif call == "prompt_compute":
        client.call("set_options", context=context, options=params.pop("options"))
    before, tokens = client.metadata(context), tokens_of(client, context)
    for _ in range(2):
        if call == "answers":
            found = client.call(call, context=context, **params)["answers"]
            assert [a["error"]["name"] for a in found] == [error.name] * 2
            assert [a["metadata"]["stop_reason"] for a in found] == [error.name] * 2
        else:
            with pytest.raises(error):
                client.call(call, context=context, **params)

    after = client.metadata(context)
    if call in ("run_inference", "prompt_compute"):  # whose callers may get only a number
        assert after.pop("error")["name"] == error.name
    assert after == before, "the turn before can still be read"
    assert tokens_of(client, context) == tokens
    [session] = [s for s in client.call("sessions")["sessions"] if s["context"] == context]
    assert session["turns"] == 1


def tokens_of(client: RawClient, context: int) -> int:
    sessions = client.call("sessions")["sessions"]
    return next(int(s["tokens"]) for s in sessions if s["context"] == context)
