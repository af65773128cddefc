"""Models by their names: listed, pinned, swapped, their adapters."""

from __future__ import annotations

from typing import Any, Literal

from .base import Map

__all__ = (
    "AddAdapterParams",
    "AddAdapterResult",
    "ModelsResult",
    "NameParams",
    "NamesParams",
    "RemoveAdapterParams",
    "SwapParams",
    "SwapResult",
)


class NamesParams(Map):
    """A call on a model by its name."""

    name: str
    force: bool = False


class NameParams(Map):
    """`pin` and `unpin`: a model by its name."""

    name: str


class ModelsResult(Map):
    """One map a model: name, state, file, size_bytes, leases, contexts, …"""

    models: list[dict[str, Any]]


class SwapParams(Map):
    """`swap`: the model of name or file *to* takes over *name*."""

    name: str
    to: str
    mode: Literal["migrate", "drain"] = "migrate"


class SwapResult(Map):
    """The fingerprints of the model that has the name now, and of the one that had it, if that was
    loaded, and how it was done.
    """

    fingerprint: str
    previous_fingerprint: str = ""
    mode: str = "migrate"


class AddAdapterParams(Map):
    """`add_adapter`: the model `name` gets the adapter in a `file` of the models directory, called
    `adapter`; `scale` holds for turns that choose none.
    """

    name: str
    adapter: str
    file: str
    scale: float = 0.0


class AddAdapterResult(Map):
    """Whether it is in memory: it is checked then; `id` names its file's contents."""

    loaded: bool = False
    id: str = ""
    size_bytes: int = 0


class RemoveAdapterParams(Map):
    """`remove_adapter`; with `force` the turns that use it fail."""

    name: str
    adapter: str
    force: bool = False
