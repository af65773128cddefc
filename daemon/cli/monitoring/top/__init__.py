"""`inferd top`: the daemon's current activity, on a screen or as plain tables.

`view` is pure. `source` queries the daemon. `screen` needs textual; only `command` imports it.
"""

from __future__ import annotations

from .command import top

__all__ = ("top",)
