"""The places between the turns of a history, to which a session can be rewound."""

from __future__ import annotations

from ....ipc.client import HistoryResult
from ..fields.table import field_error


def boundaries_of(history: HistoryResult) -> list[int]:
    """Return the numbers of messages that a session can keep, including the number of all."""
    return sorted({*history.turns, len(history.messages)})


def turns_after(history: HistoryResult, messages: int) -> int:
    """Return the number of turns to remove, so that a history keeps its first *messages*.

    :raises InvalidArgument: the cut after *messages* is not between two turns.
    """
    if messages == len(history.messages):
        return 0
    for back, before in enumerate(reversed(history.turns), 1):
        if before == messages:
            return back
    kept = ", ".join(map(str, boundaries_of(history)))
    raise field_error(
        "messages",
        f"messages: a history of {len(history.messages)} cannot be cut after {messages}",
        hint=f"it can keep {kept[:200]}",
    )
