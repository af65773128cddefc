"""The memory that a load of a model takes on a node, compared with the memory that it has."""

from __future__ import annotations

from .loads import ModelLoad, NodeLoad


def fits(node: NodeLoad, load: ModelLoad) -> bool:
    """Return whether a node has memory for a model, if idle models are unloaded for it. A loaded
    model fits, and so does one of which nothing is known.
    """
    return _missing_bytes(node, load) <= node.evictable_bytes


def evicts_others(node: NodeLoad, load: ModelLoad) -> bool:
    """Return whether other models have to be unloaded for a load of a model."""
    return _missing_bytes(node, load) > 0


def _missing_bytes(node: NodeLoad, load: ModelLoad) -> int:
    """Return the bytes that a load needs beyond the free ones; if it needs none, 0 or less."""
    if load.loaded or load.need_bytes is None or node.free_bytes is None:
        return 0
    return load.need_bytes - node.free_bytes
