"""Isolation of users: they learn of each other only that the machine is in use.

Two users of one daemon, whom the kernel tells apart; the daemon is root's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import Busy, InferdError, InvalidArgument, ModelNotFound, SessionBusy
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

MODELS = echo_model("m", slots=2) + echo_model("slow", slots=1, step_ms=5)
SECRET = "the treasure lies under the third oak behind the old mill " * 10
DIARY = "my-very-own-diary"


@contextmanager
def two_users(config: str = "") -> Iterator[tuple[RunningDaemon, RawClient, RawClient]]:
    with (
        daemon_for_all(config + MODELS) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        yield daemon, ada, bob


def named(client: RawClient, session_id: str = DIARY, model: str = "m") -> tuple[int, bool]:
    """Open a session with an id; return its handle, and whether it was there before."""
    graph = client.call("load_by_name", name=model)["graph"]
    found = client.call(
        "init_execution_context_with_session_id", graph=graph, session_id=session_id
    )
    return int(found["context"]), bool(found.get("attached", False))


def strings(value: Any) -> set[str]:
    """Return all texts in a decoded message, keys included."""
    if isinstance(value, dict):
        return strings([*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return set().union(*map(strings, value)) if value else set()
    if isinstance(value, bytes):
        return {value.decode(errors="replace")}
    return {value} if isinstance(value, str) else set()


def secrets_in(value: Any) -> list[str]:
    """Return the secrets of Ada in a message."""
    hers = (DIARY, "treasure", "third oak", str(ADA))
    return [one for one in hers if any(one in text for text in strings(value))]


def test_a_session_and_its_turns_are_in_no_list_of_another_user() -> None:
    with two_users() as (_, ada, bob), two_users_turn(ada) as context:
        assert [s["session_id"] for s in ada.call("sessions")["sessions"]] == [DIARY]
        assert [t["context"] for t in ada.call("queue")["tasks"]] == [context]
        assert bob.call("sessions", dormant=True)["sessions"] == []
        assert bob.call("queue") == {"tasks": []}
        answers = [bob.call(call) for call in ("models", "stats")]
        answers.append(bob.call("show", name="slow"))
        assert secrets_in(answers) == []


@contextmanager
def two_users_turn(ada: RawClient) -> Iterator[int]:
    """Start a turn of Ada's that is not read."""
    context, _ = named(ada, model="slow")
    turn = ada.start_request("stream", context=context, prompt=SECRET, raw=True, credit=1)
    ada.events.append(ada.read_message())
    yield context
    ada.call("cancel", context=context)
    with pytest.raises(InferdError):
        ada.wait_result(turn)


def test_her_handles_are_answered_as_if_they_had_never_been() -> None:
    with two_users() as (_, ada, bob), two_users_turn(ada) as context:
        graph = ada.call("load_by_name", name="m")["graph"]
        calls: dict[str, dict[str, Any]] = {
            "get_output": {"context": context},
            "chat": {"context": context, "prompt": "x"},
            "compute_single": {"context": context},
            "fork_session": {"context": context},
            "rewind": {"context": context, "turns": 1},
            "reset": {"context": context},
            "cancel": {"context": context},
            "delete_session": {"context": context},
            "session_media": {"context": context, "sha256": "0" * 64},
            "parameters": {"context": context},
            "resume": {"context": context},
            "finalize_execution_context": {"context": context},
            "unload": {"graph": graph},
            "tokenize": {"graph": graph, "text": "x"},
            "init_execution_context": {"graph": graph},
        }
        for call, params in calls.items():
            hers = refusal_of(bob, call, **params)
            nobodys = refusal_of(bob, call, **{**params, **never_was(params)})
            for handle in (context, graph, context + 1000, graph + 1000):
                hers, nobodys = hers.replace(str(handle), "N"), nobodys.replace(str(handle), "N")
            assert hers == nobodys, call
        assert [t["state"] for t in ada.call("queue")["tasks"]] == ["running"]
        assert ada.call("tokenize", graph=graph, text="x")


def never_was(params: dict[str, Any]) -> dict[str, int]:
    return {key: params[key] + 1000 for key in ("context", "graph") if key in params}


def refusal_of(client: RawClient, call: str, **params: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        client.call(call, **params)
    return json.dumps(caught.value.to_wire())


def test_the_same_session_id_is_another_session_open_or_asleep() -> None:
    with two_users() as (_, ada, bob):
        hers, _ = named(ada)
        ada.call("chat", context=hers, prompt=SECRET, raw=True)
        his, attached = named(bob)
        assert not attached and his != hers
        assert bob.call("get_output", context=his)["data"] == b""
        ada.call("finalize_execution_context", context=hers, keep=True)
        assert bob.call("sessions", dormant=True)["sessions"][0]["tokens"] == 0
        assert bob.call("delete_session", session_id=DIARY) == {"deleted": True}
        assert bob.call("delete_session", session_id=DIARY) == {"deleted": False}
        _, attached = named(ada)
        assert attached, "only Bob's own session was deleted"


def test_an_id_that_is_open_elsewhere_is_busy_for_its_own_user_alone() -> None:
    with two_users() as (daemon, ada, bob), client_of(daemon, ADA) as again:
        named(ada)
        with pytest.raises(SessionBusy):
            named(again)
        named(bob)


def test_a_prompt_that_another_user_had_is_computed_as_if_nobody_had() -> None:
    with two_users() as (daemon, ada, bob), client_of(daemon, ADA) as again:
        assert cached(ada) == 0
        assert cached(again) > 0, "it is hers"
        assert cached(bob) == 0, "and not Bob's"
        assert cached(bob) > 0


def test_it_is_so_after_a_restart_too() -> None:
    with daemon_for_all(MODELS) as daemon:
        with client_of(daemon, ADA) as ada:
            context, _ = named(ada)
            ada.call("chat", context=context, prompt=SECRET, raw=True)
        daemon.stop()
        kv = daemon.directory / "state" / "kv"
        files = [path for path in kv.rglob("*") if path.is_file()]
        assert files and all(str(ADA) in str(path) for path in files)
        modes = {path.stat().st_mode & 0o077 for path in (*files, daemon.directory / "state")}
        assert modes == {0}, "nobody else reads them"
        daemon.start_again()
        with client_of(daemon, BOB) as bob, client_of(daemon, ADA) as again:
            assert cached(bob) == 0
            assert cached(again) > 0


def cached(client: RawClient) -> int:
    """Return how many of the secret's tokens were cached."""
    context = client.context("m")
    said = client.call("chat", context=context, prompt=SECRET, raw=True)
    return int(said["metadata"]["cached_tokens"])


def test_refusals_for_what_others_use_have_numbers_and_no_names() -> None:
    with two_users("sessions-max = 2\n") as (_, ada, bob):
        context, _ = named(ada, model="slow")
        ada.start_request("stream", context=context, prompt=SECRET, raw=True, credit=1)
        ada.events.append(ada.read_message())
        bob.context("slow")
        with pytest.raises(Busy) as sessions:
            bob.context("slow")
        assert secrets_in(sessions.value.to_wire()) == []
        assert set(sessions.value.data) == {"sessions", "sessions_max", "retry_after_s"}


def test_a_model_of_her_descriptor_has_no_name_for_another_user(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    with two_users() as (_, ada, bob), open(path, "rb") as file:
        name = ada.call("load", [file.fileno()], fd=0)["model"]
        assert name in [m["name"] for m in ada.call("models")["models"]]
        assert name not in [m["name"] for m in bob.call("models")["models"]]
        assert name not in bob.call("stats")["stats"]["models"]
        for call in ("show", "load_by_name"):
            with pytest.raises(ModelNotFound) as caught:
                bob.call(call, name=name)
            assert name not in caught.value.data["models"]


def test_no_prompt_is_in_the_log_and_no_figure_names_a_user() -> None:
    with two_users("log-level = 'debug'\n") as (daemon, ada, bob):
        context, _ = named(ada)
        ada.call("chat", context=context, prompt=SECRET, raw=True)
        with pytest.raises(InferdError):
            ada.call("chat", context=context, messages=[{"role": "user", "content": 7}])
        assert "treasure" not in daemon.log
        assert secrets_in(bob.call("stats")) == []


NAMES = [
    *("../models/m", "../../etc/passwd", "/etc/passwd", "m/../m", "./m", "m\0", "\0", "..", "."),
    *("n.gguf", "../models/m.gguf", "link", " m", "m ", "ｍ", "x" * 128, "x" * 200),
]


def test_no_name_leads_out_of_the_registry() -> None:
    with daemon_for_all(MODELS) as daemon, RawClient(daemon.socket) as own:
        (daemon.directory / "secret.gguf").write_bytes(b"GGUF")
        (daemon.directory / "models" / "a.txt").touch()
        for name in [*NAMES, str(daemon.directory / "secret"), "../secret"]:
            for call in ("load_by_name", "show", "unload_model", "pin", "unpin"):
                with pytest.raises(ModelNotFound):
                    own.call(call, name=name)
            with pytest.raises(ModelNotFound):
                own.call("swap", name=name, to="m")
            with pytest.raises(ModelNotFound):
                own.call("load", builders=[b"preload:x" + name.encode()])
        for to in [*NAMES, "../secret.gguf", "models/m.gguf"]:
            with pytest.raises(ModelNotFound):
                own.call("swap", name="m", to=to)
        for adapter in NAMES[:9]:
            with pytest.raises(InvalidArgument, match="is not a name"):
                own.call("add_adapter", name="m", adapter=adapter, file="a.txt")
