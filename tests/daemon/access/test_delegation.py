"""Gateways that act on behalf of users: who may, for whom, and with which rights."""

from __future__ import annotations

import pwd
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import inferd
from inferd.backends.errors import (
    InferdError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Timeout,
)
from inferd.daemon.access.rights import find_user, identify_user
from inferd.daemon.access.rules import MEMBER, OPERATOR, delegated_rights
from inferd.daemon.config.access_settings import OWN_USERS_MIN
from inferd.ipc.messages import Right
from inferd.ipc.server import descriptors
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, Stranger, as_user, client_of, daemon_for_all
from tests.raw import RawClient

GATEWAY, REFUSED = 54323, 54324
RULES = f"""
[access.gateways]
users = [{GATEWAY}]
allow = ["use", "delegate", "see-all"]
priority-max = "normal"

[access.bob]
users = [{BOB}]
allow = ["use", "manage", "see-all"]
sessions-max = 1

[access.dora]
users = ["{GATEWAY}@dora@example.com"]
sessions-max = 1

[access.refused]
users = [{REFUSED}]
allow = []
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all(RULES) as running:
        yield running


def gateway(daemon: RunningDaemon, name: str, label: str = "") -> RawClient:
    with as_user(GATEWAY):
        return RawClient(daemon.socket, on_behalf_of=name, label=label)


def attach(client: RawClient, session_id: str) -> bool:
    graph = client.call("load_by_name", name="echo")["graph"]
    call = "init_execution_context_with_session_id"
    return bool(client.call(call, graph=graph, session_id=session_id).get("attached"))


@pytest.mark.parametrize("name", [str(BOB), "@bob", "0", "nobody-of-this-name"])
def test_a_user_without_the_right_acts_on_behalf_of_nobody(
    daemon: RunningDaemon, name: str
) -> None:
    with as_user(ADA):
        client = RawClient(daemon.socket, on_behalf_of=name)
    with client:
        error = client.goodbye()
    assert isinstance(error, PermissionDenied) and "delegate" in error.hint
    assert error.data == {"right": "delegate"}


def test_a_gateway_opens_the_sessions_of_the_user_and_no_others(daemon: RunningDaemon) -> None:
    with client_of(daemon, BOB) as bob:
        assert not attach(bob, "diary")
    with gateway(daemon, str(BOB)) as for_bob:
        assert attach(for_bob, "diary")
        [session] = for_bob.call("sessions")["sessions"]
        assert session["uid"] == BOB
    with gateway(daemon, str(ADA)) as for_ada:
        assert for_ada.call("sessions", dormant=True)["sessions"] == []
        assert not attach(for_ada, "diary")
        for_ada.call("delete_session", session_id="diary")


def test_the_rights_are_those_that_both_have(daemon: RunningDaemon) -> None:
    with gateway(daemon, str(BOB)) as client:
        with pytest.raises(PermissionDenied):
            client.call("pin", name="echo")
        client.call("sessions", all=True)
        with pytest.raises(PermissionDenied):
            client.call("compute", context=1, priority="high")
    with gateway(daemon, str(ADA)) as client, pytest.raises(PermissionDenied):
        client.call("sessions", all=True)
    rights = delegated_rights(OPERATOR, MEMBER)
    assert (rights.allowed, rights.quota) == (MEMBER.allowed, MEMBER.quota)
    assert Right.DELEGATE not in delegated_rights(OPERATOR, OPERATOR).allowed


def test_the_users_own_quota_holds(daemon: RunningDaemon) -> None:
    with gateway(daemon, str(BOB), label="a") as one, gateway(daemon, str(BOB)) as other:
        one.context()
        with pytest.raises(QuotaExceeded) as caught:
            other.context()
        assert caught.value.data["bound"] == "access.bob.sessions-max"
        with gateway(daemon, str(ADA)) as ada:
            ada.context()


def test_a_rule_names_one_user_of_one_gateway(daemon: RunningDaemon) -> None:
    with gateway(daemon, "@dora@example.com") as dora, gateway(daemon, "@dora") as other:
        dora.context()
        with pytest.raises(QuotaExceeded) as caught:
            dora.context()
        assert caught.value.data["bound"] == "access.dora.sessions-max"
        for _ in range(2):
            other.context()


@pytest.mark.parametrize("name", ["0", "root"])
def test_nobody_acts_on_behalf_of_root(daemon: RunningDaemon, name: str) -> None:
    with gateway(daemon, name) as client:
        refusal = client.goodbye()
    assert isinstance(refusal, PermissionDenied) and refusal.hint


def test_a_user_who_may_do_nothing_may_not_through_a_gateway(daemon: RunningDaemon) -> None:
    with gateway(daemon, str(REFUSED)) as client:
        refusal = client.goodbye()
    assert isinstance(refusal, PermissionDenied) and "both users' rights" in refusal.hint


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nobody-of-this-name", NotFound),
        ("65534", PermissionDenied),
        ("4294967295", NotFound),
        ("99999999999999999999", NotFound),
        ("a b", InvalidArgument),
        ("a\nb", InvalidArgument),
        ("@", InvalidArgument),
        ("@a/b", InvalidArgument),
        ("x" * 129, InvalidArgument),
    ],
)
def test_other_names_are_refused(
    daemon: RunningDaemon, name: str, error: type[InferdError]
) -> None:
    with gateway(daemon, name) as client:
        refusal = client.goodbye()
    assert isinstance(refusal, error) and refusal.hint


def test_a_gateways_own_users_are_apart_from_each_other_and_from_the_systems(
    daemon: RunningDaemon,
) -> None:
    with gateway(daemon, "@eve@example.com") as eve, gateway(daemon, "@mallory") as mallory:
        assert not attach(eve, "diary") and not attach(mallory, "diary")
        [session] = eve.call("sessions")["sessions"]
        assert session["user"] == "@eve@example.com" and session["uid"] >= OWN_USERS_MIN
        everybody = client_of(daemon, BOB)
        with everybody:
            seen = {s["user"] for s in everybody.call("sessions", all=True)["sessions"]}
        assert seen >= {"@eve@example.com", "@mallory"}
    with gateway(daemon, "@eve@example.com") as again:
        assert attach(again, "diary"), "the number is the same at each connection"
    with inferd.Client(daemon.socket, on_behalf_of="@eve@example.com") as roots:
        assert roots.sessions(dormant=True) == [], "the names of another gateway's users"


def test_names_and_numbers_of_own_users_never_meet_the_systems() -> None:
    numbers = {find_user(f"@user{n}", GATEWAY).number for n in range(10_000)}
    assert len(numbers) == 10_000 and min(numbers) >= OWN_USERS_MIN and max(numbers) < 1 << 62
    assert find_user("@root", GATEWAY).number not in (0, find_user("@root", ADA).number)
    user = pwd.getpwuid(1)
    assert find_user(user.pw_name, GATEWAY) == find_user("1", GATEWAY)
    assert user.pw_gid in find_user(user.pw_name, GATEWAY).groups


@pytest.mark.asyncio
async def test_a_database_of_users_that_does_not_answer_ends_in_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(pwd, "getpwnam", lambda _: answers.wait())
    monkeypatch.setattr(descriptors, "OPERATION_S_MAX", 0.05)
    connection: Any = Stranger(GATEWAY)
    connection.user = descriptors.ClientDescriptors().of_user(GATEWAY)
    try:
        with pytest.raises(Timeout, match="did not answer for 'ada'") as caught:
            await identify_user(connection, "ada", own=990)
        assert "nsswitch" in caught.value.hint
    finally:
        answers.set()


def test_the_log_names_both_users(daemon: RunningDaemon) -> None:
    with gateway(daemon, "@carol", label="agent-7") as client:
        client.call("models")
    [line] = [line for line in daemon.log.splitlines() if "carol" in line]
    assert str(GATEWAY) in line and "agent-7" in line and "connection.delegated" in line


def test_requests_sent_at_once_wait_until_the_user_is_known(daemon: RunningDaemon) -> None:
    with gateway(daemon, str(ADA)) as client:
        numbers = [client.start_request("sessions") for _ in range(100)]
        assert all(client.wait_result(number)["sessions"] == [] for number in numbers)


def test_metrics_count_connections_on_behalf_of_others_without_their_names(
    daemon: RunningDaemon,
) -> None:
    with gateway(daemon, "@dave") as client:
        metrics = str(client.call("stats")["stats"]["metrics"])
    assert "connections_delegated" in metrics and "dave" not in metrics
