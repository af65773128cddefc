"""What a model would take of memory, asked of llama.cpp by a dry run: nothing of it is allocated.

The model is opened with `no_alloc` (and without mmap: llama.cpp aborts on both together), then a
context is made on it. llama.cpp tells what it would have allocated; the vocabulary is there for
real, so the process's own size is measured. A first load is 0.13 s longer by it on SmolLM2 135M
(0.56 s without), and 0.5 s on Gemma 3 270M (0.83 s), whose vocabulary is read twice.

Weights that llama.cpp repacks for the CPU are counted once: their pages in the file's mapping are
not read again, and the kernel may take them back.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib
from msgspec.structs import replace

from ...memory_need import Device, MemoryNeed
from ...model_spec import ModelSpec, Shape
from ..kv.embedding_context import embed_info, open_embedding_context, output_bytes
from ..llama_log import capture
from .devices import Share, breakdown, devices, layers_of
from .opening import (
    ctx_size_of,
    load_failed,
    name_of,
    open_context,
    open_model,
    read_llama_options,
)

_MIB = 1 << 20
_OUTPUT = re.compile(r"\w+: +\S+ +output buffer size = +([\d.]+) MiB")
"""Rows of logits lie on the host, and are in no breakdown."""


class LlamaMemoryEstimator:
    """A GGUF model opened without its weights; see `MemoryEstimator`. Owned by one thread."""

    def __init__(self, spec: ModelSpec):
        self._spec = spec
        self._options = read_llama_options(spec)
        self._log = capture()
        self._model = self._open(spec)
        self._layers = layers_of(spec, self._model, devices())

    def _open(self, spec: ModelSpec) -> Any:
        self._log.clear()
        params = lib.llama_model_default_params()
        params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
        model, file = open_model(spec, params)
        if not model:
            raise load_failed(name_of(spec), self._log)
        self._values = file.values
        return model

    @property
    def shape(self) -> Shape:
        """The shape that the spec asks for, with the defaults that the model has for it."""
        spec = self._spec
        ctx_size = ctx_size_of(spec, self._model)
        return Shape(spec.slots, ctx_size, spec.batch_size, self._layers)

    @property
    def devices(self) -> list[Device]:
        """The devices that layers could run on, as of now."""
        return devices()

    def need(self, shape: Shape) -> MemoryNeed:
        """Return what the model needs in *shape*; takes 5 ms if as many layers are on devices."""
        spec = shape.apply_to(self._spec)
        if shape.n_gpu_layers != self._layers:
            self.close()
            self._model, self._layers = self._open(spec), shape.n_gpu_layers
        self._log.clear()
        context = open_context(spec, self._options, self._model, self._log)
        info = embed_info(spec, self._model, context, self._values)
        encoder = not lib.llama_get_memory(context)
        need = total_need(*self._taken(context))
        self._log.clear()
        context = open_embedding_context(spec, self._options, self._model, info, self._log)
        shares, _, _ = self._taken(context)
        bare = [replace(share, weights=0) for share in shares]
        second = total_need(bare, 0, output_bytes(info, self._model))
        if encoder:
            return replace(need, context=0, compute=second.total)
        return replace(need, embedding=second.total, embedding_devices=second.devices)

    def _taken(self, context: Any) -> tuple[list[Share], int, int]:
        """Return what `total_need` takes of a context, and free it."""
        shares, process = breakdown(context), _resident_bytes()
        lib.llama_free(context)
        return shares, process, _output_bytes(self._log.lines())

    def close(self) -> None:
        """Free the model; twice is once."""
        model, self._model = self._model, None
        if model is not None:
            lib.llama_model_free(model)


def total_need(shares: Iterable[Share], process: int, output: int) -> MemoryNeed:
    """Return the need that the *shares* of host and devices come to."""
    weights = context = compute = 0
    on_devices: Counter[str] = Counter()
    for share in shares:
        if share.device:
            on_devices[share.device] += share.weights + share.context + share.compute
        else:
            weights, context = weights + share.weights, context + share.context
            compute += share.compute
    return MemoryNeed(
        weights=weights,
        context=context,
        compute=compute + output,
        process=process,
        devices=dict(on_devices),
    )


def _output_bytes(lines: list[str]) -> int:
    found = (_OUTPUT.match(line) for line in lines)
    return sum(round(float(match[1]) * _MIB) for match in found if match)


def _resident_bytes() -> int:
    """Return how much memory this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
