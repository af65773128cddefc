"""Fair shares of users over a fleet: tokens that a node computes count on all other nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeAlias

import anyio
import anyio.abc
import msgspec

from ....backends.errors import InferdError
from ....ipc.messages import SERVED_TOKENS_MAX, ExchangeServedResult
from ..frames import raw_of
from ..link import REPORT_S
from .nodes import Nodes
from .upstream import NodeConnections, Upstream

KEYS_MAX = 4096
"""Pairs of a model and a user that are remembered of a node: those reported last."""
ByModel: TypeAlias = Mapping[str, Mapping[str, int]]
"""Tokens by model and user."""
_Key: TypeAlias = tuple[str, str]


class _Node:
    """A node since the connection to it began."""

    def __init__(self) -> None:
        self.totals: dict[_Key, int] = {}
        """Its last totals, the most recently reported last."""
        self.counted = Counter[_Key]()
        """Tokens of this node that were counted for the other nodes."""
        self.sent: dict[_Key, int] = {}
        """Tokens of the other nodes that were sent to it, or preceded its report of the user."""


class ServedTotals:
    """Owned by the entry's event loop.

    A total is what a node's worker has computed for a user since its start. The first total on a
    connection is only a baseline, so that neither a new entry nor a returned node counts old
    tokens. A node gets only the tokens of the other nodes, for the users that it has itself
    reported.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._all = Counter[_Key]()
        """Tokens of all nodes. They stay when a node is lost, so that no sum decreases."""

    @property
    def keys(self) -> int:
        """The number of pairs of which there are sums."""
        return len(self._all)

    def begin_node(self, node: str) -> None:
        self._nodes[node] = _Node()
        self._forget_unknown()

    def drop_node(self, node: str) -> None:
        self._nodes.pop(node, None)
        self._forget_unknown()

    def note_totals(self, node: str, served: ByModel) -> None:
        """Note totals of a node. One below the previous total began again at zero."""
        it = self._nodes[node]
        for key, total in _flat(served).items():
            if key in it.totals:
                before = it.totals.pop(key)  # so that it is the latest
                grown = total - before if total >= before else total
                it.counted[key] += grown
                self._all[key] += grown
            else:
                it.sent[key] = self._all[key]
            it.totals[key] = total
        if len(it.totals) > KEYS_MAX:
            for key in list(it.totals)[:-KEYS_MAX]:
                del it.totals[key], it.sent[key], it.counted[key]
            self._forget_unknown()

    def take_elsewhere(self, node: str) -> dict[str, dict[str, int]]:
        """Return the tokens that other nodes have computed since the last call for this node."""
        it, found = self._nodes[node], dict[str, dict[str, int]]()
        for key, sent in it.sent.items():
            elsewhere = self._all[key] - it.counted[key]
            if elsewhere > sent:
                it.sent[key] = elsewhere
                found.setdefault(key[0], {})[key[1]] = min(elsewhere - sent, SERVED_TOKENS_MAX)
        return found

    def _forget_unknown(self) -> None:
        """Drop the sums for pairs that no node has in its totals."""
        known = {key for node in self._nodes.values() for key in node.totals}
        self._all = Counter({key: n for key, n in self._all.items() if key in known})


def _flat(served: ByModel) -> dict[_Key, int]:
    return {(model, user): n for model, users in served.items() for user, n in users.items()}


_result = msgspec.msgpack.Decoder(ExchangeServedResult)


class FairShare:
    """Calls each node every `REPORT_S`, one call at a time, so that a token counts on the other
    nodes after at most two intervals. Lives on the entry's event loop. *note* prints what an
    operator should know.
    """

    def __init__(self, nodes: Nodes, operator: NodeConnections, note: Callable[[str], object]):
        self._nodes, self._operator, self._note = nodes, operator, note
        self._totals = ServedTotals()
        self._upstreams: dict[str, Upstream] = {}
        self._called: set[str] = set()
        """Nodes that have not answered yet."""
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Exchange tokens until cancelled."""
        async with anyio.create_task_group() as group:
            while True:
                nodes = self._nodes
                for node in self._upstreams.keys() - nodes.links.keys():
                    del self._upstreams[node]
                    self._failing.discard(node)
                    self._totals.drop_node(node)
                for node in nodes.links:
                    if nodes.is_reachable(node) and node not in self._called:
                        self._called.add(node)
                        group.start_soon(self._call_node, node)
                await anyio.sleep(REPORT_S)

    async def _call_node(self, node: str) -> None:
        """Exchange tokens with a node. Those of a call that fails are not sent again, because they
        are the tokens of one interval only.
        """
        try:
            upstream = self._operator.upstream(node)
            if self._upstreams.get(node) is not upstream:
                self._upstreams[node] = upstream
                self._totals.begin_node(node)
                self._failing.discard(node)
            elsewhere = self._totals.take_elsewhere(node)
            raw = await upstream.call("exchange_served", {"elsewhere": raw_of(elsewhere)})
            served = _result.decode(raw).served
            if self._upstreams.get(node) is upstream:
                self._totals.note_totals(node, served)
                self._failing.discard(node)
        except (InferdError, msgspec.DecodeError) as exc:
            self._note_failure(node, str(exc))
        finally:
            self._called.discard(node)

    def _note_failure(self, node: str, cause: str) -> None:
        """Print the first failure in a row of a node that is not lost."""
        upstream = self._upstreams.get(node)
        if upstream is not None and upstream.lost is None and node not in self._failing:
            self._failing.add(node)
            self._note(f"node {node} does not count the tokens of other nodes: {cause}")
