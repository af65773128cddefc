"""The names of the priority classes, the lowest first; `scheduler.owner` has their order."""

from __future__ import annotations

from typing import Literal, TypeAlias

Priority: TypeAlias = Literal["low", "normal", "high", "urgent"]
