"""Handles of graphs and contexts: numbers with the properties that the daemon returned."""

from __future__ import annotations

from typing import Any, Self

from .messages import ContextResult, GraphResult


class Graph(int):
    """A graph's handle, with the model's properties.

    `special_tokens` has by name the `id` and `text` of each token. `not_applied` has the values in
    force where the configuration requested others. `ignored` lists the keys that the daemon does
    not know. `adjusted` has the values that were out of their range. `tensors`: whether the model
    computes tensors.
    """

    model: str
    fingerprint: str
    ctx_size: int
    slots: int
    special_tokens: dict[str, Any]
    not_applied: dict[str, Any]
    ignored: list[str]
    adjusted: dict[str, str]
    tensors: bool

    @classmethod
    def from_result(cls, result: GraphResult) -> Self:
        """Return the handle in a load call's result."""
        self = cls(result.graph)
        self.model, self.fingerprint = result.model, result.fingerprint
        self.ctx_size, self.slots = result.ctx_size, result.slots
        self.special_tokens = result.special_tokens
        self.not_applied, self.ignored = result.not_applied, result.ignored
        self.adjusted, self.tensors = result.adjusted, result.tensors
        return self


class Context(int):
    """An execution context's handle. `attached` is true if the session existed before, with its
    history.
    """

    attached: bool

    @classmethod
    def from_result(cls, result: ContextResult) -> Self:
        """Return the handle in an init call's result."""
        self = cls(result.context)
        self.attached = result.attached
        return self
