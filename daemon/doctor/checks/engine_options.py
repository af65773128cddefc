"""The engine's options of the configured models: what they save, and limits that they exceed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ....backends.engine_options import (
    ENGINE_OPTIONS,
    cache_share,
    engine_options_of,
    read_engine_options,
)
from ....backends.errors import InvalidArgument
from ...config.model_settings import ModelConfig
from ...config.settings import Config
from ...residency.sizes import size_text
from ..finding import Finding, fail, ok, warn
from .machine_limits import Machine


def check_engine_options(config: Config | None, machine: Machine | None) -> Iterator[Finding]:
    """Check the options of each model that sets some."""
    for name, model in (config.models if config is not None else {}).items():
        assert config is not None
        options = engine_options_of(config.defaults | model.options)
        changed = {key: value for key, value in options.items() if value != ENGINE_OPTIONS[key]}
        if changed and model.backend == "llama":
            yield from _check_model(name, model, changed, machine)


def _check_model(
    name: str, model: ModelConfig, options: dict[str, Any], machine: Machine | None
) -> Iterator[Finding]:
    try:
        read_engine_options(options)
    except InvalidArgument as exc:
        yield fail(f"{name}: {exc.message}", exc.hint)
        return
    size, limit = _file_bytes(model), -1 if machine is None else machine.locked_max
    if options.get("mlock") and 0 <= limit < size:
        yield warn(
            f"{name}: mlock needs to lock {size_text(size)}, but a process may lock only"
            f" {size_text(limit)}, so the rest can be swapped out",
            "raise the limit (`ulimit -l`, LimitMEMLOCK=infinity in the unit), or leave mlock out",
        )
    else:
        yield ok(f"{name}: {', '.join(_effects(options, size))}")


def _effects(options: dict[str, Any], size: int) -> Iterator[str]:
    """Yield each option with its cost or saving, as far as it is known without the engine."""
    share = cache_share(options)
    for key, value in options.items():
        if key not in ("cache-type-k", "cache-type-v"):
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{key} {text}{_EFFECTS.get(key, '').format(size=size_text(size))}"
    if share != 1:
        types = [options.get(f"cache-type-{part}", "f16") for part in ("k", "v")]
        verb = "save" if share < 1 else "cost"
        yield f"KV states in {types[0]} and {types[1]} {verb} {abs(1 - share):.0%} of those in f16"


_EFFECTS = {
    "swa-full": " (layers with a window keep the KV states of the whole context)",
    "mlock": " ({size} are never swapped out)",
    "mmap": " ({size} are read at each load, and other programs cannot share them)",
}
"""The effect of an option on memory, by its name."""


def _file_bytes(model: ModelConfig) -> int:
    try:
        return os.stat(model.file).st_size if model.file is not None else 0
    except OSError:
        return 0
