"""Probes: steps of a known kind, with which the speed of a model's settings is measured.

This module loads no engine. The decision from the samples is in `scheduler/policy/tuning.py`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

DEEP_TOKENS = 1500
"""The tokens before those of a deep probe."""


class Probe(msgspec.Struct, frozen=True):
    """A step in which each of *sequences* has *tokens* tokens behind *depth* others."""

    name: str
    sequences: int
    tokens: int
    depth: int


PROBES = (
    Probe("decode-1", 1, 1, 0),
    Probe("decode-4", 4, 1, 0),
    Probe("decode-16", 16, 1, 0),
    Probe("prompt", 1, 256, 0),
    Probe("deep-1", 1, 1, DEEP_TOKENS),
    Probe("deep-4", 4, 1, DEEP_TOKENS),
    Probe("deep-16", 16, 1, DEEP_TOKENS),
    Probe("deep-step", 1, 16, DEEP_TOKENS),
)
"""All probes; the deep ones, which need a context of their own, are last. A runner may lack those
with more sequences than the model has slots, and deep ones of several sequences, whose KV states
take much memory; `scheduler/policy/tuning.py` estimates their times from the others.
"""


class Setting(msgspec.Struct, frozen=True):
    """A way to compute: flash attention, the numbers of threads for steps of one token and of
    several, and the tokens of a micro-batch. 0 threads stands for as many as the model may use, 0
    threads-batch for `threads`, and a micro-batch of 0 for the size that suits the attention.
    """

    flash_attn: bool
    threads: int = 0
    threads_batch: int = 0
    ubatch: int = 0


class Sample(msgspec.Struct, frozen=True):
    """The *seconds* that the probe of that name took with a setting."""

    setting: Setting
    probe: str
    seconds: float


class ProbeRunner(Protocol):
    """Runs probes in contexts of its own over the weights of a loaded model.

    Owned by the engine's thread, in which all calls happen except `abort`.
    """

    probes: tuple[Probe, ...]
    """The probes that it can run."""

    def advance(self, probe: Probe, setting: Setting) -> float | None:
        """Do the next piece of work for *probe* with *setting*: prepare it, and return None; or
        compute it, and return its seconds. A piece that was aborted returns None, too, and the
        next call repeats it.

        :raises OutOfMemory: a context does not fit in memory.
        """

    def abort(self) -> None:
        """End the present piece within a node of the graph. Called by another thread; it has no
        effect between two pieces.
        """

    def close(self) -> None:
        """Free the contexts; a second call does nothing."""
