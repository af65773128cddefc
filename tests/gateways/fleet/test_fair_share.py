"""Fair share over a fleet: a user with turns on three nodes gets no more than one on one node."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from inferd import Client
from tests.daemon.other_users import ADA, BOB, as_user
from tests.echo import echo_model
from tests.gateways.fleet.members import WAIT_S_MAX, RunningFleet, running_fleet
from tests.raw import Closed, RawClient

pytestmark = pytest.mark.alone
MODEL = "slow"
SLOTS = {"a": 8, "b": 2, "c": 2}
"""The part of each user is six slots: of node a, Bob gets six, and Ada two."""
TEXT = "sixty tokens, read in one step, written in sixty further ones"
STEP_MS = 4
MEASURED_TOKENS, MEASURED_TOKENS_MAX = 4000, 24_000
"""The least and the most tokens over which the shares are compared: a second on idle cores. On
busy ones each node's turns begin and end less evenly. The promise is for 60 seconds.
"""
SETTLED_TOKENS = 1500
"""Tokens after which a change of the fleet must no longer show in the shares."""
POLL_S = 0.05
_numbers = itertools.count()


def node_config(slots: int) -> str:
    model = echo_model(MODEL, step_ms=STEP_MS, slots=slots, ctx_size=1 << 16)
    return f"[daemon]\nquantum-tokens = 16\n{model}"


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        configs = {name: node_config(slots) for name, slots in SLOTS.items()}
        more = 'socket-mode = "0666"\n'
        with running_fleet(Path(folder), configs, *SLOTS, more=more) as running:
            yield running


def place_session(fleet: RunningFleet, user: int, node: str, session_id: str) -> None:
    """Have a session with an id on a node, where the entry then opens it."""
    with RawClient(fleet.daemons[node].socket, on_behalf_of=f"@{user}") as client:
        graph = client.call("load_by_name", name=MODEL)["graph"]
        opened = client.call(
            "init_execution_context_with_session_id", graph=graph, session_id=session_id
        )
        client.call("finalize_execution_context", context=opened["context"], keep=True)


class Turns:
    """A user's turns through the entry: in each session one after the other, until `close`."""

    def __init__(self, fleet: RunningFleet, user: int, sessions: Mapping[str, int]):
        names = [f"diary-{next(_numbers)}" for _ in range(sum(sessions.values()))]
        nodes = [node for node, many in sessions.items() for _ in range(many)]
        for name, node in zip(names, nodes, strict=True):
            place_session(fleet, user, node, name)
        with as_user(user):
            self._client = RawClient(fleet.socket, timeout_s=60.0)
        self._under_way: dict[int, int] = {}
        self._thread = threading.Thread(target=self._continue)
        try:
            self._begin(names)
        except BaseException:
            self._client.socket.close()
            raise

    def _begin(self, names: Iterable[str]) -> None:
        graph = self._client.call("load_by_name", name=MODEL)["graph"]
        for name in names:
            opened = self._client.call(
                "init_execution_context_with_session_id", graph=graph, session_id=name
            )
            self._begin_turn(int(opened["context"]))
        self._thread.start()

    def _begin_turn(self, context: int) -> None:
        number = self._client.start_request("chat", context=context, prompt=TEXT, raw=True)
        self._under_way[number] = context

    def _continue(self) -> None:
        try:
            while True:
                message = self._client.read_message()
                context = self._under_way.pop(message[1])
                if message[0] == 2:  # else its node is lost
                    self._begin_turn(context)
        except (Closed, OSError):
            pass

    def close(self) -> None:
        self._client.socket.shutdown(2)
        self._thread.join()
        self._client.socket.close()


@contextmanager
def both_users(fleet: RunningFleet) -> Iterator[None]:
    """Run turns of Bob on node a, and of Ada everywhere; a turn always waits on each node."""
    with ExitStack() as stack:
        stack.callback(Turns(fleet, ADA, {"a": 9, "b": 3, "c": 3}).close)
        stack.callback(Turns(fleet, BOB, {"a": 9}).close)
        yield


def served(clients: Iterable[Client]) -> Counter[str]:
    """Return the tokens that nodes have computed so far, by user."""
    found = Counter[str]()
    for direct in clients:
        found.update(direct.exchange_served()[MODEL])
    return found


def measure(fleet: RunningFleet, nodes: str, tokens: int) -> Counter[str]:
    """Return the tokens for each user while the nodes compute so many."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(fleet.daemons[node].socket)) for node in nodes]
        before, pause, end = served(clients), threading.Event(), time.monotonic() + WAIT_S_MAX
        while True:
            computed = served(clients) - before
            if computed.total() >= tokens:
                return computed
            assert time.monotonic() < end, f"too slow: {computed}"
            pause.wait(POLL_S)


def check_shares(fleet: RunningFleet, nodes: str = "abc") -> None:
    measure(fleet, nodes, SETTLED_TOKENS)
    computed, ratio = Counter[str](), 0.0
    while abs(ratio - 1) > 0.1:
        assert computed.total() < MEASURED_TOKENS_MAX, f"{ratio:.3f} by {computed}"
        computed += measure(fleet, nodes, MEASURED_TOKENS)
        ratio = computed[f"@{ADA}"] / computed[f"@{BOB}"]


def test_a_user_on_three_nodes_gets_as_much_as_one_on_one_node(fleet: RunningFleet) -> None:
    with both_users(fleet):
        check_shares(fleet)


@pytest.mark.parametrize("member", ["relay", "daemon"])
def test_a_lost_node_and_its_return_move_no_share(fleet: RunningFleet, member: str) -> None:
    with both_users(fleet), ExitStack() as stack:
        if member == "relay":
            fleet.kill_relay("c")
        else:
            fleet.daemons["c"].kill()
        fleet.until_noted("node c is lost")
        check_shares(fleet, "ab")
        if member == "relay":
            fleet.start_relay("c")
        else:
            fleet.daemons["c"].start_again()
        fleet.until_noted("node c serves")
        stack.callback(Turns(fleet, ADA, {"c": 3}).close)
        check_shares(fleet)


def test_a_new_entry_moves_no_share(fleet: RunningFleet) -> None:
    with both_users(fleet):
        measure(fleet, "abc", SETTLED_TOKENS)
        fleet.kill_entry()
    fleet.start_entry('socket-mode = "0666"\n')
    with both_users(fleet):
        check_shares(fleet)


def test_a_node_that_refuses_to_exchange_tokens_is_named(fleet: RunningFleet) -> None:
    daemon = fleet.daemons["c"]
    config = daemon.directory / "config.toml"
    before = config.read_text()
    for rule in (f'[access.relay]\nusers = [{os.getuid()}]\nallow = ["use", "see-all"]\n', ""):
        config.write_text(before + rule)
        os.kill(daemon.pid, signal.SIGHUP)
        if rule:
            line = fleet.until_noted("node c does not count the tokens of other nodes")
            assert "may not act on behalf of other users" in line
