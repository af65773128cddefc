"""The distinction between a caller's own turns and sessions, and others of the same user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..callers.caller import Caller


def is_own(caller: Caller, entry: Mapping[str, Any]) -> bool:
    """Return whether a turn or session that the daemon lists for the caller is the caller's own.

    To a caller without a label, the daemon also lists those of all labels of its user, which belong
    to other callers.
    """
    return bool(entry["label"] == caller.user.label)
