"""`json-whitespace` and `schema-lenient` over a real socket, whatever happens to a turn."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Client, Session
from inferd.backends.errors import InvalidArgument
from inferd.backends.params.parameter_table import JSON_LAYOUTS
from inferd.testing import RunningDaemon, running_daemon
from tests.models import ONE_THREAD, fast_smollm2
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

VALUE = {"texts": [f"{n}:a-long-text,of-some-words" for n in range(8)], "number": 7}
"""Without spaces: the tiny model has no token for one."""
COMPACT = json.dumps(VALUE, separators=(",", ":"))
LENIENT = {
    "json-schema": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"const": 1}, "uniqueItems": True}},
        "required": ["a"],
        "not": {"required": ["b"], "minProperties": 2},
    },
    "json-whitespace": "compact",
    "schema-lenient": True,
    "n-predict": 40,
}
OPTIONS = {"json-schema": {"const": VALUE}, "json-whitespace": "compact", "temp": 0}
DROPPED = "no grammar keeps these constraints: #/properties/a/uniqueItems, #/not"
CONFIG = """
[defaults]
ctx-size = 2048
slots = 1
[models.tiny]
file = "tiny-llama.gguf"
[models.swapped]
file = "tiny-llama.gguf"
[models.other]
file = "tiny-llama.gguf"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_tiny("llama", models)
    with running_daemon(CONFIG, models_dir=models) as daemon:
        yield daemon


def test_the_white_space_of_an_answer_is_as_chosen(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.session("tiny", raw=True) as session:
        assert session.chat("x", options=OPTIONS) == COMPACT
        with pytest.raises(InvalidArgument, match="json-whitespace: 'wide' is not one of any, com"):
            session.chat("x", options=OPTIONS | {"json-whitespace": "wide"})


@pytest.mark.model
def test_the_white_space_of_a_real_model_is_as_chosen(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").symlink_to(fast_smollm2())  # the short one would write spaces
    value = {"a": [1, "b, c: d"], "e": None}
    with (
        running_daemon(f"{ONE_THREAD}ctx-size = 512\nslots = 1", models_dir=tmp_path) as daemon,
        Client(daemon.socket) as client,
        client.session("smollm2") as session,
    ):
        for whitespace in JSON_LAYOUTS:
            options = {"json-schema": {"const": value}, "json-whitespace": whitespace, "temp": 0}
            text = session.chat("x", options=options)
            assert json.loads(text) == value
            separators = (",", ":") if whitespace == "compact" else (", ", ": ")
            assert whitespace == "any" or text == json.dumps(value, separators=separators)


def test_it_stays_when_the_worker_dies_and_when_the_model_is_swapped(daemon: RunningDaemon) -> None:
    options = OPTIONS | {"jump-forward": False}  # else there are too few pieces
    with (
        Client(daemon.socket) as client,
        client.session("swapped", raw=True, options=options) as session,
    ):
        before = daemon.log.count("worker.died")
        assert killed_stream(client, session) == COMPACT
        assert daemon.log.count("worker.died") == before + 1
        [branch] = session.fork()
        client.swap("swapped", "other")
        assert branch.chat("x") == session.chat("x") == COMPACT


def killed_stream(client: Client, session: Session) -> str:
    """Return a streamed answer, during which the worker is killed."""
    pieces: list[str] = []
    for piece in session.stream("x"):
        pieces.append(piece)
        if len(pieces) == 20:
            os.kill(client.show(session.model)["pid"], signal.SIGKILL)
    assert len(pieces) > 20, "the stream ended before its worker was killed"
    return "".join(pieces)


def test_it_stays_in_a_parked_turn(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client, RawClient(daemon.socket) as operator:

        def parked() -> bool:
            """Return whether a turn was parked; it may have ended before."""
            one, other = client.context("tiny"), client.context("tiny")
            turns = [
                client.start_request("chat", context=context, prompt="x", raw=True, options=OPTIONS)
                for context in (one, other)
            ]
            parked = any(operator.call("park", context=one)["parked"] for _ in range(200))
            for turn in turns:
                assert client.wait_result(turn)["text"] == COMPACT.encode()
            return parked

        wait_until(parked)


@pytest.mark.parametrize("model", ["tiny", "echo"])
def test_constraints_that_are_left_out_are_reported(daemon: RunningDaemon, model: str) -> None:
    with Client(daemon.socket) as client, client.session(model, raw=True) as session:
        for _ in range(2):  # the second time the grammar is known
            said = session.chat("x", options=LENIENT)
            assert said.metadata["adjusted"]["json-schema"].endswith(DROPPED)
        assert said.startswith('{"a":[') == (model == "tiny")
        with pytest.raises(InvalidArgument, match="json-schema: #/properties/a/uniqueItems"):
            session.chat("x", options=LENIENT | {"schema-lenient": False})
        plain = {"n-predict": 1}
        assert "json-schema" not in session.chat("x", options=plain).metadata["adjusted"]
        unused = session.chat("x", options=plain | {"schema-lenient": True}).metadata["adjusted"]
        assert unused == {"schema-lenient": "it needs a json-schema"}


def test_they_are_reported_again_by_a_new_worker(daemon: RunningDaemon) -> None:
    options = LENIENT | {"json-schema": {"allOf": [{"const": VALUE}, {"not": {"const": 1}}]}}
    options |= {"n-predict": -1, "jump-forward": False}  # else there are too few pieces
    with (
        Client(daemon.socket) as client,
        client.session("tiny", raw=True, options=options) as session,
    ):
        assert killed_stream(client, session) == COMPACT
        assert session.metadata["adjusted"]["json-schema"].endswith(": #/allOf/1/not")
