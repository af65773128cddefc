"""Tokens that the nodes compute for each user of each model, and those to report to each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from ....ipc.messages import SERVED_TOKENS_MAX

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
        """Note that a connection to *node* begins."""
        self._nodes[node] = _Node()
        self._forget_unknown()

    def drop_node(self, node: str) -> None:
        """Forget a node that is no longer one of the fleet."""
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
