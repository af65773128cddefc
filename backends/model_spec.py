"""The request to load a model, the part of it that sets the model's size, and the adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .tuning_choice import LoadTuning

ADAPTERS_MAX = 64
"""Adapters per model."""
SCALE_MAX = 100.0
"""Scales are in −100 … 100."""
LANES_MAX = 128
"""The most lanes of a graph. With more threads than that, each lane has several."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to load: its file, and the name by which requests choose it.

    *scale* applies to requests that choose no adapters; 0 turns the adapter off.
    """

    name: str
    path: str
    scale: float = 0.0


class TemplateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The chat template of another name of the model: its source, or else its file, or without both
    the model's; and its form of answers, which is the model's if *tool_format* is None.
    """

    name: str
    source: str = ""
    path: str = ""
    tool_format: str | dict[str, Any] | None = None

    @property
    def is_own(self) -> bool:
        """Whether the template differs from the model's."""
        return bool(self.source or self.path)


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter: *id* is a hash of its file, *size_bytes* the memory that it uses."""

    id: str
    size_bytes: int


def is_scale(value: object) -> bool:
    """Return whether *value*, which may be of any type, is a scale."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -SCALE_MAX <= value <= SCALE_MAX


def adapter_key(adapter_id: str, scale: float) -> str:
    """Return the key of an adapter at a scale. Tasks and KV states with equal sorted keys were
    computed with the same adapters, whatever names these have.
    """
    return f"{adapter_id}*{scale!r}"


def split_key(key: str) -> tuple[str, float]:
    """Return the id and the scale of a key; without one the scale is 1."""
    adapter_id, _, scale = key.partition("*")
    return adapter_id, float(scale or 1)


DEVICE_OPTION, CPU = "device", "cpu"
"""The option of a graph with the device that computes it, and its default."""

LoadProgress = Callable[[float], bool]
"""Called with 0.0 … 1.0 while a model loads; returns False to cancel the load."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model to load, with its model-level parameters.

    `path` names a file, unless `fd` is an open descriptor of one. `slots` sequences can be decoded
    in parallel, each with a context of `ctx_size` tokens (0: as trained, at most
    `CTX_SIZE_DEFAULT_MAX`).
    """

    name: str
    backend: str = "llama"
    path: str = ""
    fd: int = -1
    weights_fd: int = -1
    """An open descriptor of the file with the weights, if `fd` has none."""
    slots: int = 4
    ctx_size: int = 0
    batch_size: int = 512
    logits_per_slot: int = 1
    """The tokens of each slot that can have logits in one step, at the same time in all slots, if
    the batch is large enough. The memory of their logits is part of the model's.
    """
    n_gpu_layers: int = 0
    """Layers on devices other than the CPU; -1 is all, which the daemon reduces to what fits."""
    main_gpu: int = -1
    """The only device that holds these layers; with -1, all devices share them."""
    tensor_split: tuple[float, ...] = ()
    """Each device's share of these layers; if empty, free memory decides."""
    threads: int = 0
    lanes: int = 1
    """The computations of a graph that may be under way at once, which divide its threads."""
    batch_max: int = 1
    """The most rows of several inputs of a graph that are computed together."""
    chat_template: str = ""
    """Replaces the model file's template."""
    chat_template_file: str = ""
    """A file with such a template."""
    templates: tuple[TemplateSpec, ...] = ()
    """The templates of other names of the model."""
    tool_format: str | dict[str, Any] = ""
    """The name of a known form of answers, or a form as data, that replaces the derived one."""
    mmproj: str = ""
    """The file of the projector with which the model reads images and sounds; "" if it has none."""
    draft_model: str = ""
    """The file of a second, smaller model with the same vocabulary, which drafts; "" if none."""
    nextn: bool = False
    """Whether its NextN layers are loaded, which draft."""
    options: dict[str, Any] = {}
    adapters: tuple[AdapterSpec, ...] = ()
    """Loaded after the model."""
    tuning: LoadTuning | None = None
    """Decides on the settings that are not configured; None stands for an unknown CPU."""

    @property
    def lane_threads(self) -> int:
        """The threads of each computation of a graph."""
        return max(1, self.threads // self.lanes)


class Shape(msgspec.Struct, frozen=True):
    """The part of a `ModelSpec` that sets the model's size."""

    slots: int
    ctx_size: int
    batch_size: int
    n_gpu_layers: int = 0

    def apply_to(self, spec: ModelSpec) -> ModelSpec:
        """Return *spec* with this shape."""
        return msgspec.structs.replace(spec, **msgspec.structs.asdict(self))


def device_of(spec: ModelSpec) -> str:
    """Return the device that computes the graph of *spec*."""
    return str(spec.options.get(DEVICE_OPTION, CPU))
