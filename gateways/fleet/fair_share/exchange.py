"""The calls by which the entry reports to each node the tokens that the other nodes compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from ....backends.errors import InferdError
from ....ipc.messages import ExchangeServedResult
from ..calls.frames import raw_of
from ..entry.clients.client import FleetClient
from ..entry.clients.upstream import Upstream
from ..entry.nodes.nodes import Nodes
from ..link import REPORT_S
from .served_totals import ServedTotals

_result = msgspec.msgpack.Decoder(ExchangeServedResult)


class ExchangingEntry(Protocol):
    """The part of the entry that exchanges tokens."""

    nodes: Nodes

    @property
    def operator(self) -> FleetClient:
        """The client that acts on the nodes as the relay's user."""


class FairShare:
    """Calls each node every `REPORT_S`, one call at a time, so that a token counts on the other
    nodes after at most two intervals. Lives on the entry's event loop. *note* prints what an
    operator should know.
    """

    def __init__(self, entry: ExchangingEntry, note: Callable[[str], object]):
        self._entry, self._note = entry, note
        self._totals = ServedTotals()
        self._upstreams: dict[str, Upstream] = {}
        self._called: set[str] = set()
        """Nodes that have not answered yet."""
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Exchange tokens until cancelled."""
        async with anyio.create_task_group() as group:
            while True:
                nodes = self._entry.nodes
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
            upstream = self._entry.operator.upstream(node)
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
