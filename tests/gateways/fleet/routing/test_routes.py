"""Calls that an entry does not know are routed by their fields."""

from __future__ import annotations

from inferd.gateways.fleet.routing.calls import row_of
from inferd.ipc.messages import CALLS, Route
from inferd.ipc.messages.calls import HANDLES


def test_a_call_of_a_newer_client_is_routed_by_its_fields() -> None:
    later = row_of("later", {"context", "more"})
    assert later is not None and later.route is Route.CONTEXT
    assert later.handles_in_result == later.handles_in_events == HANDLES
    on_graph = row_of("later", {"graph"})
    assert on_graph is not None and on_graph.route is Route.GRAPH
    assert row_of("later", {"name"}) is None


def test_a_known_call_has_its_row() -> None:
    assert row_of("chat", ()) is CALLS["chat"]
