"""Answers that follow a grammar are the same in a worker that dies, in a model that is swapped, and
after they were parked, while tokens are forced.

The tokens of the tiny models are bytes, and their noise changes none of them. They have no token
for a space.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inferd import Client, Reply
from inferd.testing import RunningDaemon, running_daemon
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

ENTRY = {
    "type": "object",
    "properties": {
        "name_of_the_customer": {"enum": ["Alpha", "Bravo", "Charlie"]},
        "number_of_parcels": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name_of_the_customer", "number_of_parcels"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ENTRY, "minItems": 6, "maxItems": 6}
TAG = {"begin": "<list>", "content": {"type": "json_schema", "json_schema": LIST}, "end": "</list>"}
FORMATS: dict[str, dict[str, Any]] = {
    "lark": {
        "lark": 'start: item{9} "the_end"\n'
        'item: ("alpha_bravo_charlie:" | "delta_echo_foxtrot:") /[a-j]{1,3}/ ";"\n'
    },
    "regex": {"regex": "((alpha_bravo_charlie:|delta_echo_foxtrot:)[a-j]{1,3};){9}the_end"},
    "json-schema": {"json-schema": LIST, "json-whitespace": "compact"},
    "structural-tag": {
        "structural-tag": {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<list>"],
                "tags": [TAG],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        "json-whitespace": "compact",
    },
}
SAMPLED = {"temp": 1.5, "seed": 3, "n-predict": 1000, "ignore-eos": False}
CONFIG = """
[daemon]
swap-grace-s = 0.1
[defaults]
ctx-size = 2048
slots = 1
threads = 1
"""
CONFIG += "".join(f'[models.{name}]\nfile = "tiny-llama.gguf"\n' for name in ("tiny", "one", "two"))
EVENTS = 3
ATTEMPTS = 5
Interrupt = Callable[[RunningDaemon, Client, str], None]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny("llama", folder)
    with running_daemon(CONFIG, models_dir=folder) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


def kill(daemon: RunningDaemon, client: Client, name: str) -> None:
    before = daemon.log.count("worker.died")
    os.kill(client.show("tiny")["pid"], signal.SIGKILL)
    wait_until(lambda: daemon.log.count("worker.died") > before)


_targets = itertools.cycle(("one", "two"))


def swap(daemon: RunningDaemon, client: Client, name: str) -> None:
    before = client.stats()["recovered"]
    client.swap("tiny", next(_targets))
    wait_until(lambda: client.stats()["recovered"] == before + 1)


def park(daemon: RunningDaemon, client: Client, name: str) -> None:
    """Let another turn have the only slot."""
    assert client.chat("tiny", "y", raw=True, options=FORMATS[name] | SAMPLED)


INTERRUPTS: dict[str, Interrupt] = {"dies": kill, "swapped": swap, "parked": park}


def interrupted(
    daemon: RunningDaemon, client: Client, name: str, interrupt: Interrupt, options: dict[str, Any]
) -> tuple[bytes, dict[str, Any]]:
    """Return the answer and the metadata of a turn that is interrupted after some events, while it
    waits for its reader.
    """
    with RawClient(daemon.socket) as raw:
        turn = {"context": raw.context("tiny"), "prompt": "x", "raw": True, "options": options}
        request = raw.start_request("stream", credit=EVENTS, **turn)
        while sum("tokens" in event[2] for event in raw.events) < EVENTS:
            raw.events.append(raw.read_message())
        interrupt(daemon, client, name)
        raw.write([5, request, 1000])
        done = raw.wait_result(request)
    return raw.streamed_text.encode() + done.get("text", b""), done["metadata"]


@pytest.fixture(scope="module", params=FORMATS)
def answered(client: Client, request: pytest.FixtureRequest) -> tuple[str, Reply]:
    """A format's name and its answer without an interruption, the same with and without forcing."""
    name = str(request.param)
    options = FORMATS[name] | SAMPLED
    expected = client.chat("tiny", "x", raw=True, options=options)
    plain = client.chat("tiny", "x", raw=True, options=options | {"jump-forward": False})
    assert str(expected) == str(plain)
    assert expected.metadata["output_tokens"] == plain.metadata["output_tokens"]
    assert expected.metadata["stop_reason"] == plain.metadata["stop_reason"] == "eos"
    assert expected.metadata["forced_tokens"] > 50 and plain.metadata["forced_tokens"] == 0
    return name, expected


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_an_answer_is_the_same_if_its_turn_is_interrupted(
    daemon: RunningDaemon, client: Client, answered: tuple[str, Reply], interrupt: str
) -> None:
    name, expected = answered
    options = FORMATS[name] | SAMPLED
    text, metadata = interrupted(daemon, client, name, INTERRUPTS[interrupt], options)
    assert text.decode() == str(expected)
    assert metadata["output_tokens"] == expected.metadata["output_tokens"]
    assert metadata["forced_tokens"] == expected.metadata["forced_tokens"]
    assert (metadata["parks"] > 0) == (interrupt == "parked")


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_an_answer_with_drafts_is_the_same_if_its_turn_is_interrupted(
    daemon: RunningDaemon, client: Client, interrupt: str
) -> None:
    """The tiny model soon repeats itself, so the n-gram drafter is right. Whether its drafts pay is
    decided by measured times, and those of a busy moment stay known to a worker. So each attempt
    has a new worker.
    """
    options = {"temp": 0, "regex": "[a-z]{250}"}
    accepted = 0
    for _ in range(ATTEMPTS):
        client.unload_model("tiny", force=True)
        expected = client.chat("tiny", "x", raw=True, options=options | {"speculation": "off"})
        assert not expected.metadata["drafted_tokens"]
        drafts = options | {"speculation": "ngram"}
        text, metadata = interrupted(daemon, client, "regex", INTERRUPTS[interrupt], drafts)
        assert text.decode() == str(expected)
        assert metadata["output_tokens"] == expected.metadata["output_tokens"] == 251
        assert (metadata["parks"] > 0) == (interrupt == "parked")
        accepted = metadata["accepted_tokens"]
        assert accepted <= metadata["drafted_tokens"]
        if accepted:
            break
    assert accepted > 0
