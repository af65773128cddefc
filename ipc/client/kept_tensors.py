"""Outputs of a graph that stay in the daemon, at the client's end."""

from __future__ import annotations

from collections import deque

from ...backends.tensors import shape_text
from .. import messages as w


class TensorReference:
    """A tensor whose bytes are not sent with a call."""

    def as_input(self) -> w.Tensor:
        """Return it in the form of the protocol."""
        raise NotImplementedError


class KeptTensor(TensorReference):
    """An output that stays in the daemon, from a run with *keep*. It is a value for an input of a
    later run of the graph.

    It is freed by a run after the last reference to it has gone, by `free` of its graph, and when
    the graph is closed or its connection is lost.
    """

    def __init__(self, tensor: w.Tensor, type_name: str, unused: deque[int]):
        self.handle = tensor.kept
        self.shape = tuple(tensor.dimensions)
        self.type = type_name
        self._unused = unused

    def __repr__(self) -> str:
        return f"<KeptTensor {self.type} {shape_text(self.shape)}>"

    def __del__(self) -> None:
        self._unused.append(self.handle)  # at once, and safe in any thread

    def as_input(self) -> w.Tensor:
        """Return it in the form of the protocol."""
        return w.Tensor(kept=self.handle)
