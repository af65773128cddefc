"""`inferd top`: what the daemon does right now, on a screen or as plain tables.

`view` is pure, `source` asks the daemon, `screen` needs textual and is imported by `command` alone.
"""

from __future__ import annotations

from .command import add_to

__all__ = ("add_to",)
