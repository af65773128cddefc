"""Values out of their range in the JSON of wasi-nn calls, replaced by values that are used instead.

Guests cannot read the message of an error, and other runtimes accept these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...texts.shorten import plain_number, shorten
from ..fitting import as_whole
from ..parameter_table import Parameter

UNTIL_FULL = "-2 means until the context is full: -1 is used, without ctx-shift"
"""The reason that is reported for an `n-predict` of -2, which also turns `ctx-shift` off."""
CONFIGURED = object()
"""Stands for the value that a parameter has without the request."""


class Sentinel(NamedTuple):
    """A value with a meaning of its own in another runtime, and the value that is *used* for it."""

    value: int
    used: Any
    reason: str


SENTINELS = {
    "n-predict": Sentinel(-2, -1, UNTIL_FULL),
    "n-gpu-layers": Sentinel(-2, -1, "-2 means all layers: -1 is used, as many as fit"),
}
"""By parameter, the sentinel of llama.cpp or Ollama that is out of its range."""
DEFAULT_SENTINEL = Sentinel(-1, CONFIGURED, "-1 means the configured default")
"""That of each other number in wasi_nn_backend, and of some in llama.cpp. Where -1 is within a
parameter's range, it has the meaning in the parameter's description.
"""
REASONS_MAX = 4
"""Changed numbers within one value that its reason names."""
SEEDS = 1 << 32
"""The number of seeds that the samplers have."""
_CACHE_TYPES: dict[int | str, str] = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1"},
    **{8: "q8_0", 20: "iq4_nl", 30: "bf16"},
}
_OTHER_NAMES: dict[str, dict[int | str, str]] = {
    "cache-type-k": _CACHE_TYPES,
    "cache-type-v": _CACHE_TYPES,
    "flash-attn": {"enabled": "on", "disabled": "off"},
    "numa": {0: "off", 1: "distribute", 2: "isolate", 3: "numactl", "disabled": "off"},
    "pooling": {-1: "", 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"},
    "rope-scaling": {-1: "", 0: "none", 1: "linear", 2: "yarn", 3: "longrope"},
}
"""By parameter whose values are names, the values in WasmEdge and wasi_nn_backend: the numbers of
llama.cpp's enums (`ggml_type`, `ggml_numa_strategy`, `llama_pooling_type`,
`llama_rope_scaling_type`), and other names.
"""


class Clamp:
    """Numbers within one value, clamped to their ranges. `reason` names the first of them."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._clamped = 0

    def __call__(self, item: str, number: float, low: float, high: float) -> float:
        """Return the number nearest to *number* in the range of *item*, and note the change."""
        used = low if number < low else high
        bounds = f"{plain_number(low)} … {plain_number(high)}"
        self.note(f"{item}: {shorten(number)} is outside {bounds}: {plain_number(used)} is used")
        return used

    def note(self, reason: str) -> None:
        """Note another change of the value."""
        self._clamped += 1
        if len(self._reasons) < REASONS_MAX:
            self._reasons.append(reason)

    @property
    def reason(self) -> str:
        """The reason why the value differs from the given one; empty if it does not."""
        more = self._clamped - len(self._reasons)
        return "; ".join(self._reasons) + (f"; and {more} more" if more else "")


def adjust_value(parameter: Parameter, value: Any) -> tuple[Any, str]:
    """Return the value to use for *value*, or `CONFIGURED`, and the reason if they differ. A value
    of the wrong type is returned as it is.
    """
    if isinstance(value, bool):
        return value, ""
    if parameter.name in _OTHER_NAMES:
        return _named_choice(value, _OTHER_NAMES[parameter.name])
    if not isinstance(value, int | float):
        return value, ""
    if parameter.kind not in ("int", "float") or parameter.low <= value <= parameter.high:
        return value, ""
    for sentinel in (SENTINELS.get(parameter.name), DEFAULT_SENTINEL):
        if sentinel is not None and value == sentinel.value:
            return sentinel.used, sentinel.reason
    low, high = plain_number(parameter.low), plain_number(parameter.high)
    used = parameter.low if value < parameter.low else parameter.high
    number = int(used) if parameter.kind == "int" else used
    reason = f"{shorten(value)} is outside {low} … {high}: {plain_number(used)} is used"
    return number, reason


def reduce_seed(parameter: Parameter, value: Any) -> tuple[Any, str]:
    """Return the value to use for *value* and the reason if they differ: a whole number out of the
    range of `seed` is taken modulo 2^32, as programs draw seeds of 64 bits. Other parameters, and
    values of the wrong type, are returned as they are.
    """
    if parameter.name != "seed" or isinstance(value, bool) or not isinstance(value, int | float):
        return value, ""
    if parameter.low <= value <= parameter.high or value % 1 != 0:
        return value, ""
    seed = int(value) % SEEDS
    return seed, f"{shorten(value)} is outside 0 … {SEEDS - 1}: {seed} is used, modulo 2^32"


def _named_choice(value: Any, names: Mapping[int | str, str]) -> tuple[Any, str]:
    value = as_whole(value)
    key = value.lower() if isinstance(value, str) else value
    if not isinstance(key, int | str) or key not in names:
        return value, ""
    name = names[key]
    return name, f"{shorten(value)} means {name or 'the default'}"
