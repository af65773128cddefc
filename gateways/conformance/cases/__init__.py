"""The cases, in one module for each part of the protocol page. Importing a module registers its
cases.
"""

from . import (
    cancellation,
    compatibility,
    contexts,
    errors,
    exchanges,
    frames,
    greeting,
    handles,
    limits,
    malformed,
    media,
    streams,
    tensors,
    turns,
)

__all__ = (
    "greeting",
    "frames",
    "malformed",
    "compatibility",
    "handles",
    "contexts",
    "tensors",
    "turns",
    "media",
    "streams",
    "cancellation",
    "limits",
    "errors",
    "exchanges",
)
