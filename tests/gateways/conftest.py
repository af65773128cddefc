from __future__ import annotations

from tests.module_daemon import client, daemon

__all__ = ("client", "daemon")
