"""Turns that end with a similar sentence, through a real daemon: models that compare sentences, and
those that cannot.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from inferd import Client, Metadata, TaskInfo
from inferd.backends.errors import EndOfSequence, InvalidArgument
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

CONFIG = """
[defaults]
ctx-size = 4096
similarity-model = "comparer"
similarity-wait-ms = 60000
"""
CONFIG += echo_model("said") + echo_model("comparer")
CONFIG += echo_model("lonely", similarity_model="")
CONFIG += echo_model("itself", similarity_model="itself")
CONFIG += echo_model("astray", similarity_model="nobody")
CONFIG += echo_model("hurried", similarity_model="slow", similarity_wait_ms=50)
CONFIG += echo_model("slow", step_ms=2000)
CONFIG += echo_model("patient", similarity_model="steady", step_ms=2)
CONFIG += echo_model("steady", step_ms=300)
CONFIG += echo_model("brave", similarity_model="fragile")
CONFIG += echo_model("fragile", abort_on="die now")
SENTENCES = ["The sky is wide.", "It rains!", "«So it is.»", "Who knows?"]
TEXT = " ".join(SENTENCES) + " And so on"
GIVEN = "It rains!"


def cosines(client: Client, model: str, text: str) -> list[float]:
    """Return how similar each of the sentences is to *text*."""
    given, *said = client.embed(model, [text, *SENTENCES])
    return [math.fsum(a * b for a, b in zip(given, one, strict=True)) for one in said]


def similar(text: str = GIVEN, threshold: float = 0.9999) -> dict[str, Any]:
    return {"stop-similarity": text, "stop-similarity-threshold": threshold}


def end(metadata: Metadata) -> tuple[str | None, str]:
    return metadata["stop_reason"], metadata["stop_detail"]


def test_streamed_pulled_and_whole_text_end_with_the_same_sentence(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as raw, Client(daemon.socket) as client:
        comparer = client.load_by_name("comparer")
        expected = " ".join(SENTENCES[:2])
        with client.session("said", raw=True, options=similar()) as session:
            stream = session.stream(TEXT)
            assert "".join(stream) == expected
            assert end(stream.metadata) == ("similarity", "1.000")
            assert stream.metadata["adjusted"] == {}
            whole = session.chat(TEXT)
            assert (str(whole), end(whole.metadata)) == (expected, ("similarity", "1.000"))
        context = raw.context("said")
        raw.call("set_options", context=context, options=similar())
        raw.set_input(context, TEXT.encode())
        raw.call("compute", context=context)
        assert raw.output(context) == expected.encode()
        assert pulled(raw, context) == expected.encode()
        assert raw.metadata(context)["stop_reason"] == "similarity"
        client.unload(comparer)


def pulled(raw: RawClient, context: int) -> bytes:
    """Return what a context says token by token."""
    said = b""
    with contextlib.suppress(EndOfSequence):
        while True:
            said += raw.compute_single(context)
    return said


def test_the_cosine_of_the_embeddings_counts(client: Client) -> None:
    """The given text is none of the sentences: the first that is close enough ends the turn."""
    comparer = client.load_by_name("comparer")
    found = cosines(client, "comparer", "A text of its own.")
    thresholds = [t for t in (min(found), sum(found) / 4, max(found)) if 0.001 < t <= 1]
    assert thresholds
    for threshold in (t - 1e-6 for t in thresholds):
        first = next(i for i, cosine in enumerate(found) if cosine >= threshold)
        with client.session("said", raw=True) as session:
            reply = session.chat(TEXT, options=similar("A text of its own.", threshold))
            assert str(reply) == " ".join(SENTENCES[: first + 1])
            assert end(reply.metadata) == ("similarity", f"{found[first]:.3f}")
    client.unload(comparer)


def test_a_model_can_compare_its_own_sentences(client: Client) -> None:
    with client.session("itself", raw=True, options=similar()) as session:
        assert str(session.chat(TEXT)) == " ".join(SENTENCES[:2])


def test_the_form_of_wasi_nn_backend_acts(client: Client) -> None:
    condition = {"type": "similarity", "text": GIVEN, "threshold": 0.9999}
    with client.session("itself", raw=True) as session:
        session.set_options({"stopping": {"semantic_conditions": [condition]}})
        reply = session.chat(TEXT)
        assert (str(reply), end(reply.metadata)[0]) == (" ".join(SENTENCES[:2]), "similarity")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("lonely", "the configuration names no similarity-model"),
        ("astray", "there is no model 'nobody'"),
        ("said", "the model 'comparer' is not loaded"),
    ],
)
def test_a_turn_without_a_comparison_continues_and_has_the_reason(
    client: Client, model: str, why: str
) -> None:
    comparer = client.load_by_name("comparer")
    client.unload(comparer)
    with client.session(model, raw=True, options=similar()) as session:
        reply = session.chat(TEXT)
    assert (str(reply), end(reply.metadata)[0]) == (TEXT, "eos")
    assert reply.metadata["adjusted"] == {
        "stop-similarity": f"4 of 4 sentences were not compared: {why}"
    }
    [found] = [m for m in client.models() if m["name"] == "comparer"]
    assert found["state"] == "cold", "it was loaded for that"


def test_a_client_cannot_choose_the_comparing_model(client: Client) -> None:
    config = {"similarity-model": "said", "similarity-wait-ms": 7, **similar()}
    graph = client.load_by_name_with_config("lonely", config)
    assert graph.not_applied == {"similarity-model": "", "similarity-wait-ms": 60_000}
    client.unload(graph)
    with (
        client.session("lonely", raw=True) as session,
        pytest.raises(InvalidArgument, match="similarity-model: applies to a model, not to a"),
    ):
        session.chat("x", options={"similarity-model": "said"})


def test_a_busy_comparing_model_is_not_awaited_for_long(client: Client) -> None:
    slow = client.load_by_name("slow")
    with client.session("hurried", raw=True, options=similar()) as session:
        reply = session.chat("One. Two")
    assert str(reply) == "One. Two"
    assert reply.metadata["adjusted"] == {
        "stop-similarity": "1 of 1 sentences were not compared: 'slow' did not answer within 0.05 s"
    }
    client.unload(slow)
    assert client.sessions() == []


def test_an_input_that_kills_the_comparing_worker_does_not_end_the_turn(client: Client) -> None:
    fragile = client.load_by_name("fragile")
    with client.session("brave", raw=True, options=similar()) as session:
        reply = session.chat("One, die now. Two")
    assert (str(reply), end(reply.metadata)[0]) == ("One, die now. Two", "eos")
    said = reply.metadata["adjusted"]["stop-similarity"]
    assert said.startswith("1 of 1 sentences were not compared: this input crashes the worker")
    client.unload(fragile)


@pytest.mark.parametrize("killed", [("patient",), ("steady",), ("patient", "steady")])
def test_a_turn_whose_worker_dies_while_a_sentence_is_compared_ends_with_the_same(
    client: Client, killed: Sequence[str]
) -> None:
    steady = client.load_by_name("steady")
    with client.session("patient", raw=True, options=similar()) as session:
        stream, text = session.stream(TEXT), ""
        for piece in stream:
            text += piece
            if text == SENTENCES[0]:
                end_workers(client, killed)
    assert (text, end(stream.metadata)[0]) == (" ".join(SENTENCES[:2]), "similarity")
    assert stream.metadata["adjusted"] == {}
    client.unload(steady)


def end_workers(client: Client, names: Sequence[str]) -> None:
    """Kill the workers of these models once a sentence is compared."""
    for _ in range(10_000):
        models = {model["name"]: model for model in client.models()}
        if models["steady"]["tasks"]:
            break
        time.sleep(0.001)
    else:
        raise AssertionError("no sentence was compared")
    for name in names:
        os.kill(models[name]["pid"], signal.SIGKILL)


def test_nothing_is_left_behind(client: Client) -> None:
    comparer = client.load_by_name("comparer")
    with client.session("said", raw=True, options=similar()) as session:
        assert end(session.chat(TEXT).metadata) == ("similarity", "1.000")
    wait_until(lambda: client.show("comparer")["leases"] == 1)
    client.unload(comparer)
    assert client.show("comparer")["state"] == "cold", "nobody else holds it"
    assert client.sessions() == []
    assert client.queue() == []
    assert all(model["tasks"] == 0 for model in client.models())


def test_a_turn_parked_by_hand_while_a_sentence_is_compared_says_what_it_would_have_said() -> None:
    head = "[daemon]\nreader-lag-ms = 60000\nquantum-tokens = 100000\n"
    single = '[models.single]\nbackend = "echo"\nslots = 1\nsimilarity-model = "steady"\n'
    with (
        running_daemon(head + CONFIG + single) as daemon,
        RawClient(daemon.socket) as raw,
        RawClient(daemon.socket) as other,
    ):
        raw.call("load_by_name", name="steady")
        context, waits = raw.context("single"), other.context("single")
        options = similar()
        number = raw.start_request(
            "stream", context=context, prompt=TEXT, raw=True, options=options
        )
        while raw.streamed_text != SENTENCES[0]:
            raw.events.append(raw.read_message())
        second = other.start_request("chat", context=waits, prompt=TEXT, raw=True)
        wait_until(lambda: len(raw.call("queue")["tasks"]) >= 2)
        assert raw.call("park", context=context) == {"parked": True}
        assert other.wait_result(second)["text"] == TEXT.encode()
        raw.wait_result(number)
        assert raw.streamed_text == " ".join(SENTENCES[:2])
        metadata = raw.metadata(context)
        assert (metadata["stop_reason"], metadata["stop_detail"]) == ("similarity", "1.000")
        assert metadata["parks"] == 1 and metadata["adjusted"] == {}


def test_a_text_is_compared_by_the_model_that_has_the_name_now() -> None:
    """Also where that took the name over while the text was to be embedded."""
    own = {"similarity-model": "comparer", "similarity-wait-ms": 60_000, "ctx-size": 4096}
    comparers = "".join(echo_model(n, variant=v, step_ms=10) for n, v in COMPARERS.items())
    with (
        running_daemon(comparers + echo_model("said", **own)) as daemon,
        RawClient(daemon.socket) as raw,
        RawClient(daemon.socket) as operator,
    ):
        turn = {"context": raw.context("said"), "prompt": TEXT, "raw": True, "options": similar()}
        running = raw.begin_stream(raw.context("comparer"), "x" * 500)
        swap = operator.start_request("swap", name="comparer", to="other", mode="drain")
        wait_until(lambda: "model.draining" in daemon.log)
        compared = raw.start_request("chat", **turn)
        first = len(SENTENCES[0])
        wait_until(lambda: [t for t in said_now(daemon) if t["output_tokens"] >= first])
        raw.call("cancel", request=running)
        operator.wait_result(swap)
        assert end(raw.wait_result(compared)["metadata"]) == ("similarity", "1.000")
        operator.call("swap", name="comparer", to="again")
        assert end(raw.call("chat", **turn)["metadata"]) == ("similarity", "1.000")


COMPARERS = {"comparer": "a", "other": "b", "again": "a"}
"""Models by their variant: the last one is the first one."""


def said_now(daemon: RunningDaemon) -> list[TaskInfo]:
    """Return the tasks of the model whose sentences are compared."""
    with Client(daemon.socket) as client:
        return [task for task in client.queue() if task["model"] == "said"]
