"""Ids and names of sessions."""

from __future__ import annotations

from ..backends.errors import (
    InvalidArgument,
)
from ..scheduler.owner import Owner

SESSION_ID_CHARACTERS_MAX = 128


def check_id(session_id: str, what: str = "a session id") -> None:
    """Check the length of an id.

    :raises InvalidArgument: it is empty or too long.
    """
    if not 0 < len(session_id) <= SESSION_ID_CHARACTERS_MAX:
        raise InvalidArgument(
            f"{what} of {len(session_id)} characters",
            hint=f"use 1 to {SESSION_ID_CHARACTERS_MAX}",
        )


SessionKey = tuple[Owner, str]
"""A session's owner and id."""


def name_of_id(label: str, session_id: str) -> str:
    """Return the engine's name for a session with an id. A label has no slash."""
    return f"label:{label}/{session_id}" if label else f"id:{session_id}"
