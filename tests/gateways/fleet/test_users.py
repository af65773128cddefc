"""Users of the entry's machine are apart on the nodes, and gateways serve their people there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from inferd import Client
from inferd.backends.errors import (
    Cancelled,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from tests.daemon.command_line import inferd_process
from tests.daemon.other_users import ADA, BOB, as_user
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.raw import RawClient
from tests.waiting import wait_until

CONFIG = echo_model("echo") + echo_model("slow", step_ms=20)
TEXT = "a text that takes the slow model a second or two to echo"


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    """A fleet whose socket is open to all users; pytest's own folders are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        more = 'socket-mode = "0666"\n'
        with running_fleet(Path(name), CONFIG, "a", "b", more=more) as running:
            yield running


def client_of(fleet: RunningFleet, uid: int, **hello: Any) -> RawClient:
    with as_user(uid):
        return RawClient(fleet.socket, **hello)


def open_session(client: RawClient, session_id: str) -> int:
    graph = client.call("load_by_name", name="slow")["graph"]
    found = client.call(
        "init_execution_context_with_session_id", graph=graph, session_id=session_id
    )
    return int(found["context"])


def test_users_are_apart(fleet: RunningFleet) -> None:
    with client_of(fleet, ADA) as ada, client_of(fleet, BOB) as bob:
        contexts = {client: open_session(client, "diary") for client in (ada, bob)}
        number = ada.start_request("stream", context=contexts[ada], prompt=TEXT)
        while ada.read_message()[0] != 4:
            pass
        assert [s["context"] for s in bob.call("sessions")["sessions"]] == [contexts[bob]]
        assert bob.call("queue")["tasks"] == []
        with pytest.raises(InvalidArgument):
            bob.call("cancel", context=contexts[ada])
        with Client(fleet.socket) as operator:
            found = {s["context"]: s["user"] for s in operator.sessions(all_users=True)}
            assert found == {contexts[ada]: f"@{ADA}", contexts[bob]: f"@{BOB}"}
            assert operator.sessions() == []
            assert operator.cancel(contexts[ada])
        with pytest.raises(Cancelled) as cancelled:
            ada.wait_result(number)
        assert cancelled.value.data["by"] == "operator"
        for client in (ada, bob):
            assert client.call("delete_session", session_id="diary")["deleted"]


def test_users_have_no_rights_of_operators(fleet: RunningFleet) -> None:
    with client_of(fleet, ADA) as ada:
        for call, params in (
            ("pin", {"name": "echo"}),
            ("drain", {}),
            ("drain", {"stop": True}),
            ("sessions", {"all": True}),
            ("log_level", {"levels": {"ipc": "debug"}}),
        ):
            with pytest.raises(PermissionDenied):
                ada.call(call, **params)
    with client_of(fleet, ADA, on_behalf_of="@bob") as ada, pytest.raises(PermissionDenied):
        with suppress(BrokenPipeError):  # the goodbye to a refused client follows
            ada.start_request("models")
        ada.wait_result(1)


def test_usage_of_a_key_is_the_sum_of_all_nodes(fleet: RunningFleet) -> None:
    with RawClient(fleet.daemons["b"].socket, on_behalf_of="@first-on-b"):
        pass  # so that the same user has another number on each node
    for node in ("a", "b"):
        with RawClient(fleet.daemons[node].socket, on_behalf_of=f"@{BOB}", key="phone") as client:
            graph = client.call("load_by_name", name="echo")["graph"]
            context = client.call("init_execution_context", graph=graph)["context"]
            client.call("chat", context=context, prompt="hello", raw=True)
    with client_of(fleet, BOB, key="phone") as bob:
        graph = bob.call("load_by_name", name="echo")["graph"]
        context = bob.call("init_execution_context", graph=graph)["context"]
        bob.call("chat", context=context, prompt="hello", raw=True)
        [row] = bob.call("usage", by=["user", "key"])["usage"]
        assert (row["user"], row["key"], row["requests"]) == (f"@{BOB}", "phone", 3)
    with client_of(fleet, BOB, key="tablet") as other:
        assert other.call("usage", by=["key"])["usage"] == []


def test_jobs_of_a_user_are_no_other_users(fleet: RunningFleet) -> None:
    body = {"model": "echo", "prompt": "hello", "max_tokens": 4}
    line = msgspec.json.encode({"custom_id": "1", "url": "/v1/completions", "body": body})
    with client_of(fleet, ADA) as ada, client_of(fleet, BOB) as bob:
        file = ada.call("upload_file", data=line, end=True)["file"]
        job = ada.call("submit_job", file=file["id"], job="batch_of_ada")["job"]
        assert job["id"] == "batch_of_ada" and file["node"] == job["node"]
        for call, params in (
            ("jobs", {"job": job["id"]}),
            ("cancel_job", {"job": job["id"]}),
            ("files", {"file": file["id"]}),
            ("read_file", {"file": job["output_file"]}),
            ("submit_job", {"file": file["id"]}),
        ):
            with pytest.raises(NotFound):
                bob.call(call, **params)
        assert not bob.call("delete_job", job=job["id"])["deleted"]
        assert bob.call("jobs")["jobs"] == [] == bob.call("files")["files"]
        with pytest.raises(PermissionDenied):
            bob.call("jobs", all=True)
        wait_until(lambda: ada.call("jobs", job=job["id"])["jobs"][0]["state"] == "completed")
        with Client(fleet.socket) as operator:
            assert operator.jobs.list() == []
            assert [one["id"] for one in operator.jobs.list(all_users=True)] == [job["id"]]
            assert operator.jobs.delete(job["id"])
        with pytest.raises(NotFound):
            ada.call("jobs", job=job["id"])


def test_the_http_gateway_serves_from_all_nodes(fleet: RunningFleet) -> None:
    fleet.load("slow")
    long = 20 * TEXT  # no stream has ended when the last one begins, however slow the machine is
    with inferd_process("gateway", "--listen", "127.0.0.1:0", socket=fleet.socket) as process:
        try:
            assert process.stderr is not None
            address = process.stderr.readline().decode().split()[-1]
            with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none") as api:
                assert [m.id for m in api.models.list()] == ["echo", "slow"]
                streams = [
                    api.chat.completions.create(
                        model="slow", messages=[{"role": "user", "content": long}], stream=True
                    )
                    for _ in range(4)
                ]
                with Client(fleet.socket) as client:
                    assert {task["node"] for task in client.queue(all_users=True)} == {"a", "b"}
                for stream in streams:
                    parts = islice(stream, 9)
                    text = "".join(part.choices[0].delta.content or "" for part in parts)
                    assert text and long.startswith(text)
                    stream.close()
        finally:
            process.kill()
            process.communicate()


def test_without_the_extra_the_command_names_it() -> None:
    main = "import sys\nsys.modules['cryptography'] = None\nfrom inferd.cli import main\nmain()"
    for command in (("init",), ("node", "a"), ("serve", "--config", "missing.toml")):
        with inferd_process("fleet", *command, main=main) as process:
            _, errors = process.communicate()
        assert process.returncode == 1
        assert b"cryptography is missing" in errors and b"[fleet]" in errors
