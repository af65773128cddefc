"""Models in descriptors: they are loaded on the node of the entry's machine, and stay there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd import AsyncClient, Client
from inferd.backends.errors import (
    Busy,
    InvalidArgument,
    SessionExpired,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.gateways.fleet.link import PART_BYTES, REFUSED, TOKEN_BYTES
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.gateways.fleet.test_descriptors import memfd, opened
from tests.models import ONE_THREAD
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

CONFIG = ONE_THREAD + echo_model("echo", slots=2, ctx_size=4096)
OPTIONS = {"n-predict": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, "a", "b", own="b") as running:
        yield running


@pytest.fixture
def client(fleet: RunningFleet) -> Iterator[Client]:
    with Client(fleet.socket) as connected:
        yield connected


def descriptors_of(fleet: RunningFleet, file: Path) -> int:
    """Return how many descriptors of a file the entry and the relays have."""
    count = 0
    for pid in (fleet.entry.pid, *(relay.process.pid for relay in fleet.relays.values())):
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                count += os.readlink(f"/proc/{pid}/fd/{name}") == str(file)
            except FileNotFoundError:
                continue
    return count


def test_the_model_and_its_contexts_are_on_the_own_node(
    fleet: RunningFleet, client: Client, file: Path
) -> None:
    with file.open("rb") as opened_file:
        graph = client.load(fd=opened_file.fileno())
    contexts = [client.init_execution_context(graph) for _ in range(3)]
    assert {session["node"] for session in client.sessions()} == {"b"}
    for context in contexts:
        assert client.chat(context, "hello", options=OPTIONS).metadata["output_tokens"] == 2
    assert client.tokenize(graph, "hello") and client.embed(graph, ["hello"])
    wait_until(lambda: descriptors_of(fleet, file) == 0)
    client.unload(graph)
    with Client(fleet.daemons["b"].socket) as direct:
        wait_until(lambda: [model["name"] for model in direct.models()] == ["echo"])


def test_a_session_with_an_id_stays_on_the_own_node(client: Client, file: Path) -> None:
    with client.session("echo", session_id="elsewhere") as session:
        session.chat("hello")
        [found] = client.sessions()
    with file.open("rb") as opened_file:
        graph = client.load(fd=opened_file.fileno())
    context = client.init_execution_context_with_session_id(graph, "here")
    assert [s["node"] for s in client.sessions() if s["session_id"] == "here"] == ["b"]
    client.finalize_execution_context(context, keep=True)
    again = client.init_execution_context_with_session_id(graph, "here")
    assert again.attached
    if found["node"] == "a":
        with pytest.raises(InvalidArgument, match="on the node a"):
            client.init_execution_context_with_session_id(graph, "elsewhere")


def test_tensors_and_models_in_descriptors_do_not_mix(fleet: RunningFleet, file: Path) -> None:
    with RawClient(fleet.socket) as raw:
        context, inputs = opened(raw), [["metadata", {"fd": 0}], ["prompt", {"fd": 0}]]
        for _ in range(3):
            with file.open("rb") as opened_file:
                load = raw.start_request("load", [opened_file.fileno()], fd=0)
            options = memfd(b'{"n-predict":' + b" " * (3 * PART_BYTES) + b"4}")
            compute = raw.start_request(
                "compute", [options, text := memfd(b"some text")], context=context, inputs=inputs
            )
            os.close(options)
            os.close(text)
            raw.wait_result(compute)
            assert raw.output(context) == b"some"
            assert raw.wait_result(load)["graph"]


def test_the_daemon_refuses_a_file_that_can_be_written_to(client: Client, file: Path) -> None:
    with file.open("r+b") as writable, pytest.raises(InvalidArgument, match="written"):
        client.load(fd=writable.fileno())
    with pytest.raises(InvalidArgument, match="not a regular file"):
        read, write = os.pipe()
        try:
            client.load(fd=read)
        finally:
            os.close(read)
            os.close(write)


def test_a_stranger_to_the_relay_passes_nothing(fleet: RunningFleet) -> None:
    assert os.stat(fleet.descriptors).st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(fleet.descriptors)
        sock.sendall(bytes(TOKEN_BYTES))
        assert sock.recv(1) == REFUSED, "no descriptor came with the token"


@pytest.mark.asyncio
async def test_a_lost_own_node_ends_the_graph_alone(fleet: RunningFleet, file: Path) -> None:
    async with AsyncClient(fleet.socket) as client:
        with file.open("rb") as opened_file:
            graph = await client.load(fd=opened_file.fileno())
        context = await client.init_execution_context(graph)
        fleet.kill_relay("b")
        fleet.until_noted("node b is lost")
        with pytest.raises(SessionExpired):
            await client.chat(context, "hello")
        with pytest.raises(Busy):
            await client.init_execution_context(graph)
        with file.open("rb") as opened_file, pytest.raises(Busy):
            await client.load(fd=opened_file.fileno())
        async with client.session("echo") as session:
            assert str(await session.chat("hello")) == "hello"
        fleet.start_relay("b")
        fleet.until_noted("node b serves")
        with pytest.raises(WorkerCrashed, match="descriptor"):
            await client.init_execution_context(graph)


def test_without_an_own_node_the_error_names_the_setting(tmp_path: Path, file: Path) -> None:
    with (
        running_fleet(tmp_path, "", "a") as fleet,
        Client(fleet.socket) as client,
        file.open("rb") as opened_file,
        pytest.raises(UnsupportedOperation) as caught,
    ):
        client.load(fd=opened_file.fileno())
    assert "`descriptors` in fleet.toml" in caught.value.hint


@pytest.mark.parametrize("name", ["echo:latest", "Echo", "ECHO:LATEST"])
def test_a_model_has_its_name_in_other_forms_on_all_nodes(client: Client, name: str) -> None:
    for graph in (client.load_by_name(name), client.load([f"preload:{name}"])):
        assert graph.model == "echo"
        contexts = [client.init_execution_context(graph) for _ in range(6)]
        nodes = {s["node"] for s in client.sessions() if s["context"] in contexts}
        assert nodes == {"a", "b"}
        client.unload(graph)
    assert client.show(name)["name"] == "echo"
    client.pin(name)
    shown: dict[str, Any] = dict(client.show("echo"))
    assert all(one["pinned"] for one in shown["nodes"])
    client.unpin(name)


def test_files_that_are_not_offered_are_listed_with_their_node(
    fleet: RunningFleet, client: Client
) -> None:
    models = fleet.daemons["a"].directory / "models"
    (models / "page.gguf").write_text("<html>")
    [found] = client.files_not_offered()
    assert (found["node"], found["file"]) == ("a", "page.gguf")
    assert "page" not in [model["name"] for model in client.models()]
    (models / "page.gguf").unlink()
