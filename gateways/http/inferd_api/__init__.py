"""The daemon's own paths: sessions, models, the queue, statistics, and their events."""

from __future__ import annotations

from .api import INFERD

__all__ = ("INFERD",)
