"""The call by which the daemons of a fleet share fairly among users: who may make it, for whom."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import inferd
from inferd.backends.errors import InvalidArgument, PermissionDenied, TooLarge
from inferd.daemon.access.rights import DELEGATED_MAX, DelegatedUsers
from inferd.ipc.messages import SERVED_TOKENS_MAX
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, as_user, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

GATEWAY, OTHER_GATEWAY = 54323, 54324
MODEL, QUANTUM, AGEING = "slow", 16, 500
CONFIG = f"""quantum-tokens = {QUANTUM}
[access.gateways]
users = [{GATEWAY}, {OTHER_GATEWAY}]
allow = ["use", "delegate"]
""" + echo_model(MODEL, step_ms=12, slots=1, ctx_size=16384, batch_size=QUANTUM)
LONG = "a long text " * 100
BEGUN = len(LONG) + 100
"""The tokens of a user whose first answer has begun. A step of a prompt is as large as a quantum,
because a user who has waited long gets a step, no matter who precedes.
"""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all(CONFIG) as running:
        yield running


def client_for(daemon: RunningDaemon, name: str, gateway: int = GATEWAY) -> RawClient:
    with as_user(gateway):
        return RawClient(daemon.socket, on_behalf_of=name)


def exchange(client: RawClient, **users: Any) -> dict[str, int]:
    """Report tokens of users, whose names follow an underscore; return the totals."""
    elsewhere = {name.replace("_", "@"): tokens for name, tokens in users.items()}
    found = client.call("exchange_served", elsewhere={MODEL: elsewhere})["served"]
    return dict(found.get(MODEL, {}))


def chat(client: RawClient) -> str:
    result = client.call("chat", context=client.context(MODEL), prompt="abc", raw=True)
    return bytes(result["text"]).decode()


def begin_streams(stack: ExitStack, daemon: RunningDaemon, name: str, **more: int) -> RawClient:
    """Begin two turns of a user, so that one always waits; two users have 60 s of work."""
    client = stack.enter_context(client_for(daemon, name, **more))
    for _ in range(2):
        context = client.context(MODEL)
        client.start_request("stream", context=context, prompt=LONG, raw=True, credit=1024)
    return client


@pytest.mark.alone
def test_tokens_elsewhere_leave_the_slot_to_the_other_user(daemon: RunningDaemon) -> None:
    with ExitStack() as stack:
        entry = stack.enter_context(client_of(daemon, GATEWAY))
        for name in ("@ada", "@bob"):
            begin_streams(stack, daemon, name)
        wait_until(lambda: min(exchange(entry).get(name, 0) for name in ("@ada", "@bob")) > BEGUN)
        computed_alone(entry, "@bob", _ada=200_000)
        computed_alone(entry, "@ada", _bob=100_000_000)


def computed_alone(entry: RawClient, name: str, **elsewhere: int) -> None:
    """Report tokens that other nodes have computed, and see that this user's turns have the slot
    once those who were behind have caught up, in two seconds at most.
    """
    other = {"@ada": "@bob", "@bob": "@ada"}[name]
    begin = exchange(entry, **elsewhere)
    wait_until(lambda: exchange(entry)[name] >= begin[name] + 170)
    before = exchange(entry)
    wait_until(lambda: exchange(entry)[name] >= before[name] + 100)
    assert exchange(entry)[other] - before[other] <= QUANTUM


@pytest.mark.alone
def test_a_gateway_reads_and_changes_only_its_own_users(daemon: RunningDaemon) -> None:
    with ExitStack() as stack:
        entry = stack.enter_context(client_of(daemon, GATEWAY))
        other = stack.enter_context(client_of(daemon, OTHER_GATEWAY))
        begin_streams(stack, daemon, "@ada")
        begin_streams(stack, daemon, "@ada", gateway=OTHER_GATEWAY)
        wait_until(lambda: exchange(entry).get("@ada", 0) > BEGUN)
        wait_until(lambda: exchange(other).get("@ada", 0) > BEGUN)
        before = wait_until(lambda: exchange(entry))  # a worker that answers late is left out
        others = exchange(other, _ada=3000, **{str(GATEWAY): 3000})
        assert set(before) == set(others) == {"@ada"}
        wait_until(lambda: exchange(entry)["@ada"] >= before["@ada"] + 200)
        assert exchange(other)["@ada"] - others["@ada"] <= QUANTUM, "only its own user waits"


def test_the_caller_is_the_user_without_a_name(daemon: RunningDaemon) -> None:
    with client_of(daemon, GATEWAY) as entry, client_of(daemon, ADA) as ada:
        chat(entry)
        chat(ada)
        assert set(exchange(entry)) == {""}
        assert exchange(entry) == {}, "neither turns nor tokens since"


def test_only_gateways_may_exchange(daemon: RunningDaemon) -> None:
    with client_of(daemon, ADA) as ada, pytest.raises(PermissionDenied) as caught:
        exchange(ada, _ada=1)
    assert caught.value.data["right"] == "delegate"
    with client_for(daemon, "@ada") as user, pytest.raises(PermissionDenied):
        exchange(user, _bob=1)


ABSURD = (-1, SERVED_TOKENS_MAX + 1, 1 << 63, math.nan, math.inf, 1.5, "1", None, [1], True)


def test_absurd_tokens_are_refused(daemon: RunningDaemon) -> None:
    with client_of(daemon, GATEWAY) as entry:
        for tokens in ABSURD:
            for elsewhere in ({MODEL: {"@ada": tokens}}, {MODEL: tokens}, tokens):
                with pytest.raises(InvalidArgument):
                    entry.call("exchange_served", elsewhere=elsewhere)
        with pytest.raises(InvalidArgument):
            entry.call("exchange_served", elsewhere={MODEL: {1: 1}})


@pytest.mark.alone
def test_the_most_tokens_delay_a_user_by_a_bounded_time() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_for_all(f"ageing-tokens = {AGEING}\n{CONFIG}"))
        entry = stack.enter_context(client_of(daemon, GATEWAY))
        ada = stack.enter_context(client_for(daemon, "@ada"))
        begin_streams(stack, daemon, "@bob")
        wait_until(lambda: "@bob" in exchange(entry))
        for _ in range(3):
            exchange(entry, _ada=SERVED_TOKENS_MAX, _nobody=SERVED_TOKENS_MAX)
        before = exchange(entry)["@bob"]
        assert chat(ada) == "abc"
        after = exchange(entry)
        assert set(after) == {"@ada", "@bob"}
        assert after["@bob"] - before < 5 * AGEING, "three classes, and the lead of a user"


def test_any_number_of_names_is_bounded(daemon: RunningDaemon) -> None:
    with client_of(daemon, GATEWAY) as entry:
        chat(entry)
        assert set(exchange(entry, **{"x" * 1000 + str(n): 1 for n in range(500)})) == {""}
        with pytest.raises(TooLarge):
            exchange(entry, **{str(number): 1 for number in range(20_000)})
        missing = entry.call("exchange_served", elsewhere={"missing": {"@ada": 1}})
        assert missing["served"] == {MODEL: {}}


def test_the_client_has_the_call(daemon: RunningDaemon) -> None:
    with inferd.Client(daemon.socket) as client:
        assert client.exchange_served() == {}
        with client.session("echo") as session:
            session.chat("text")
        assert client.exchange_served({"echo": {"": 5}})["echo"][""] > 0


def test_the_users_of_gateways_are_bounded() -> None:
    users = DelegatedUsers()
    for number in range(DELEGATED_MAX + 10):
        users.add_user(GATEWAY, f"@user{number}", number)
        users.add_user(GATEWAY, "@ada", 1)
    found = users.numbers_by_name(GATEWAY)
    assert len(found) == DELEGATED_MAX and found["@ada"] == 1 and "@user0" not in found
    assert users.numbers_by_name(OTHER_GATEWAY) == {}
