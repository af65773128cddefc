"""The rows of calls as an entry uses them, also those of calls that it does not know."""

from __future__ import annotations

from collections.abc import Collection

from ....ipc.messages import CALLS, Call, Map
from ....ipc.messages.calls import HANDLES, derived_route


def row_of(call: str, params: Collection[str]) -> Call | None:
    """Return the row of a call; None for one that the entry can send nowhere.

    A call that is not in the protocol's table, of a newer client, is routed by its fields. Handles
    in its results are expected under the names of known ones.
    """
    known = CALLS.get(call)
    if known is not None:
        return known
    route = derived_route(params, ())
    if route is None:
        return None
    return Call(
        Map, Map, right=None, route=route, handles_in_result=HANDLES, handles_in_events=HANDLES
    )
