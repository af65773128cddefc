"""WebAssembly guests: wasi-nn's functions for wasmtime, computed by the daemon.

`add_to_linker` offers them to guests that a program runs itself, and `add_component_to_linker` to
components; `inferd wasm run` runs a guest. Programs import this package as `inferd.wasm`.
Importing this package does not import wasmtime.
"""

from __future__ import annotations

from ..guests import Preload, parse_preload
from .component import add_component_to_linker
from .dialects import Dialect
from .guest import Guest
from .host_functions import add_to_linker

__all__ = (
    "Dialect",
    "Guest",
    "Preload",
    "add_component_to_linker",
    "add_to_linker",
    "parse_preload",
)
