"""The daemon's own paths: sessions, models, the queue, statistics, and events of them."""

from __future__ import annotations

from .api import INFERD

__all__ = ("INFERD",)
