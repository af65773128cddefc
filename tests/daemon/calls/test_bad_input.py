"""Invalid, oversized and unexpected input: each gets an error, and no other client notices."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import inferd
from inferd.backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    InvalidEncoding,
    LoadFailed,
    ProtocolError,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.backends.params.chat_options import DEPTH_MAX
from inferd.testing import RunningDaemon, running_daemon
from inferd.wire.frames import NESTING_MAX
from tests.echo import echo_model
from tests.raw import Closed, RawClient
from tests.waiting import wait_until

CONFIG = '[models.missing]\nfile = "no-such-file.gguf"\n'
CONFIG += echo_model("slow", slots=2, step_ms=5) + echo_model("crashes", abort_on="die now")


@contextmanager
def bystander(daemon: RunningDaemon) -> Iterator[None]:
    """Assert that another client's stream continues undisturbed meanwhile."""
    text = "undisturbed " * 5
    with RawClient(daemon.socket) as client:
        context = client.context("slow")
        number = client.start_request("stream", context=context, prompt=text, raw=True, credit=1000)
        yield
        client.wait_result(number)
        assert client.streamed_text == text


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def nested(depth: int) -> bytes:
    body = b"\x94\x01\x01\xa6models" + b"\x81\xa1x" * depth + b"\xc0"
    return struct.pack("<I", len(body)) + body


# Frames.


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", ProtocolError),
        (struct.pack("<I", 0xFFFF_FFFF), TooLarge),
    ],
)
def test_a_frame_that_cannot_be_read_ends_the_connection_with_a_reason(
    daemon: RunningDaemon, data: bytes, error: type[InferdError]
) -> None:
    with bystander(daemon), RawClient(daemon.socket) as client:
        client.send_bytes(data)
        goodbye = client.goodbye()

        assert type(goodbye) is error
        assert goodbye.hint
        with pytest.raises((Closed, ConnectionError)):
            client.read_message()


@pytest.mark.parametrize("depth", [2000, 100_000])
def test_a_frame_nested_too_deep_fails_only_its_call(daemon: RunningDaemon, depth: int) -> None:
    with bystander(daemon), RawClient(daemon.socket) as client:
        client.send_bytes(nested(depth))
        kind, number, error = client.read_message()

        assert (kind, number, error["name"]) == (3, 1, "InvalidArgument")
        assert error["data"] == {"nesting_max": NESTING_MAX}
        assert client.call("models")["models"], "the connection goes on"


def schema(levels: int) -> dict[str, Any]:
    """Return a JSON schema of objects in each other, as a map that nests *levels* deep."""
    inner: dict[str, Any] = {"type": "object"}
    for _ in range(levels // 2):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def test_a_json_schema_as_a_map_may_be_as_deep_as_real_ones(client: inferd.Client) -> None:
    with client.session("echo") as session:
        session.set_options({"json-schema": schema(60)})
        assert session.chat("x", options={"json-schema": schema(60)}).metadata["ignored"] == []


def function(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 5):
        value = {"a": value}
    return {"type": "function", "function": {"name": "f", "parameters": {"a": value}}}


def test_the_deepest_tools_are_in_replies(client: inferd.Client) -> None:
    with client.session("echo", options={"tools": [function(DEPTH_MAX)]}) as session:
        (tools,) = (p["value"] for p in session.parameters() if p["name"] == "tools")
        assert tools == [function(DEPTH_MAX)]


@pytest.mark.parametrize("depth", [NESTING_MAX, 400, 2000])
def test_a_value_nested_too_deep_is_an_argument_of_its_call(
    client: inferd.Client, depth: int
) -> None:
    deep: Any = {}
    for _ in range(depth):
        deep = {"a": deep}
    with client.session("echo") as session:
        for prompt, options in (
            ("x", {"json-schema": deep}),
            ("x", {"tools": [deep]}),
            ("x", {"chat-template-kwargs": {"a": deep}}),
            ("x", {"unknown": deep}),
            ([{"role": "user", "content": [deep]}], {}),
        ):
            with pytest.raises(InvalidArgument) as caught:
                session.chat(prompt, options=options)
            assert "recursion" not in str(caught.value)
        assert session.chat("still here") == "still here"
    text = "[" * 10 * depth + "]" * 10 * depth
    for config in (
        {"tools": text},
        {"json-schema": text},
        '{"tools":' + text + "}",
        {"tools": [deep]},
    ):
        with pytest.raises((InvalidArgument, InvalidEncoding)) as refused:
            client.load_by_name_with_config("echo", config)
        assert "recursion" not in str(refused.value)


def test_a_client_that_disconnects_within_a_frame_leaves_nothing(
    daemon: RunningDaemon,
) -> None:
    with RawClient(daemon.socket) as client:
        client.send_bytes(frame([1, 1, "models", {}])[:7])

    with RawClient(daemon.socket) as client:
        assert client.call("models")["models"]


# Calls.


def test_an_unknown_call_is_unsupported_and_the_nearest_is_named(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        with pytest.raises(UnsupportedOperation) as caught:
            client.call("comptue")
        assert "'compute'" in caught.value.hint
        assert client.call("models")["models"], "the connection goes on"


def test_whole_numbers_of_params_may_be_floats(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        graph = float(client.call("load_by_name", name="echo")["graph"])
        context = float(client.call("init_execution_context", graph=graph)["context"])
        tensor = {"dimensions": [4.0], "type": "u8", "data": b"word"}
        client.call("set_input", context=context, index=0.0, tensor=tensor)
        client.call("set_options", context=context, options={"n-predict": 2.0})
        client.call("stream", context=context, credit=8.0)
        assert client.streamed_text == "wo"
        for wrong in (context + 0.5, 2.0**80, float("inf"), float("nan")):
            with pytest.raises(InvalidArgument):
                client.call("get_output", context=wrong)
        with pytest.raises(InvalidArgument):
            client.call("get_output", context=context, index=True)


@pytest.mark.parametrize(
    "params",
    [
        {"prompt": "x", "priority": "highest"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": 1, "content": []}]},
    ],
)
def test_a_stream_with_bad_values_is_refused_before_it_reaches_a_worker(
    daemon: RunningDaemon, params: dict[str, object]
) -> None:
    with RawClient(daemon.socket) as client:
        context = client.context()
        with pytest.raises(InvalidArgument) as caught:
            client.call("stream", context=context, **params)
        assert caught.value.hint
        assert client.call("chat", context=context, prompt="still here")["text"] == b"still here"


def test_too_many_requests_in_flight_are_busy_and_the_others_are_answered(
    daemon: RunningDaemon,
) -> None:
    with RawClient(daemon.socket) as client:
        limit = client.server_hello[1]["limits"]["requests_max"]
        graph = client.call("load_by_name", name="slow")["graph"]
        params = {"graph": graph, "text": "x"}
        requests = [frame([1, n, "tokenize", params]) for n in range(1, limit + 51)]
        client.send_bytes(b"".join(requests))
        replies = [client.read_message() for _ in requests]

    refused = [r[2]["name"] for r in replies if r[0] == 3]
    assert sorted(r[1] for r in replies) == list(range(1, limit + 51))
    assert set(refused) == {"Busy"}, "nothing was refused, or for another reason"
    assert len(refused) <= 50


# Models.


def test_a_missing_model_file_is_explained(daemon: RunningDaemon) -> None:
    with bystander(daemon), RawClient(daemon.socket) as client:
        with pytest.raises(LoadFailed) as caught:
            client.call("load_by_name", name="missing")
        assert "no-such-file.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty", b""),
        ("text", b"this is no model\n" * 100),
        ("magic-only", b"GGUF"),
        ("garbage", b"GGUF\x03\x00\x00\x00" + b"\xff" * 4096),
        ("version", b"GGUF\x63\x00\x00\x00" + b"\x00" * 4096),
    ],
)
def test_a_file_that_is_not_a_model_is_refused_by_its_kind(
    daemon: RunningDaemon, name: str, content: bytes
) -> None:
    (daemon.directory / "models" / f"{name}.gguf").write_bytes(content)
    with bystander(daemon), RawClient(daemon.socket) as client:
        with pytest.raises(LoadFailed) as caught:
            client.call("load_by_name", name=name)
        assert f"{name}.gguf" in caught.value.message
        (model,) = client.call("show", name=name)["models"]
        assert model["state"] == "failed"


def test_a_name_cannot_leave_the_models_directory(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        for name in ("../../etc/passwd", "/etc/passwd", "echo/../echo", "", "x" * 10_000):
            with pytest.raises(InferdError) as caught:
                client.call("load_by_name", name=name)
            assert caught.value.name == "ModelNotFound"


# Clients that misbehave.


def test_a_reader_without_credit_delays_no_other_client(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as slow, RawClient(daemon.socket) as other:
        for _ in range(2):  # both slots
            context = slow.context("slow")
            slow.start_request("stream", context=context, prompt="z" * 500, raw=True, credit=1)

        reply = other.call("chat", context=other.context("slow"), prompt="served", raw=True)

        assert reply["text"] == b"served"


def test_a_writable_descriptor_is_refused_as_a_model(daemon: RunningDaemon, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with (
        RawClient(daemon.socket) as client,
        path.open("r+b") as file,
        pytest.raises(InvalidArgument) as caught,
    ):
        client.call("load", [file.fileno()], fd=0, encoding="ggml", target="auto")
    assert "read-only" in caught.value.hint


# Workers and daemons.


def test_only_the_input_that_crashes_its_worker_is_refused(
    daemon: RunningDaemon,
) -> None:
    with bystander(daemon), RawClient(daemon.socket) as client:
        context = client.context("crashes")
        with pytest.raises(WorkerCrashed) as caught:
            client.call("chat", context=context, prompt="please die now", raw=True)
        assert caught.value.data == {"model": "crashes", "cause": "input"}
        assert not caught.value.retryable, "the same input is refused for an hour"
        assert "daemon's log" in caught.value.hint

        client.call("reset", context=context)
        reply = client.call("chat", context=context, prompt="and again", raw=True)
        assert reply["text"] == b"and again"


def test_a_worker_killed_from_outside_is_replaced(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        context = client.context("crashes")
        (model,) = client.call("show", name="crashes")["models"]
        os.kill(model["pid"], signal.SIGKILL)

        reply = client.call("chat", context=context, prompt="hello", raw=True)
        assert reply["text"] == b"hello"


def test_a_second_daemon_on_the_same_socket_is_refused(daemon: RunningDaemon) -> None:
    with bystander(daemon):
        second = subprocess.run(
            [sys.executable, "-m", "inferd", "serve", "--socket", daemon.socket],
            capture_output=True,
            text=True,
            timeout=30,
        )

    assert second.returncode != 0
    assert "answers on" in second.stderr
    assert Path(daemon.socket).exists()


def test_refusals_are_logged_with_their_reason(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        client.send_bytes(b"\x05\x00\x00\x00hello")
        client.goodbye()

    assert "connection.refused" in daemon.log


def test_connections_are_bounded_and_a_closed_one_admits_another() -> None:
    with (
        running_daemon("[daemon]\nconnections-max = 2\n") as daemon,
        RawClient(daemon.socket) as one,
        RawClient(daemon.socket) as two,
    ):
        assert two.call("models")
        with RawClient(daemon.socket) as third:
            assert isinstance(third.goodbye(), Busy)
        two.socket.close()
        wait_until(lambda: one.call("stats")["stats"]["connections"] <= 1)
        with RawClient(daemon.socket) as again:
            assert again.call("models")


def test_a_socket_path_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    done = subprocess.run(
        [sys.executable, "-m", "inferd", "serve", "--socket", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.returncode != 0
    assert path.read_text() == "precious"


def descriptors_of(daemon: RunningDaemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_descriptors_of_refused_calls_are_closed(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client, open(os.devnull, "rb") as file:
        client.call("models")
        before = descriptors_of(daemon)
        for _ in range(20):
            with pytest.raises(InvalidArgument):
                client.call("set_input", [file.fileno()], context=1, index=0, tensor={"fd": 0})
            with pytest.raises(InferdError):
                client.call("load", [file.fileno()], fd=0, encoding="onnx", target=0)
            with pytest.raises(UnsupportedOperation):
                client.call("no_such_call", [file.fileno()], fd=0)

        # Connections of other tests may still close.
        wait_until(lambda: descriptors_of(daemon) <= before)


def test_a_refused_calls_descriptor_never_serves_the_next_call(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        context = client.context()
        secret, public = os.memfd_create("secret"), os.memfd_create("public")
        os.write(secret, b"secret")
        os.write(public, b"public")
        with pytest.raises(UnsupportedOperation):
            client.call("no_such_call", [secret])
        client.call("set_input", [public], context=context, index=0, tensor={"fd": 0})
        client.call("compute", context=context)
        os.close(secret)
        os.close(public)

        assert client.output(context) == b"public"


def test_invalid_messages_are_refused_before_they_reach_the_worker(
    daemon: RunningDaemon,
) -> None:
    with bystander(daemon), RawClient(daemon.socket) as client:
        graph = client.call("load_by_name", name="slow")["graph"]
        bad: list[list[dict[str, object]]] = [[{}], [], [{"role": "user", "content": 1}]]
        for messages in bad:
            with pytest.raises(InvalidArgument):
                client.call("apply_template", graph=graph, messages=messages)


@pytest.mark.parametrize("token", [-1, -2, -(2**31), 259, 2**31, 2**63])
def test_tokens_outside_the_vocabulary_are_refused(daemon: RunningDaemon, token: int) -> None:
    """Among them are the numbers that stand for images in histories."""
    with RawClient(daemon.socket) as client:
        graph = client.call("load_by_name", name="echo")["graph"]
        with pytest.raises(InvalidArgument):
            client.call("detokenize", graph=graph, tokens=[65, token])
        context = client.context("echo")
        refused: list[dict[str, Any]] = [
            {"prompt_tokens": [65, token]},
            {"prompt": "x", "options": {"stop_tokens": [token]}},
            {"prompt": "x", "options": {"token_conditions": [{"token_id": token}]}},
        ]
        for params in refused:
            with pytest.raises(InvalidArgument):
                client.call("chat", context=context, **params)


def test_giant_names_are_refused_quickly_and_answered_briefly(daemon: RunningDaemon) -> None:
    giant = "x" * 1_000_000
    with bystander(daemon), RawClient(daemon.socket) as client:
        errors = []
        for call, params in (
            (giant, {}),
            ("load_by_name", {"name": giant}),
            (
                "load_by_name_with_config",
                {"name": "echo", "config": f'{{"{giant}":1,"strict":true}}'},
            ),
            ("load_by_name_with_config", {"name": "echo", "config": f'{{"temp":"{giant}"}}'}),
            ("load", {"builders": [b"echo"], "encoding": giant}),
        ):
            with pytest.raises(InferdError) as caught:
                client.call(call, **params)
            errors.append(caught.value)

    assert max(len(e.message) + len(e.hint) for e in errors) < 2000
