"""Tiny models for the KV tests, and llama.cpp without the backend for comparison."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from inferd.backends import Chunk, ModelSpec
from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.tiny_gguf import VOCAB_SIZE, write_tiny
from tools.architectures.models import MISSING, find_models

__all__ = (
    "BATCH_SIZE",
    "KINDS",
    "NOISE_MAX",
    "SCRATCH",
    "SLOTS",
    "Bare",
    "assert_as_from_scratch",
    "difference",
    "emptied",
    "from_scratch",
    "load_kind",
    "load_tiny",
    "step_slots",
    "tiny_spec",
    "tokens_of",
)

NOISE_MAX = 1e-3
"""The change of a logit by the shape of batches. Measured over shapes: llama 2e-6, gemma3 8e-5,
mamba 4e-6, lfm2 4e-6. Of 500 cells, losing any single one moves llama's logits by 0.01 and more;
losing one of the last 60 moves gemma3's by 0.1, lfm2's by 0.06."""
KINDS = ("llama", "gemma3", "gemma3-full", "mamba", "lfm2", "jamba")
"""Plain; a window, with a cache for part of the context or all of it; recurrent; two hybrids."""
SLOTS, SCRATCH, BATCH_SIZE = 4, 3, 64
EXACT = {"flash-attn": "off", "cache-type-k": "f32", "cache-type-v": "f32"}


def tiny_spec(path: Path, slots: int = SLOTS, ctx_size: int = 1024, **options: Any) -> ModelSpec:
    return ModelSpec(
        name=path.stem,
        path=str(path),
        slots=slots,
        ctx_size=ctx_size,
        batch_size=BATCH_SIZE,
        threads=1,
        options={**EXACT, **options},
    )


def load_tiny(kind: str, directory: Path) -> LlamaModel:
    """Write and load the tiny model of *kind*, one of `KINDS`."""
    name, _, full = kind.partition("-")
    spec = tiny_spec(write_tiny(name, directory), **{"swa-full": bool(full)})
    return load_llama(spec, lambda _: True)


def load_kind(kind: str, directory: Path) -> LlamaModel:
    """Load the tiny model of *kind*, or the model of this name of llama.cpp's generator."""
    if not kind.endswith("-dense"):
        return load_tiny(kind, directory)
    files = find_models([kind])
    assert files is not None, MISSING
    return load_llama(tiny_spec(files[0], ctx_size=256), lambda _: True)


def step_slots(model: LlamaModel, **chunks: tuple[int, list[int]]) -> None:
    """Compute chunks, each by its slot: the position, and tokens that all have logits."""
    model.step([Chunk(int(s[1:]), t, at, logits=len(t)) for s, (at, t) in sorted(chunks.items())])


def emptied(model: LlamaModel) -> LlamaModel:
    """Return *model* with empty slots."""
    for slot in range(model.info.slots):
        model.trim(slot, 0)
    return model


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=count)


def difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.abs(a - b).max())


def from_scratch(model: LlamaModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits after *tokens*, computed in a separate slot."""
    model.trim(SCRATCH, 0)
    prefill(model, SCRATCH, tokens)
    return model.logits(SCRATCH)


def assert_as_from_scratch(model: LlamaModel, slot: int, tokens: Sequence[int]) -> None:
    """Compare the slot's logits, which it keeps, with those after *tokens* in a separate slot."""
    model.hold_logits(slot)
    assert difference(model.logits(slot), from_scratch(model, tokens)) < NOISE_MAX


class Bare:
    """A context on the model of a file, used only by llama.cpp's raw calls."""

    def __init__(
        self, path: Path, *, ctx_size: int = 1024, unified: bool = False, full: bool = False
    ):
        capture()
        self.model = lib.llama_model_load_from_file(
            os.fsencode(path), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = ctx_size if unified else ctx_size * SLOTS
        params.n_seq_max = params.n_outputs_max = SLOTS
        params.n_batch = params.n_ubatch = BATCH_SIZE
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        params.kv_unified, params.swa_full = unified, full
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        vocab = lib.llama_model_get_vocab(self.model)
        self.vocab_size = int(lib.llama_vocab_n_tokens(vocab))

    def decode(self, slot: int, tokens: Sequence[int], position: int = 0) -> NDArray[np.float32]:
        """Decode *tokens* from *position* on; return the logits after the last. At position 0 the
        slot is emptied first.
        """
        if not position:
            self.clear(slot)
        for begin in range(0, len(tokens), BATCH_SIZE):
            part = tokens[begin : begin + BATCH_SIZE]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, position + begin + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
                batch.logits[i] = i == len(part) - 1
            assert lib.llama_decode(self.context, batch) == 0
            lib.llama_batch_free(batch)
        pointer = lib.llama_get_logits_ith(self.context, -1)
        return np.array(pointer[: self.vocab_size], np.float32)

    def clear(self, slot: int) -> None:
        lib.llama_memory_seq_rm(self.memory, slot, -1, -1)

    def move(self, slot: int, begin: int, end: int, to: int) -> None:
        """Remove the cells from *to* to *begin*, and move the cells up to *end* down to *to*."""
        lib.llama_memory_seq_rm(self.memory, slot, to, begin)
        lib.llama_memory_seq_add(self.memory, slot, begin, end, to - begin)

    @contextmanager
    def adapter(self, path: Path, scale: float) -> Iterator[None]:
        """Decode with an adapter until the end of the context."""
        pointer = lib.llama_adapter_lora_init(self.model, os.fsencode(path))
        assert pointer
        self._set_adapters([pointer], [scale])
        yield
        self._set_adapters([], [])
        lib.llama_adapter_lora_free(pointer)

    def _set_adapters(self, pointers: Sequence[Any], scales: Sequence[float]) -> None:
        count = len(pointers)
        lib.llama_set_adapters_lora(
            self.context,
            (lib.llama_adapter_lora_p_ctypes * count)(*pointers),
            count,
            (ctypes.c_float * count)(*scales),
        )

    def close(self) -> None:
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)
