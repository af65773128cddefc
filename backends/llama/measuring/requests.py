"""The requests to the process that measures a model, and its replies. This module loads no engine.

Each request has one reply, which is a `Failed` if an error occurred.
"""

from __future__ import annotations

import msgspec

from ...errors import ErrorFields
from ...model_spec import ModelSpec
from ...tuning_choice import ModelShape, Probe, Setting

PROGRAM = "inferd.backends.llama.measuring.program"


class Variant(Setting, frozen=True):
    """A setting with types of KV states."""

    cache_type_k: str = "f16"
    cache_type_v: str = "f16"

    @property
    def setting(self) -> Setting:
        """The setting without the types of KV states."""
        return Setting(self.flash_attn, self.threads, self.threads_batch, self.ubatch)


class OpenModel(msgspec.Struct, frozen=True, tag=True):
    """Load the weights of a model if it fits into *free_bytes* with its probes."""

    spec: ModelSpec
    free_bytes: int


class RunProbe(msgspec.Struct, frozen=True, tag=True):
    """Time one step, unless that takes until *deadline* (`time.monotonic`)."""

    probe: Probe
    variant: Variant
    deadline: float


class MeasureLoss(msgspec.Struct, frozen=True, tag=True):
    """Compare the logits of a fixed text with types of KV states to those with f16, until
    *deadline*. The types are pairs of those of keys and of values.
    """

    types: list[tuple[str, str]]
    deadline: float


class CloseContexts(msgspec.Struct, frozen=True, tag=True):
    """Free all contexts."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The model's shape, the probes that it can run, and the types that its KV states can have."""

    shape: ModelShape
    probes: list[Probe]
    cache_types: list[str]
    ctx_size: int


class Timed(msgspec.Struct, frozen=True, tag=True):
    """The seconds of a step; None if the deadline passed before."""

    seconds: float | None


class KvLoss(msgspec.Struct, frozen=True):
    """The difference that a type of KV states makes, as means over the tokens of a text."""

    divergence: float
    """Kullback-Leibler divergence of the probabilities from those with f16, in nats."""
    divergence_error: float
    """The standard error of this mean."""
    other_top: float
    """The share of tokens after which another token is the most probable one."""
    tokens: int


class Losses(msgspec.Struct, frozen=True, tag=True):
    """The losses in the order of the requested types; empty if the deadline passed first."""

    losses: list[KvLoss]


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The contexts are freed."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An error."""

    error: ErrorFields


Request = OpenModel | RunProbe | MeasureLoss | CloseContexts
Reply = Opened | Timed | Losses | Closed | Failed
