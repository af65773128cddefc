"""Tensors through the protocol: named ones, ones by index, their bounds and errors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import inferd
from inferd import (
    Cancelled,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    SessionBusy,
    Timeout,
    WorkerCrashed,
)
from inferd.backends.tensors import Tensor
from inferd.daemon.calls.tensors import are_tensors, is_tensor
from inferd.ipc.messages import INPUTS_MAX
from inferd.sessions import TurnOptions
from inferd.testing import RunningDaemon, running_daemon
from tests.durations import check_duration
from tests.echo import echo_model
from tests.raw import RawClient
from tests.sessions.conversation.test_sessions import opened
from tests.sessions.doubles import Harness, Source

SHAPE = [1, 3, 224, 224]
SIZE = 4 * 3 * 224 * 224
CONFIG = (
    "[daemon]\nsession-bytes-user-max = 1500000\n"
    + echo_model("echo")
    + echo_model("slow", step_ms=1000)
    + echo_model("deadly", abort_on="die")
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(config=CONFIG) as running:
        yield running


def test_a_picture_passes_in_linear_time(daemon: RunningDaemon) -> None:
    picture = inferd.Tensor(data=os.urandom(SIZE), dimensions=SHAPE, type="fp32")
    with inferd.Client(daemon.socket) as client:
        graph = client.load("echo")
        assert graph.tensors
        context = client.init_execution_context(graph)

        def pass_picture() -> None:
            assert client.compute(context, {"before": picture}).outputs == [("before", picture)]
            client.set_input(context, 0, picture)
            client.compute(context)
            assert client.get_output(context, 0) == picture.data

        check_duration(1, pass_picture)


def test_numbers_are_inputs_by_index_and_a_text_replaces_them(raw: RawClient) -> None:
    context = raw.context()
    for index, data in ((1, b"eightbyt"), (0, b"fourfour"), (7, b"x" * 16)):
        raw.set_input(context, data, index, type="i32", dimensions=[2, len(data) // 8])
    with pytest.raises(NotFound):
        raw.output(context, 2)
    raw.call("compute", context=context)
    assert [raw.output(context, i) for i in range(3)] == [b"fourfour", b"eightbyt", b"x" * 16]
    raw.call("fini_single", context=context)
    assert raw.output(context) == b""
    raw.call("compute", context=context)
    assert raw.output(context) == b"fourfour"
    raw.set_input(context, b"text")
    assert raw.output(context) == b""
    raw.call("compute", context=context)
    assert (raw.output(context), raw.metadata(context)["output_tokens"]) == (b"text", 5)


def test_the_inputs_by_index_are_bounded(raw: RawClient) -> None:
    context = raw.context()
    for index in range(INPUTS_MAX):
        raw.set_input(context, b"fourfour", index, type="i32", dimensions=[2])
    with pytest.raises(InvalidArgument, match=str(INPUTS_MAX)):
        raw.set_input(context, b"fourfour", INPUTS_MAX, type="i32", dimensions=[2])
    raw.set_input(context, b"eightbyt", 0, type="i32", dimensions=[2])
    raw.call("compute", context=context)
    assert raw.output(context, 0) == b"eightbyt"


def test_an_input_for_get_output_counts_in_the_memory_of_sessions(raw: RawClient) -> None:
    context, data = raw.context(), bytes(SIZE)
    raw.set_input(context, data, type="fp32", dimensions=SHAPE)
    raw.set_input(context, data, 2, type="fp32", dimensions=SHAPE)
    with pytest.raises(QuotaExceeded):
        raw.set_input(context, data, 3, type="fp32", dimensions=SHAPE)
    with pytest.raises(QuotaExceeded):
        raw.call("compute", context=context)
    raw.set_input(context, b"text")
    raw.set_input(context, data, type="fp32", dimensions=SHAPE)


def test_a_computation_has_time_limits_and_excludes_others(raw: RawClient) -> None:
    context = raw.context("slow")
    inputs = [["a", {"data": b"ab"}]]
    with pytest.raises(Timeout):
        raw.call("compute", context=context, inputs=inputs, timeout_s=0.05)
    other = raw.context("slow")
    first = raw.start_request("compute", context=other, inputs=inputs)
    with pytest.raises(SessionBusy):
        raw.call("compute", context=other, inputs=inputs)
    with pytest.raises(SessionBusy):
        raw.set_input(other, bytes(8), type="fp32", dimensions=[2])
    raw.wait_result(first)
    raw.call("finalize_execution_context", context=other)
    with pytest.raises(InvalidArgument):
        raw.call("compute", context=other, inputs=inputs)


def test_a_draining_daemon_finishes_a_computation() -> None:
    inputs = [["a", {"data": b"ab"}]]
    with running_daemon(config=CONFIG) as daemon, RawClient(daemon.socket) as raw:
        context = raw.context("slow")
        computing = raw.start_request("compute", context=context, inputs=inputs)
        drained = raw.start_request("drain")
        assert raw.wait_result(drained) == {}
        assert raw.has_answer(computing)
        assert raw.wait_result(computing)["outputs"] == inputs


def test_outputs_are_not_kept_after_another_input(raw: RawClient) -> None:
    context = raw.context("slow")
    raw.set_input(context, bytes(8), type="fp32", dimensions=[2])
    computing = raw.start_request("compute", context=context)
    raw.set_input(context, b"text")
    with pytest.raises(Cancelled):
        raw.wait_result(computing)
    assert raw.output(context) == b""


@pytest.mark.asyncio
async def test_an_input_beside_a_turn_is_refused_without_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    session = opened(harness)
    await session.set_input(b"hello")
    await session.start_turn(TurnOptions())
    harness.source.loaded = None  # evicted, as the turn is not read
    monkeypatch.delattr(Source, "ready")
    assert not await is_tensor(session, 0, Tensor(b"text"))
    assert not await are_tensors(session, [("prompt", Tensor(b"text"))])


def test_a_tensor_that_ends_the_worker_is_not_sent_again(raw: RawClient) -> None:
    context = raw.context("deadly")
    for _ in range(2):
        with pytest.raises(WorkerCrashed):
            raw.call("compute", context=context, inputs=[["a", {"data": b"die"}]])
    live = [["a", {"data": b"live"}]]
    assert raw.call("compute", context=context, inputs=live)["outputs"] == live
