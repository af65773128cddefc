"""SmolLM2 on two nodes: the same answers on each, and sessions that keep their node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from inferd import Client
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.models import ONE_THREAD, short_smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CONFIG = ONE_THREAD + "[models.smollm2]\nslots = 2\nctx-size = 512\n"
GREEDY = {"temp": 0, "n-predict": 6}
QUESTIONS = ("The capital of France is", "Two and two is", "The sky is", "Water is")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A fleet for all tests; after each of them, all nodes are used and no session is left."""
    folder, models = tmp_path_factory.mktemp("fleet"), tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(short_smollm2())
    with running_fleet(folder, CONFIG, "a", "b", models_dir=models) as running:
        yield running


@pytest.fixture(autouse=True)
def clean(fleet: RunningFleet) -> Iterator[None]:
    yield
    fleet.clear()


def test_two_nodes_answer_as_one_and_continue_their_sessions(fleet: RunningFleet) -> None:
    with ExitStack() as stack:
        with Client(fleet.daemons["a"].socket) as direct:
            expected = {}
            for question in QUESTIONS:
                with direct.session("smollm2", raw=True, options=GREEDY) as session:
                    expected[question] = session.chat(question)
        fleet.load("smollm2")
        client = Client(fleet.socket)
        sessions = []
        for number in range(len(QUESTIONS)):
            session = client.session(
                "smollm2", raw=True, options=GREEDY, session_id=f"talk-{number}"
            )
            sessions.append(stack.enter_context(session))
        nodes = {one["session_id"]: one["node"] for one in client.sessions()}
        assert set(nodes.values()) == {"a", "b"}
        streams = [s.stream(q) for s, q in zip(sessions, QUESTIONS, strict=True)]
        assert ["".join(stream) for stream in streams] == list(expected.values())
        stack.close()
        for number in range(len(QUESTIONS)):
            with client.session(
                "smollm2", raw=True, options=GREEDY, session_id=f"talk-{number}"
            ) as session:
                assert session.context.attached
                reply = session.chat(" And then")
                assert reply.metadata["input_tokens"] > GREEDY["n-predict"], (
                    "its history is on its node"
                )
        assert {s["session_id"]: s["node"] for s in client.sessions(dormant=True)} == nodes
        client.close()


def test_a_session_moves_with_its_kv_state(fleet: RunningFleet) -> None:
    with (
        Client(fleet.socket) as client,
        client.session("smollm2", raw=True, options=GREEDY, session_id="talk") as session,
    ):
        fleet.load("smollm2")
        session.chat("The capital of France is " * 12)
        [before] = client.sessions()
        assert client.drain(node=before["node"]).moved == 1
        [after] = client.sessions(dormant=True)
        assert after["node"] != before["node"]
        metadata = session.chat(" And then").metadata
        assert metadata["cached_tokens"] >= before["tokens"] - 1, "only the new text is computed"


def test_a_new_session_goes_to_the_node_that_has_computed_its_system_prompt(
    fleet: RunningFleet,
) -> None:
    system = "You answer in few words, and you never guess. " * 12
    keywords: dict[str, Any] = {"model": "smollm2", "system": system, "options": GREEDY}
    with Client(fleet.socket) as client:
        fleet.load("smollm2")
        with client.session(**keywords) as first:
            expected = first.chat(QUESTIONS[0])
            [node] = [s["node"] for s in client.sessions()]
        client.drain(node=node)
        with client.session(**keywords) as second:
            client.drain(node=node, undo=True)
            assert [s["node"] for s in client.sessions()] != [node]
            reply = second.chat(QUESTIONS[0])
            assert [s["node"] for s in client.sessions()] == [node]
            assert reply.metadata["cached_tokens"] > 100 and reply == expected
            assert reply.metadata["input_tokens"] - reply.metadata["cached_tokens"] < 20
