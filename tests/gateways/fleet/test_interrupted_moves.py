"""Interrupted moves of sessions, with the answers of nodes in a fixed order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from inferd.backends.errors import ConnectionLost, InferdError
from inferd.gateways.fleet.config import read_config
from inferd.gateways.fleet.nodes.moves import ARRIVING, DEPARTED, Listed, Moves, key_of
from inferd.gateways.fleet.nodes.nodes import Nodes
from inferd.gateways.fleet.nodes.upstream import NodeConnections
from inferd.gateways.fleet.routing.homes import HOMES_MAX, NodeTable, SessionKey
from inferd.gateways.fleet.routing.loads import ModelLoad, NodeLoad
from inferd.ipc.messages import PROTOCOL_VERSION, ClientHello
from tests.gateways.fleet.members import certificates

pytestmark = pytest.mark.asyncio
SESSION: dict[str, Any] = {
    "session_id": "s",
    "user": "@ada",
    "on_behalf_of": "@ada",
    "label": "",
    "uid": 7,
    "model": "m",
    "priority": "normal",
    "state": "dormant",
    "transfer": None,
}


class Node:
    """A node that has one session at most. It is lost after it has carried out *lost_after*.

    *keeps_at* is the number of lists after which it carries out a `keep` that is under way.
    """

    def __init__(self, state: str | None = None, lost_after: str = "", keeps_at: int = 0):
        self.state, self.lost_after, self.keeps_at = state, lost_after, keeps_at
        self.fails_at = self.hangs_at = ""
        self.transfer: dict[str, str] | None = None
        self.dropped = anyio.Event()

    async def call(self, call: str, params: dict[str, msgspec.Raw]) -> msgspec.Raw:
        if call == self.fails_at:
            raise ConnectionLost(f"{call} has failed")
        if call == self.hangs_at:
            await anyio.sleep_forever()
        given = {name: msgspec.msgpack.decode(raw) for name, raw in params.items()}
        result = self._carry_out(call, given)
        if given.get("outcome") == self.lost_after:
            self.lost_after = ""
            raise ConnectionLost("the node was lost after it had done this")
        return msgspec.Raw(msgspec.msgpack.encode(result))

    def _carry_out(self, call: str, given: dict[str, Any]) -> dict[str, Any]:
        transfer = {"id": given.get("transfer", ""), "peer": given.get("peer", "")}
        if call == "sessions":
            found = {**SESSION, "state": self.state, "transfer": self.transfer}
            self.keeps_at -= 1
            if self.keeps_at == 0:
                self.state = "dormant"
            return {"sessions": [found] if found["state"] else []}
        if call == "export_session":
            self.transfer = transfer
            return {"data": b"history", "size": 7, "on_behalf_of": "@ada"}
        if call == "import_session":
            self.state, self.transfer = ARRIVING, transfer
            return {"size": 7}
        if given["outcome"] == "release":
            self.state = DEPARTED
        elif given["outcome"] == "keep":
            self.state, self.transfer = "dormant", None
        else:
            self.state, self.transfer = None, None
            self.dropped.set()
        return {}


class Operator(NodeConnections):
    """Connections to *peers*."""

    peers: dict[str, Node]

    def upstream(self, node: str) -> Any:
        return self.peers[node]


def two_nodes(folder: Path) -> Nodes:
    """Return nodes `a` and `b`, which have reported."""
    certificates(folder / "keys")
    file = folder / "fleet.toml"
    addresses = "".join(f'[nodes.{name}]\naddress = "127.0.0.1:1"\n' for name in "ab")
    file.write_text(f'certificates = "keys"\nstate-dir = "state"\n{addresses}')
    nodes = Nodes(read_config(file), lambda _: None, lambda _: None)
    for link in nodes.links.values():
        link.load = NodeLoad(instance=1, models={"m": ModelLoad(loaded=True, slots=1)})
    return nodes


async def ignore(listed: Listed) -> None:
    """Do nothing with the sessions of the nodes."""


@pytest.mark.parametrize("lost_after", ["keep", "release"])
async def test_a_session_can_be_opened_once_its_interrupted_move_has_ended(
    tmp_path: Path, lost_after: str
) -> None:
    nodes, homes, key = two_nodes(tmp_path), NodeTable[SessionKey](HOMES_MAX), key_of(SESSION)
    homes.put(key, "a")
    peers = {
        "a": Node("dormant", lost_after if lost_after == "release" else ""),
        "b": Node(None, lost_after if lost_after == "keep" else ""),
    }
    async with anyio.create_task_group() as group:
        operator = Operator(nodes, ClientHello(protocol=PROTOCOL_VERSION), group)
        operator.peers = peers
        moves = Moves(nodes, homes, operator, lambda _: None)
        await group.start(moves.run, ignore)
        with pytest.raises(InferdError, match="lost after"):
            await moves.move_session("a", SESSION)
        assert moves.interrupted == 1
        moves.note_found()
        await moves.wait_settled(key)
        assert moves.interrupted == 0
        assert homes.find(key) != "a", "the next opening looks for it"
        assert (peers["a"].state, peers["b"].state) == (None, "dormant")
        group.cancel_scope.cancel()


@pytest.mark.parametrize("lost", ["export_session", "import_session"])
async def test_a_target_drops_what_a_failed_move_has_sent_to_it(tmp_path: Path, lost: str) -> None:
    nodes, homes = two_nodes(tmp_path), NodeTable[SessionKey](HOMES_MAX)
    homes.put(key_of(SESSION), "a")
    peers = {"a": Node("dormant"), "b": Node()}
    peers["a" if lost == "export_session" else "b"].fails_at = lost
    async with anyio.create_task_group() as group:
        operator = Operator(nodes, ClientHello(protocol=PROTOCOL_VERSION), group)
        operator.peers = peers
        moves = Moves(nodes, homes, operator, lambda _: None)
        with pytest.raises(InferdError, match="failed"):
            await moves.move_session("a", SESSION)
        assert peers["b"].dropped.is_set()
        assert (peers["a"].state, peers["a"].transfer) == ("dormant", None), "its hold has ended"
        assert homes.find(key_of(SESSION)) == "a"
        group.cancel_scope.cancel()


async def test_a_target_drops_what_a_move_without_time_has_sent_to_it(tmp_path: Path) -> None:
    nodes, homes = two_nodes(tmp_path), NodeTable[SessionKey](HOMES_MAX)
    homes.put(key_of(SESSION), "a")
    async with anyio.create_task_group() as group:
        operator = Operator(nodes, ClientHello(protocol=PROTOCOL_VERSION), group)
        operator.peers = {"a": Node("dormant"), "b": Node()}
        operator.peers["b"].hangs_at = "import_session"
        moves = Moves(nodes, homes, operator, lambda _: None)
        await group.start(moves.run, ignore)
        with pytest.raises(InferdError, match="too long"):
            await moves.move_session("a", SESSION, copy_s_max=0.01)
        await operator.peers["b"].dropped.wait()
        group.cancel_scope.cancel()


async def test_a_departure_is_forgotten_though_the_arrival_was_being_kept_when_the_nodes_were_asked(
    tmp_path: Path,
) -> None:
    """An entry was killed before the answer to `keep`, which the node was still writing down when
    the next entry asked for its sessions: the arrival no longer has a transfer, but its state.
    """
    nodes, homes, key = two_nodes(tmp_path), NodeTable[SessionKey](HOMES_MAX), key_of(SESSION)
    peers = {"a": Node(DEPARTED), "b": Node(ARRIVING, keeps_at=1)}
    peers["a"].transfer = {"id": "t", "peer": "b"}
    async with anyio.create_task_group() as group:
        operator = Operator(nodes, ClientHello(protocol=PROTOCOL_VERSION), group)
        operator.peers = peers
        moves = Moves(nodes, homes, operator, lambda _: None)
        await group.start(moves.run, ignore)
        with anyio.fail_after(60):
            await peers["a"].dropped.wait()
        assert peers["b"].state == "dormant"
        assert moves.is_settled(key)
        group.cancel_scope.cancel()


async def test_a_departure_is_forgotten_though_a_copy_was_made_when_the_nodes_were_asked(
    tmp_path: Path,
) -> None:
    nodes, homes, key = two_nodes(tmp_path), NodeTable[SessionKey](HOMES_MAX), key_of(SESSION)
    peers = {"a": Node(DEPARTED), "b": Node("dormant")}
    peers["a"].transfer = {"id": "t", "peer": "b"}
    async with anyio.create_task_group() as group:
        operator = Operator(nodes, ClientHello(protocol=PROTOCOL_VERSION), group)
        operator.peers = peers
        moves = Moves(nodes, homes, operator, lambda _: None)
        with moves.moving(key):
            await group.start(moves.run, ignore)
            assert peers["a"].state == DEPARTED
        with anyio.fail_after(60):
            await peers["a"].dropped.wait()
        group.cancel_scope.cancel()
