"""Handles of graphs and contexts: numbers that also say what they stand for."""

from __future__ import annotations

from typing import Any, Self

from .messages import ContextResult, GraphResult

__all__ = ("Context", "Graph")


class Graph(int):
    """A graph's handle, and what the daemon said of it.

    `not_applied` holds the values in force where the configuration asked for others; `ignored`
    the keys that the daemon does not know.
    """

    model: str
    fingerprint: str
    ctx_size: int
    slots: int
    not_applied: dict[str, Any]
    ignored: list[str]

    @classmethod
    def from_result(cls, result: GraphResult) -> Self:
        """Make a handle of what a load call answered."""
        self = cls(result.graph)
        self.model, self.fingerprint = result.model, result.fingerprint
        self.ctx_size, self.slots = result.ctx_size, result.slots
        self.not_applied, self.ignored = result.not_applied, result.ignored
        return self


class Context(int):
    """An execution context's handle. `attached`: it was there before, with its history."""

    attached: bool

    @classmethod
    def from_result(cls, result: ContextResult) -> Self:
        """Make a handle of what an init call answered."""
        self = cls(result.context)
        self.attached = result.attached
        return self
