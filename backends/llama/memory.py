"""What a model would take of memory, asked of llama.cpp by a dry run: nothing of it is allocated.

The model is opened with `no_alloc` (and without mmap: llama.cpp aborts on both together), then a
context is made on it. llama.cpp logs what it would have allocated; the vocabulary is there for
real, so the process's own size is measured. A load is 0.13 s longer by it on SmolLM2 135M (0.56 s
without), and 0.5 s on Gemma 3 270M (0.83 s), whose vocabulary is read twice.

Weights that llama.cpp repacks for the CPU are counted once: their pages in the file's mapping are
not read again, and the kernel may take them back.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from llama_cpp import llama_cpp as lib

from ..base import MemoryNeed, ModelSpec, Shape
from .log import capture
from .opening import (
    ctx_size_of,
    load_failed,
    name_of,
    open_context,
    open_model,
    read_llama_options,
)

__all__ = ("LlamaReckoning",)

_MIB = 1 << 20
_STATES = re.compile(r"\w+: size = +([\d.]+) MiB")
"""`llama_kv_cache: size = …`, `llama_memory_recurrent: size = …`: one line for each cache."""
_SCRATCH = re.compile(r"\w+: +\S+ +(?:compute|output) buffer size = +([\d.]+) MiB")


class LlamaReckoning:
    """A GGUF model opened without its weights; see `Reckoning`. Owned by one thread."""

    def __init__(self, spec: ModelSpec):
        self._spec = spec
        self._options = read_llama_options(spec)
        self._log = capture()
        self._log.clear()
        params = lib.llama_model_default_params()
        params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
        self._model, _ = open_model(spec, params)
        if not self._model:
            raise load_failed(name_of(spec), self._log)

    @property
    def shape(self) -> Shape:
        """The shape that the spec asks for, with the defaults that the model has for it."""
        spec = self._spec
        return Shape(spec.slots, ctx_size_of(spec, self._model), spec.batch_size)

    def need(self, shape: Shape) -> MemoryNeed:
        """Return what the model needs in *shape*; takes 5 ms."""
        self._log.clear()
        spec = shape.of(self._spec)
        context = open_context(spec, self._options, self._model, self._log)
        process = _resident_bytes()
        lib.llama_free(context)
        lines = self._log.lines()
        return MemoryNeed(
            weights=int(lib.llama_model_size(self._model)),
            context=_sum(_STATES, lines),
            compute=_sum(_SCRATCH, lines),
            process=process,
        )

    def close(self) -> None:
        """Free the model; twice is once."""
        model, self._model = self._model, None
        if model is not None:
            lib.llama_model_free(model)


def _sum(pattern: re.Pattern[str], lines: list[str]) -> int:
    found = (pattern.match(line) for line in lines)
    return sum(round(float(match[1]) * _MIB) for match in found if match)


def _resident_bytes() -> int:
    """Return how much memory this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
