"""Messages of calls on models by their names: listing, pinning, swapping, adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .base import Map
from .results import ModelInfo


class NameParams(Map):
    """`pin` and `unpin` of a model."""

    name: str


class NamesParams(NameParams):
    """`show` and `unload_model`; `force` unloads a model even while it is in use."""

    force: bool = False


class ModelsParams(Map):
    """`models`; with `all_files` also the files of the models directory that are not offered."""

    all_files: bool = False


class ModelsResult(Map):
    """A map for each model: name, state, file, size_bytes, leases, contexts, …

    `not_offered` has the `file` and the `reason` of each file that is not offered as a model.
    """

    models: list[Annotated[Any, ModelInfo]]
    not_offered: list[dict[str, Any]] = []


class SwapParams(Map):
    """`swap`: the model with the name or file `to` replaces the model behind `name`. With `force`
    it does so even if it generates no text, but sessions of `name` do.
    """

    name: str
    to: str
    mode: Literal["migrate", "drain"] = "migrate"
    force: bool = False


class SwapResult(Map):
    """The models' fingerprints and the mode. The previous model's fingerprint is empty if that
    model was not loaded.

    In a fleet, the `nodes` have swapped, and the `unreachable` nodes keep the old model.
    """

    fingerprint: str
    previous_fingerprint: str = ""
    mode: str = "migrate"
    nodes: list[str] = []
    unreachable: list[str] = []


class AddAdapterParams(Map):
    """`add_adapter`: add a `file` of the models directory to the model `name`, as `adapter`.

    `scale` is the scale in turns that do not select adapters.
    """

    name: str
    adapter: str
    file: str
    scale: float = 0.0


class AddAdapterResult(Map):
    """Whether the adapter is `loaded`, and thereby checked; `id` identifies its file's contents."""

    loaded: bool = False
    id: str = ""
    size_bytes: int = 0


class RemoveAdapterParams(Map):
    """`remove_adapter`; with `force` turns that use the adapter fail."""

    name: str
    adapter: str
    force: bool = False
