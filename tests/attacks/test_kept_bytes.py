"""A user who keeps much in sessions and graphs: a bound holds, and other users lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from inferd.backends.errors import QuotaExceeded, TooLarge
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import RawClient

BYTES_MAX = 1_000_000
LONG = "x" * 60_000
ONE_TOKEN = {"n-predict": 1}
STAFF = 4711
BOUND = f"session-bytes-user-max = {BYTES_MAX}\n"
MODELS = echo_model("m", slots=2, ctx_size=4096) + echo_model("slow", slots=1, step_ms=5)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all(BOUND + MODELS) as running:
        yield running


@contextmanager
def two_users(daemon: RunningDaemon) -> Iterator[tuple[RawClient, RawClient]]:
    """Connect an attacker and a victim, whose stream goes on meanwhile."""
    with client_of(daemon, ADA) as ada, client_of(daemon, BOB) as bob:
        stream = bob.begin_stream(bob.context("slow"), "the victim's stream")
        diary, _ = session_of(bob, "diary")
        bob.set_input(diary, b"dear diary")
        bob.call("finalize_execution_context", context=diary, keep=True)
        yield ada, bob
        assert bob.wait_result(stream)["metadata"]["stop_reason"]
        _, attached = session_of(bob, "diary")
        assert attached, "the victim's dormant session is there"


@contextmanager
def two_users_of(config: str) -> Iterator[tuple[RawClient, RawClient]]:
    with daemon_for_all(config) as daemon, two_users(daemon) as users:
        yield users


def session_of(client: RawClient, session_id: str) -> tuple[int, bool]:
    """Open a session with an id; return its handle, and whether it existed."""
    graph = client.call("load_by_name", name="m")["graph"]
    found = client.call(
        "init_execution_context_with_session_id", graph=graph, session_id=session_id
    )
    return int(found["context"]), bool(found.get("attached", False))


def refused_after(client: RawClient, call: str, tries: int = 60, **params: Any) -> int:
    """Return how often a call succeeds until the bound on bytes refuses it."""
    for number in range(tries):
        try:
            client.call(call, **params)
        except QuotaExceeded as error:
            data = error.data
            assert data["bound"] == "session-bytes-user-max" and error.hint
            assert data["bytes"] <= data["bytes_max"] == BYTES_MAX < data["bytes"] + data["more"]
            return number
    raise AssertionError(f"{tries} calls were accepted")


def dormant_sessions(client: RawClient) -> list[str]:
    found = client.call("sessions", dormant=True)["sessions"]
    return [session["session_id"] for session in found if session["state"] == "dormant"]


def test_options_of_dormant_sessions_count_and_old_ones_are_deleted(
    daemon: RunningDaemon,
) -> None:
    with two_users(daemon) as (ada, bob):
        for number in range(40):
            context, _ = session_of(ada, f"s{number}")
            ada.call("set_options", context=context, options={"grammar": f'root ::= "{LONG}"'})
            ada.call("finalize_execution_context", context=context, keep=True)
        left = dormant_sessions(ada)
        assert 5 < len(left) < BYTES_MAX / len(LONG)
        assert left == [f"s{number}" for number in range(40 - len(left), 40)]
        assert dormant_sessions(bob) == ["diary"]


def test_notes_of_dormant_sessions_count(daemon: RunningDaemon) -> None:
    with two_users(daemon) as (ada, bob):
        for number in range(40):
            context, _ = session_of(ada, f"n{number}")
            ada.call("set_options", context=context, note=LONG.encode())
            ada.call("finalize_execution_context", context=context, keep=True)
        assert 5 < len(dormant_sessions(ada)) < BYTES_MAX / len(LONG)
        assert dormant_sessions(bob) == ["diary"]
        context, _ = session_of(ada, "one")
        notes = [session_of(ada, f"open{number}")[0] for number in range(20)]
        with pytest.raises(QuotaExceeded):
            for each in (context, *notes):
                ada.call("set_options", context=each, note=LONG.encode())


def test_extra_keys_of_messages_count_until_the_session_is_closed(daemon: RunningDaemon) -> None:
    with two_users(daemon) as (ada, _):
        context = ada.context("m")
        message = {"role": "user", "content": "hello", "extra": LONG}
        turn: dict[str, Any] = {"context": context, "messages": [message], "options": ONE_TOKEN}
        accepted = refused_after(ada, "chat", **turn)
        assert 5 < accepted < BYTES_MAX / len(LONG)
        ada.call("reset", context=context)
        ada.call("chat", **turn)


def test_small_values_count_with_the_memory_that_they_take(daemon: RunningDaemon) -> None:
    """An empty map is one byte of a frame, and 64 of memory."""
    with two_users(daemon) as (ada, _):
        message = {"role": "user", "content": "hello", "extra": [{}] * 2000}
        context = ada.context("m")
        turn: dict[str, Any] = {"context": context, "messages": [message], "options": ONE_TOKEN}
        assert refused_after(ada, "chat", **turn) < BYTES_MAX / (2000 * 64)


def test_input_that_is_never_computed_counts(daemon: RunningDaemon) -> None:
    with two_users(daemon) as (ada, _):
        accepted = 0
        with pytest.raises(QuotaExceeded):
            while accepted < 60:
                ada.set_input(ada.context("m"), b"x" * 4000)
                accepted += 1
        assert 1 < accepted < BYTES_MAX / (4000 * 30)


def test_parameters_of_graphs_count_until_they_are_unloaded(daemon: RunningDaemon) -> None:
    with two_users(daemon) as (ada, _):
        config = '{"grammar": "' + LONG + '"}'
        accepted = refused_after(ada, "load_by_name_with_config", name="m", config=config)
        assert 5 < accepted < BYTES_MAX / len(LONG)
        ada.call("deinit_backend")
        ada.call("load_by_name_with_config", name="m", config=config)


def test_branches_count(daemon: RunningDaemon) -> None:
    with two_users(daemon) as (ada, _):
        context = ada.context("m")
        ada.set_input(context, b"x" * 4000)
        with pytest.raises(QuotaExceeded):
            ada.call("fork_session", context=context, n=16)
        assert [s["context"] for s in ada.call("sessions")["sessions"]] == [context], "none is made"


def test_the_messages_of_one_history_have_a_bound() -> None:
    """Each turn sends them all to the worker."""
    with two_users_of(MODELS) as (ada, _):
        context, accepted = ada.context("m"), 0
        message = {"role": "user", "content": "hello", "extra": "x" * 500_000}
        with pytest.raises(TooLarge) as caught:
            while accepted < 30:
                ada.call("chat", context=context, messages=[message], options=ONE_TOKEN)
                accepted += 1
        assert caught.value.data["messages_bytes_max"] == 8 << 20


def test_an_access_rule_sets_another_bound() -> None:
    rules = f"[access.r]\nusers = [{ADA}]\nsession-bytes-max = 50000\n"
    with two_users_of(MODELS + rules) as (ada, _):
        context = ada.context("m")
        with pytest.raises(QuotaExceeded) as caught:
            ada.call("set_options", context=context, options={"grammar": LONG})
        assert caught.value.data["bound"] == "access.r.session-bytes-max"


def test_many_dormant_sessions_of_one_user_delete_none_of_another() -> None:
    with two_users_of("dormant-sessions-max = 5\n" + MODELS) as (ada, bob):
        for number in range(20):
            context, _ = session_of(ada, f"s{number}")
            ada.call("finalize_execution_context", context=context, keep=True)
        assert dormant_sessions(ada) == ["s16", "s17", "s18", "s19"]
        assert dormant_sessions(bob) == ["diary"]


def test_one_user_opens_half_of_the_sessions_at_most() -> None:
    config = "sessions-max = 6\nsessions-user-max = 3\n" + MODELS
    with two_users_of(config) as (ada, bob):
        graph = ada.call("load_by_name", name="m")["graph"]
        for _ in range(3):
            ada.call("init_execution_context", graph=graph)
        with pytest.raises(QuotaExceeded) as caught:
            ada.call("init_execution_context", graph=graph)
        assert caught.value.data["bound"] == "sessions-user-max"
        bob.context("m")


def test_graphs_that_are_being_loaded_count() -> None:
    """Otherwise calls that load at the same time would exceed the bound together."""
    with two_users_of(BOUND + MODELS + echo_model("late", load_ms=3000)) as (ada, _):
        config = '{"grammar": "' + LONG + '"}'
        call: dict[str, Any] = {"name": "late", "config": config}
        numbers = [ada.start_request("load_by_name_with_config", **call) for _ in range(40)]
        accepted = 0
        for number in numbers:
            with suppress(QuotaExceeded):
                accepted += "graph" in ada.wait_result(number)
        assert 5 < accepted < BYTES_MAX / len(LONG)


def test_the_bound_of_a_group_holds_while_its_user_is_not_connected() -> None:
    rules = f"[access.staff]\ngroups = [{STAFF}]\nsession-bytes-max = {BYTES_MAX}\n"
    bound = "session-bytes-user-max = 50000\n"
    with daemon_for_all(bound + MODELS + rules) as daemon, client_of(daemon, BOB) as bob:
        with client_of(daemon, ADA, [STAFF]) as ada:
            context, _ = session_of(ada, "large")
            ada.call("set_options", context=context, options={"grammar": LONG})
            ada.call("finalize_execution_context", context=context, keep=True)
        bob.set_input(bob.context("m"), b"a session that grows deletes excess ones")
        with client_of(daemon, ADA, [STAFF]) as ada:
            assert session_of(ada, "large")[1], "it exists still"
