"""OpenTelemetry traces of a real daemon, as a collector gets them."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from inferd import AsyncClient, Client, Session
from inferd.backends.echo.model import EMBEDDING_SIZE
from inferd.backends.errors import (
    Busy,
    Cancelled,
    ContextFull,
    InferdError,
    InvalidArgument,
    Timeout,
)
from inferd.daemon.traces.tracing import FLUSH_S_MAX
from inferd.ipc.messages import TRACEPARENT_CHARACTERS_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.service.test_components import limit
from tests.daemon.traces.otlp import SECONDS_MAX, Collector, ReceivedSpan, collecting
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
OTHER = "0" * 31 + "1"
MODELS = (
    "tasks-waiting-max = 2\nquantum-tokens = 100000\n"
    + echo_model("m", slots=1, ctx_size=1024)
    + echo_model("r", ranks=True)
    + echo_model("slow", slots=1, ctx_size=1024, step_ms=20, load_ms=100)
)
CLOCK_NS = 50_000_000
"""The tolerance for reading the date at different times."""


def config(traces: object, more: str = MODELS) -> str:
    return f'[daemon]\ntraces = "{traces}"\n{more}'


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(collector: Collector) -> Iterator[RunningDaemon]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        with running_daemon(config(collector.address)) as running:
            yield running


def usage(reported: ReceivedSpan) -> tuple[int, int, list[str]]:
    found = reported.attributes
    return (
        found["gen_ai.usage.input_tokens"],
        found["gen_ai.usage.output_tokens"],
        found["gen_ai.response.finish_reasons"],
    )


# Exported spans.


def test_a_request_is_a_span_with_its_phases_inside(client: Client, collector: Collector) -> None:
    with client.session("slow", priority="high") as session:
        before = time.time_ns()
        said = session.chat("hello you", options={"seed": 7, "temp": 0.5, "n-predict": 50})
        after = time.time_ns()
    trace = collector.next()
    outer, (queue, prefill, decode) = trace.outer, trace.inside

    assert (outer.name, outer.parent_id, outer.failed) == ("chat slow", "", False)
    assert trace.names == ["queue", "prefill", "decode"]
    assert before - CLOCK_NS <= outer.began <= queue.began
    assert (queue.ended, prefill.ended) == (prefill.began, decode.began)
    assert decode.ended <= outer.ended <= after + CLOCK_NS
    assert decode.seconds > 0.02 * (said.metadata["output_tokens"] - 1) * 0.9
    assert outer.resource["service.name"] == "inferd"
    reported = said.metadata
    assert outer.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "inferd",
        "gen_ai.request.model": "slow",
        "gen_ai.response.model": "slow",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": pytest.approx(0.95),
        "gen_ai.request.top_k": 40.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.usage.input_tokens": reported["input_tokens"],
        "gen_ai.usage.output_tokens": reported["output_tokens"],
        "gen_ai.response.finish_reasons": [reported["stop_reason"]],
        "inferd.call": "chat",
        "inferd.priority": "high",
        "inferd.cached_tokens": reported["cached_tokens"],
        "inferd.parks": 0,
        "inferd.context_shifts": 0,
        "inferd.fingerprint": reported["fingerprint"],
    }
    assert collector.paths[-1] == "/v1/traces"


def test_a_stream_of_text_as_it_stands_is_a_completion(
    client: Client, collector: Collector
) -> None:
    with client.session("m", raw=True) as session:
        assert "".join(session.stream("hello")) == "hello"
        assert session.chat(" you") == " you"
    first, second = collector.next().outer, collector.next().outer
    assert (first.name, first.attributes["inferd.call"]) == ("text_completion m", "stream")
    assert usage(first) == (7, 6, ["eos"])
    assert second.attributes["inferd.cached_tokens"] > 0
    assert first.trace_id != second.trace_id


def test_a_turn_that_waits_for_its_model_has_a_span_of_the_load(
    client: Client, collector: Collector
) -> None:
    with client.session("slow") as session:
        client.unload_model("slow", force=True)
        session.chat("hello")
    trace = collector.next()
    assert trace.names == ["load", "queue", "prefill", "decode"]
    load = trace.inside[0]
    assert trace.outer.began <= load.began and load.ended <= trace.inside[1].began
    assert load.seconds > 0.09


def test_a_turn_with_tokens_on_demand_is_one_request(client: Client, collector: Collector) -> None:
    with client.session("m") as session:
        assert "".join(session.pull("abc")) == "abc"
        trace = collector.next()
        assert trace.outer.name == "text_completion m"
        assert trace.outer.attributes["inferd.call"] == "compute_single"
        assert usage(trace.outer) == (5, 4, ["eos"])
        with session.pull("def") as pull:
            assert next(pull) == "d"
    left = collector.next().outer
    assert (left.failed, left.attributes["error.type"]) == (True, "Cancelled")
    assert usage(left)[2] == ["error"]


def test_the_call_that_ends_an_on_demand_turn_is_not_a_request(
    daemon: RunningDaemon, collector: Collector
) -> None:
    with RawClient(daemon.socket) as raw:
        context = raw.context("m")
        raw.set_input(context, b"x" * 1000)
        with pytest.raises(ContextFull):
            while True:
                raw.compute_single(context)
        raw.call("chat", context=raw.context("m"), prompt="hello")
    pulled, asked = collector.next().outer, collector.next().outer
    assert (usage(pulled)[2], pulled.failed) == (["context_full"], False)
    assert asked.attributes["inferd.call"] == "chat"


def test_a_turn_that_outlives_its_worker_is_one_request(
    client: Client, collector: Collector
) -> None:
    with client.session("slow", raw=True) as session:
        stream = session.stream("x" * 20)
        said = next(stream)
        os.kill(client.show("slow")["pid"], signal.SIGKILL)
        assert said + "".join(stream) == "x" * 20
    trace = collector.next()
    assert trace.names == ["queue", "prefill", "decode"]
    assert (usage(trace.outer), trace.outer.failed) == ((22, 21, ["eos"]), False)


def test_several_answers_are_one_request_with_the_phases_of_each(
    client: Client, collector: Collector
) -> None:
    with client.session("m") as session:
        session.answers("hello", n=3)
    trace = collector.next()
    assert trace.outer.attributes["gen_ai.request.choice.count"] == 3
    prompt, output, reasons = usage(trace.outer)
    assert (output, reasons) == (18, ["eos"] * 3)
    assert prompt < 20, "the prompt counts once"
    decoded = [s.attributes["inferd.answer_index"] for s in trace.inside if s.name == "decode"]
    assert decoded == [0, 1, 2]


def test_a_refused_answer_counts_as_requested(client: Client, collector: Collector) -> None:
    with client.session("slow") as session:
        given = session.answers("hello to you all", n=5)
    trace = collector.next()
    reported = [answer for answer in given if answer.error is None]
    assert len(reported) < 5, "two may wait"
    assert trace.outer.attributes["gen_ai.request.choice.count"] == 5
    assert (usage(trace.outer)[2], trace.outer.failed) == (["eos"] * len(reported), False)


def test_texts_that_become_embeddings_are_one_request(client: Client, collector: Collector) -> None:
    found = client.embed("m", [f"text {n}" for n in range(40)])
    trace = collector.next()
    assert trace.outer.name == "embeddings m"
    assert trace.names == ["queue", "prefill"]
    reported = trace.outer.attributes
    assert reported["gen_ai.usage.input_tokens"] == sum(found.tokens)
    assert reported["gen_ai.embeddings.dimension.count"] == EMBEDDING_SIZE
    assert not {"gen_ai.usage.output_tokens", "gen_ai.request.seed"} & reported.keys()


def test_no_span_holds_a_text_a_user_or_a_session(client: Client, collector: Collector) -> None:
    options = {"stop": ["secret-stop"], "n-predict": 5}
    with client.session("m", session_id="secret-id") as session:
        session.chat("secret-prompt", options=options)
        with pytest.raises(InvalidArgument):
            session.chat("x", options={"secret-key": 1})
    collector.next()
    assert collector.next().outer.attributes["error.type"] == "InvalidArgument"
    assert not [body for body in collector.bodies if b"secret" in body]


def test_sentences_that_are_compared_are_in_no_request(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    """Not in the request that loaded the model either, in whose context its worker reports."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    comparing = {"similarity-model": "comparer", "similarity-wait-ms": 60_000, "ctx-size": 1024}
    models = echo_model("comparer", ctx_size=1024) + echo_model("said", **comparing)
    compared = {"stop-similarity": "nothing of it", "stop-similarity-threshold": 1.0}
    with running_daemon(config(collector.address, models)) as daemon, Client(daemon.socket) as c:
        c.load_by_name("comparer")
        with c.session("said", raw=True, options=compared) as session:
            c.unload_model("said", force=True)
            for names in (["load", "queue", "prefill", "decode"], ["queue", "prefill", "decode"]):
                whole = session.chat("It rains. So it is. ")
                assert whole.metadata["adjusted"] == {}, "both were compared"
                trace = collector.next()
                assert (trace.outer.name, trace.names) == ("text_completion said", names)


# Failures.


def refused(collector: Collector, error: type[InferdError], inside: list[str]) -> None:
    trace = collector.next()
    assert trace.outer.failed and trace.outer.attributes["error.type"] == error.__name__
    assert trace.names == inside


def test_refused_cancelled_and_late_requests_have_their_error(
    daemon: RunningDaemon, collector: Collector
) -> None:
    with RawClient(daemon.socket) as raw:
        contexts = [raw.context("slow") for _ in range(4)]
        running = raw.begin_stream(contexts[0], "x" * 500)
        waiting = [
            raw.start_request("chat", context=context, prompt="y") for context in contexts[1:3]
        ]
        wait_until(lambda: raw.call("stats")["stats"]["waiting"] >= len(waiting))
        with pytest.raises(Busy):
            raw.call("chat", context=contexts[3], prompt="z")
        refused(collector, Busy, [])
        for number in waiting:
            raw.call("cancel", request=number)
            with pytest.raises(Cancelled):
                raw.wait_result(number)
            refused(collector, Cancelled, ["queue"])
        with pytest.raises(Timeout):
            raw.call("chat", context=contexts[1], prompt="y", queue_timeout_s=0.05)
        refused(collector, Timeout, ["queue"])
        raw.call("cancel", request=running)
        with pytest.raises(Cancelled):
            raw.wait_result(running)
        refused(collector, Cancelled, ["queue", "prefill", "decode"])
        with pytest.raises(InvalidArgument):
            raw.call("chat", context=1, prompt="nobody")
    trace = collector.next()
    assert trace.outer.name == "chat" and "gen_ai.request.model" not in trace.outer.attributes


def test_a_client_that_disconnects_ends_its_span(
    daemon: RunningDaemon, collector: Collector
) -> None:
    with RawClient(daemon.socket) as raw:
        raw.begin_stream(raw.context("slow"), "x" * 500)
    refused(collector, Cancelled, ["queue", "prefill", "decode"])


# The caller's trace.


def test_a_call_joins_its_callers_trace(daemon: RunningDaemon, collector: Collector) -> None:
    with RawClient(daemon.socket) as raw:
        context = raw.context("m")
        dropped = f"00-{OTHER}-{SPAN}-00"
        raw.call("chat", context=context, prompt="dropped", traceparent=dropped)
        raw.call("chat", context=context, prompt="kept", traceparent=PARENT)
        raw.call("chat", context=context, prompt="kept", traceparent=f"01{PARENT[2:]}-of-later")
        for _ in range(2):
            outer = collector.next().outer
            assert (outer.trace_id, outer.parent_id) == (TRACE, SPAN)


@pytest.mark.parametrize(
    "wrong",
    [
        "x",
        PARENT.upper(),
        PARENT + "\n",
        PARENT + "-more",
        "ff" + PARENT[2:],
        PARENT.replace(TRACE, "0" * 32),
        PARENT.replace(SPAN, "0" * 16),
        "01" + PARENT[2:] + "-" + "x" * TRACEPARENT_CHARACTERS_MAX,
    ],
)
def test_an_invalid_parent_is_refused(daemon: RunningDaemon, wrong: str) -> None:
    with RawClient(daemon.socket) as raw:
        context = raw.context("m")
        with pytest.raises(InvalidArgument, match="traceparent"):
            raw.call("chat", context=context, prompt="x", traceparent=wrong)


def in_session(client: Client, call: Callable[[Session], object]) -> object:
    with client.session("m") as session:
        return call(session)


CALLS: dict[str, Callable[[Client, int], object]] = {
    "answers": lambda c, _: in_session(c, lambda session: session.answers("x")),
    "chat": lambda c, _: in_session(c, lambda session: session.chat("x")),
    "compute": lambda c, context: c.compute(context),
    "compute_single": lambda c, _: in_session(c, lambda session: list(session.pull("x"))),
    "embed": lambda c, _: c.embed("m", "x"),
    "rerank": lambda c, _: c.rerank("r", "x", ["y"]),
    "prompt_compute": lambda c, context: c.prompt_compute(context, "x"),
    "run_inference": lambda c, context: c.run_inference(context, "x"),
    "stream": lambda c, _: in_session(c, lambda session: list(session.stream("x"))),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_library_passes_on_the_span_that_is_current(
    client: Client, collector: Collector, call: str
) -> None:
    context = client.init_execution_context(client.load_by_name("m"))
    client.set_input(context, 0, "x")
    current = SpanContext(int(TRACE, 16), int(SPAN, 16), False, TraceFlags(1))
    with use_span(NonRecordingSpan(current)):
        CALLS[call](client, context)
    outer = collector.next().outer
    assert (outer.trace_id, outer.parent_id) == (TRACE, SPAN)
    assert outer.attributes["inferd.call"] == call


def test_a_given_span_takes_precedence_over_the_current_one(
    daemon: RunningDaemon, collector: Collector
) -> None:
    async def ask() -> None:
        async with AsyncClient(daemon.socket) as client, client.session("m") as session:
            current = SpanContext(int(TRACE, 16), int(SPAN, 16), False, TraceFlags(1))
            with use_span(NonRecordingSpan(current)):
                await session.chat("x", traceparent=PARENT.replace(TRACE, OTHER))
                await session.chat("x", traceparent="")

    anyio.run(ask)
    assert collector.next().outer.trace_id == OTHER
    own = collector.next().outer
    assert own.parent_id == "" and own.trace_id not in (TRACE, OTHER)


# Failures of the export.


def part(client: Client) -> dict[str, Any]:
    return next(p for p in client.stats()["components"] if p["component"] == "traces")


def until(client: Client, *, works: bool) -> dict[str, Any]:
    wait_until(lambda: part(client)["up"] is works)
    return part(client)


def test_the_component_fails_until_a_collector_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        running_daemon(config(f"http://127.0.0.1:{port}")) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        session.chat("hello")
        failure = until(client, works=False)
        assert str(port) in failure["cause"] and "collector" in failure["remedy"]
        with collecting(port) as collector:
            session.chat("hello again")
            collector.next()
            until(client, works=True)
            collector.status = 400
            session.chat("and again")
            assert "400" in until(client, works=False)["cause"]


def test_a_collector_that_does_not_answer_delays_neither_requests_nor_the_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with collecting() as collector, running_daemon(config(collector.address)) as daemon:
        collector.answers.clear()
        with Client(daemon.socket) as client, client.session("m") as session:
            for _ in range(5):
                assert session.chat("hello") == "hello"
        began = time.monotonic()
        assert daemon.stop() == 0
        assert FLUSH_S_MAX - 1 < time.monotonic() - began < FLUSH_S_MAX + 10
        assert "traces.not_sent" in daemon.log


def test_a_slow_collector_makes_the_component_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with (
        collecting() as collector,
        running_daemon(config(collector.address)) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        collector.answers.clear()
        session.chat("hello")
        assert "timeout" in until(client, works=False)["cause"]


def test_an_endless_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with (
        collecting() as collector,
        running_daemon(config(collector.address)) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        collector.padding = 64 << 20
        session.chat("hello")
        collector.next()
        assert collector.cut_off.wait(SECONDS_MAX)
        session.chat("and on it goes")
        collector.next()


def test_spans_for_this_machine_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a proxy of the environment nor a redirection sends them elsewhere."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with collecting() as collector, collecting() as elsewhere:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, elsewhere.address)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with (
            running_daemon(config(collector.address)) as daemon,
            Client(daemon.socket) as client,
            client.session("m") as session,
        ):
            session.chat("hello")
            collector.next()
            collector.status, collector.location = 307, f"{elsewhere.address}/v1/traces"
            session.chat("hello")
            until(client, works=False)
        assert elsewhere.bodies == []


def test_remaining_spans_are_sent_at_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with collecting() as collector, running_daemon(config(collector.address)) as daemon:
        with RawClient(daemon.socket) as raw:
            raw.call("chat", context=raw.context("m"), prompt="hello")
            raw.begin_stream(raw.context("m"), "x" * 5)
            assert daemon.stop() == 0
        assert collector.next().outer.attributes["inferd.call"] == "chat"
        assert collector.next().outer.attributes["inferd.call"] == "stream"


def test_without_the_packages_the_component_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with (
        running_daemon(config("http://127.0.0.1:4318")) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        failure = until(client, works=False)
        assert "opentelemetry" in failure["cause"] and "[traces]" in failure["remedy"]
        assert session.chat("hello") == "hello"


def test_the_environment_alone_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        with running_daemon(f"[daemon]\n{MODELS}") as daemon:
            with Client(daemon.socket) as client, client.session("m") as session:
                session.chat("hello")
            assert daemon.stop() == 0
            assert collector.bodies == [] and "traces.opened" not in daemon.log
        with running_daemon(config("otlp")) as daemon:
            with Client(daemon.socket) as client, client.session("m") as session:
                session.chat("hello")
            assert daemon.stop() == 0
            assert collector.next().outer.name == "chat m"


# A file.


def test_spans_go_into_a_file_that_may_be_moved_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    path, moved = tmp_path / "traces.jsonl", tmp_path / "old.jsonl"
    with (
        running_daemon(config(f"file:{path}")) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        session.chat("hello")
        wait_until(lambda: path.exists() and '"chat m"' in path.read_text())
        assert path.stat().st_mode & 0o777 == 0o600
        path.rename(moved)
        session.chat("hello")
        assert daemon.stop() == 0
        for file in (moved, path):
            spans = [json.loads(line) for line in file.read_text().splitlines()]
            assert [s["name"] for s in spans] == ["queue", "prefill", "decode", "chat m"]
            assert spans[-1]["attributes"]["gen_ai.usage.output_tokens"] == 6


def test_a_file_that_cannot_be_written_makes_the_component_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with (
        running_daemon(config(f"file:{tmp_path}/missing/traces")) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        session.chat("hello")
        assert "No such file" in until(client, works=False)["cause"]
        (tmp_path / "missing").mkdir()
        session.chat("hello")
        until(client, works=True)


def test_a_full_disk_tears_one_span_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    path = tmp_path / "traces.jsonl"
    with (
        running_daemon(config(f"file:{path}")) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        limit(daemon.pid, 100)
        session.chat("hello")
        assert "File too large" in until(client, works=False)["cause"]
        limit(daemon.pid, resource.RLIM_INFINITY)
        session.chat("hello")
        until(client, works=True)
        assert daemon.stop() == 0
    torn, *whole = path.read_bytes().splitlines()
    assert len(torn) == 100
    assert [json.loads(line)["name"] for line in whole][-4:] == [
        *("queue", "prefill", "decode", "chat m"),
    ]


def test_a_pipe_without_a_reader_makes_the_component_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    os.mkfifo(tmp_path / "pipe")
    with (
        running_daemon(config(f"file:{tmp_path}/pipe")) as daemon,
        Client(daemon.socket) as client,
        client.session("m") as session,
    ):
        session.chat("hello")
        assert "No such device" in until(client, works=False)["cause"]
