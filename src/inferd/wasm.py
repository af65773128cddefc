"""wasi-nn for programs that run WebAssembly guests with wasmtime; see docs/wasm.md."""

from __future__ import annotations

from .gateways.wasm import (
    Dialect,
    Guest,
    Preload,
    add_component_to_linker,
    add_to_linker,
    parse_preload,
)

__all__ = (
    "Dialect",
    "Guest",
    "Preload",
    "add_component_to_linker",
    "add_to_linker",
    "parse_preload",
)
