from __future__ import annotations

from tests.module_daemon import daemon

__all__ = ("daemon",)
