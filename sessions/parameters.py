"""A session's parameters: those of its graph, its own, and those of its turn."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from ..backends import SamplingParams
from ..backends.params import Options, read_options, sampling_params
from ..scheduler.messages import TaskSpec

__all__ = ("NO_SAMPLING", "Parameters")

NO_SAMPLING = SamplingParams()
"""Stands in a spec until `Parameters.fill`."""


class Parameters:
    """Owned by its session. `defaults` are its graph's, `options` hold for the session, `ignored`
    and `not_applied` are what was asked for and does not; `seed` is that of the last turn.
    """

    def __init__(self, defaults: Mapping[str, Any]):
        self.options = dict(defaults)
        self.ignored: list[str] = []
        self.not_applied: dict[str, Any] = {}
        self.seed = 0
        self.defaults = dict(defaults)
        self._turn: dict[str, Any] = {}

    def copy(self) -> Parameters:
        """Return the same parameters, for another session."""
        new = Parameters(self.defaults)
        new.options, new.ignored = dict(self.options), list(self.ignored)
        new.not_applied = dict(self.not_applied)
        return new

    def apply(self, options: Options) -> None:
        """Let parameters that were read hold; note what does not."""
        model = options.level("model")
        self.options |= {k: v for k, v in options.values.items() if k not in model}
        self.not_applied |= {k: v for k, v in model.items() if self.defaults.get(k) != v}
        self.ignored = sorted({*self.ignored, *options.ignored})

    def begin_turn(self, options: Mapping[str, Any]) -> None:
        """Let *options* hold for one turn, and draw its seed.

        :raises InvalidArgument: a key is unknown, or a value out of its range.
        """
        self._turn = read_options(options, strict=True).values
        seed = (self.options | self._turn).get("seed", -1)
        self.seed = secrets.randbits(32) if seed == -1 else seed

    def fill(self, spec: TaskSpec) -> TaskSpec:
        """Return *spec* with the parameters in force: the session's, then the turn's own."""
        values = self.options | self._turn
        if values.get("seed", -1) != -1:
            self.seed = values["seed"]
        return msgspec.structs.replace(
            spec,
            sampling=sampling_params(values, self.seed),
            n_predict=values.get("n-predict", -1),
            ctx_size=values.get("ctx-size", 0),
            stop=tuple(values.get("stop", ())),
            reverse_prompt=tuple(values.get("reverse-prompt", ())),
            ctx_shift=values.get("ctx-shift", False),
            n_keep=values.get("n-keep", 0),
            n_discard=values.get("n-discard", 0),
            cache_reuse=values.get("cache-reuse", 0),
        )
