"""Messages of calls on models by their names: listing, pinning, swapping, adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .base import Map
from .results import ModelInfo


class NameParams(Map):
    """`pin` and `unpin` of a model."""

    name: str
    """The model's name."""


class NamesParams(NameParams):
    """`show` and `unload_model`; `force` unloads a model even while it is in use."""

    force: bool = False
    """Also unload a model in use: its turns end with `Cancelled`, and `data.by` is `operator`;
    no effect on `show`.
    """


class ModelsParams(Map):
    """`models`; with `all_files` also the files of the models directory that are not offered."""

    all_files: bool = False
    """Also return the files of the models directory that are not offered as models."""


class ModelsResult(Map):
    """A map for each model: name, state, file, size_bytes, leases, contexts, …

    `not_offered` has the `file` and the `reason` of each file that is not offered as a model.
    """

    models: list[Annotated[Any, ModelInfo]]
    """One model each."""
    not_offered: list[dict[str, Any]] = []
    """With `all_files`: the `file`, a path below the models directory, and the `reason`; of a
    fleet also the `node`.
    """


class SwapParams(Map):
    """`swap`: the model with the name or file `to` replaces the model behind `name`. With `force`
    it does so even if it generates no text, but sessions of `name` do.
    """

    name: str
    """The name that gets another model."""
    to: str
    """Another model's name, the name of a file in the models directory, or `name` itself."""
    mode: Literal["migrate", "drain"] = "migrate"
    """`migrate`: load it beside the old one, if memory holds both; `drain`: in its place."""
    force: bool = False
    """Swap even if the new model only makes embeddings and sessions of the name generate text."""


class SwapResult(Map):
    """The models' fingerprints and the mode. The previous model's fingerprint is empty if that
    model was not loaded.

    In a fleet, the `nodes` have swapped, and the `unreachable` nodes keep the old model.
    """

    fingerprint: str
    """Fingerprint of the model that now has the name."""
    previous_fingerprint: str = ""
    """Fingerprint of the model that had the name; empty: it was not loaded."""
    mode: str = "migrate"
    """The mode that was used: `migrate` or `drain`."""
    nodes: list[str] = []
    """Only from a [fleet](fleet.md#models): the nodes that have swapped."""
    unreachable: list[str] = []
    """Only from a fleet: nodes that cannot be reached, which keep the old model if they have it."""


class AddAdapterParams(Map):
    """`add_adapter`: add a `file` of the models directory to the model `name`, as `adapter`.

    `scale` is the scale in turns that do not select adapters.
    """

    name: str
    """The model's name."""
    adapter: str
    """The adapter's name."""
    file: str
    """Its file, in the models directory; links cannot lead out of it."""
    scale: float = 0.0
    """Used by turns that select no adapters; 0: they do not use it."""


class AddAdapterResult(Map):
    """Whether the adapter is `loaded`, and thereby checked; `id` identifies its file's contents."""

    loaded: bool = False
    """Whether it is in memory, and therefore checked."""
    id: str = ""
    """A hash of the file."""
    size_bytes: int = 0
    """Its memory."""


class RemoveAdapterParams(Map):
    """`remove_adapter`; with `force` turns that use the adapter fail."""

    name: str
    """The model's name."""
    adapter: str
    """The adapter's name; an unknown one is `NotFound`."""
    force: bool = False
    """Turns that use it fail with `Cancelled`."""
