"""The error of a failed turn, or of a refused one, in the metadata of its context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inferd.backends.errors import (
    BackendError,
    Cancelled,
    ContextFull,
    EndOfSequence,
    InferdError,
    InvalidArgument,
    PromptTooLong,
    SessionBusy,
    Timeout,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.raw import RawClient

CONFIG = (
    echo_model("echo")
    + echo_model("slow", step_ms=50)
    + echo_model("failing-compute", fail_at_step=1)
    + echo_model("failing-compute_single", fail_at_step=1)
    + echo_model("deadly", abort_on="die")
)


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as raw:
        yield raw


def failure(client: RawClient, call: str, context: int, **params: Any) -> InferdError:
    """Return the error of a call, which must fail; a pulled turn may fail at a later token."""
    with pytest.raises(InferdError) as caught:
        client.call(call, context=context, **params)
        while call == "compute_single":
            client.call(call, context=context, **params)
    return caught.value


def described(client: RawClient, context: int) -> dict[str, Any]:
    """Return what the metadata says of the end of the last turn."""
    found = client.metadata(context)
    return {key: found[key] for key in ("stop_reason", "stop_detail", "error") if key in found}


def fields_of(error: InferdError) -> dict[str, Any]:
    """Return the description of a turn that *error* has ended or refused."""
    return {"stop_reason": error.name, "stop_detail": error.message, "error": error.to_wire()}


@pytest.mark.parametrize("call", ["compute", "compute_single"])
@pytest.mark.parametrize(
    ("model", "config", "prompt", "params", "kind"),
    [
        ("echo", '{"ctx-size":16}', b"x" * 20, {}, PromptTooLong),
        ("echo", "", b"x" * 100_000, {}, PromptTooLong),
        ("echo", "", None, {}, InvalidArgument),
        ("slow", "", b"much text", {"timeout_s": 0.08}, Timeout),
        ("failing-{call}", "", b"fail", {}, BackendError),
        ("deadly", "", b"die", {}, WorkerCrashed),
    ],
    ids=["long", "no-context-holds", "no-input", "timeout", "step", "worker"],
)
def test_a_failed_turn_is_described_until_the_next_input(
    call: str,
    model: str,
    config: str,
    prompt: bytes | None,
    params: dict[str, object],
    kind: type[InferdError],
    client: RawClient,
) -> None:
    context = client.context(model.format(call=call), config)
    if prompt is not None:
        client.set_input(context, prompt)
    assert described(client, context) == {"stop_reason": None, "stop_detail": ""}

    error = failure(client, call, context, **params)

    assert type(error) is kind and error.message and error.hint
    assert described(client, context) == fields_of(error)
    client.set_input(context, b"more")
    assert described(client, context) == {"stop_reason": None, "stop_detail": ""}


@pytest.mark.parametrize(("call", "params"), [("stream", {"credit": 9}), ("chat", {})])
def test_a_refused_turn_on_the_set_input_is_described(
    call: str, params: dict[str, Any], client: RawClient
) -> None:
    context = client.context(config='{"ctx-size":16}')
    client.set_input(context, b"x" * 20)
    error = failure(client, call, context, **params)
    assert type(error) is PromptTooLong
    assert described(client, context) == fields_of(error)


def test_a_refused_call_is_described_beside_the_turn_that_is_there(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"hello")
    client.call("compute", context=context)
    end = described(client, context)
    client.set_input(context, b'{"lora":[["none",1.0]]}', index=1)

    error = failure(client, "compute", context)
    assert described(client, context) == end | {"error": error.to_wire()}
    client.set_input(context, b'{"lora":[]}', index=1)
    client.call("compute", context=context)
    assert described(client, context) == end


@pytest.mark.parametrize(
    "call",
    [
        ("run_inference", {"tensor": {"data": b"x" * 100}}),
        ("prompt_compute", {"prompt": "x" * 100}),
    ],
    ids=lambda value: value[0],
)
def test_turns_that_leave_no_input_are_described_too(
    call: tuple[str, dict[str, Any]], client: RawClient
) -> None:
    name, params = call
    context = client.context(config='{"ctx-size":60}')

    error = failure(client, name, context, **params)

    assert isinstance(error, PromptTooLong)
    assert described(client, context) == fields_of(error)
    assert client.call("chat", context=context, prompt="short")["text"] == b"short"
    assert "error" not in client.metadata(context)


@pytest.mark.parametrize("call", ["compute", "compute_single"])
def test_a_full_context_has_its_hint(call: str, client: RawClient) -> None:
    context = client.context(config='{"ctx-size":9}')
    client.set_input(context, b"grand")

    error = failure(client, call, context)

    assert type(error) is ContextFull
    end = {"stop_reason": "context_full", "stop_detail": "9"}
    assert described(client, context) == end | {"error": error.to_wire()}


def test_the_end_of_a_turn_and_a_call_beside_one_are_no_failures(client: RawClient) -> None:
    context = client.context("slow")
    client.set_input(context, b"a")
    client.call("compute_single", context=context)
    with pytest.raises(EndOfSequence):
        client.call("compute_single", context=context)
    assert "error" not in client.metadata(context)

    turn = client.begin_stream(context, "a turn that takes a second or so")
    assert isinstance(failure(client, "compute", context), SessionBusy)
    client.wait_result(turn)
    assert "error" not in client.metadata(context)


def test_a_cancelled_turn_is_described(client: RawClient) -> None:
    context = client.context("slow")
    turn = client.begin_stream(context, "a turn that takes a second or so")
    client.call("cancel", context=context)
    with pytest.raises(Cancelled) as caught:
        client.wait_result(turn)
    metadata = caught.value.data.pop("metadata")
    assert metadata == client.metadata(context)
    assert described(client, context) == fields_of(caught.value)


@pytest.mark.parametrize("clear", ["fini_single", "reset"])
def test_cleared_output_has_no_error(clear: str, client: RawClient) -> None:
    context = client.context(config='{"ctx-size":16}')
    client.set_input(context, b"x" * 20)
    failure(client, "compute", context)
    client.call(clear, context=context)
    assert described(client, context) == {"stop_reason": None, "stop_detail": ""}


def test_an_embedding_context_describes_the_refusal_of_other_turns(client: RawClient) -> None:
    context = client.context(config='{"embedding":true}')
    client.set_input(context, b"hello")
    error = failure(client, "compute_single", context)
    assert type(error) is UnsupportedOperation
    assert described(client, context) == fields_of(error)
