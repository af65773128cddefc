"""A context filled nearly to its end without computing the tokens, in less than a second.

A step's buffers grow with the highest cell in use. A saved state of one token is stretched to all
cells, with zeros for the KV states, and loaded. Then most cells are freed below the last ones, so
that attention skips them.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator, Sequence

import numpy as np
from llama_cpp import llama_cpp as lib

from inferd.backends.llama.kv.context import LlamaContext

__all__ = ("fill_context", "tokens_at_a_time")

HEADER_BYTES = 28
"""Of `LlamaContext.save`, in front of llama.cpp's state."""
CELLS_LEFT = 32


def fill_context(context: LlamaContext, free: int, *, swa_full: bool = False) -> int:
    """Fill slot 0 except its last *free* tokens, and return its length. The slot has one token.

    The second cache of a model with a sliding window has the cells of the window, or with
    *swa_full* as many as the first.
    """
    length, window = context.ctx_size - free, context._window
    cells = context.ctx_size, context.ctx_size if swa_full else window
    layout = list(_stretch(context.save(0)[HEADER_BYTES:], cells, length))
    size = sum(len(header) + zeros for header, zeros in layout)
    context.clear(0)
    # Memory of the allocator would stay with the process, and be measured.
    with mmap.mmap(-1, size) as state:
        for header, zeros in layout:
            state.write(header)
            state.seek(zeros, 1)
        buffer = (ctypes.c_uint8 * size).from_buffer(state)
        assert lib.llama_state_seq_set_data_ext(context.pointer, buffer, size, 0, 0) == size
        del buffer
    lib.llama_memory_seq_rm(context.memory, 0, 0, length - CELLS_LEFT)
    context._lengths[0] = length
    return length


def tokens_at_a_time(context: LlamaContext) -> int:
    """Return how many tokens of a batch llama.cpp computes at a time."""
    return int(lib.llama_n_ubatch(context.pointer))


def _stretch(
    state: bytes, cells_of_caches: Sequence[int], length: int
) -> Iterator[tuple[bytes, int]]:
    """Yield the parts of a state like *state*, each with the number of zeros that follow it.

    The layout is that of `llama_kv_cache::state_write`.
    """
    position = 0

    def read(kinds: str) -> tuple[int, ...]:
        nonlocal position
        values = struct.unpack_from("<" + kinds, state, position)
        position += struct.calcsize("<" + kinds)
        return values

    yield struct.pack("<Ii", *read("Ii")), 0  # a mark, and the slot
    for cells in cells_of_caches:
        if position == len(state):
            return
        (streams,) = read("I")
        yield struct.pack("<I", streams), 0
        for _ in range(streams):
            (count,) = read("I")
            yield struct.pack("<I", cells if count else 0), 0
            if not count:
                continue
            read("iIi" * count)
            meta = np.tile(np.array([0, 1, 0], np.int32), (cells, 1))
            meta[:, 0] = np.maximum(0, np.arange(length - cells, length))
            yield meta.tobytes(), 0
            transposed, layers = read("II")
            yield struct.pack("<II", transposed, layers), 0
            for layer in range(2 * layers):
                kinds = "iII" if transposed and layer >= layers else "iQ"
                kind, *sizes = read(kinds)
                row = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
                position += row * count
                yield struct.pack("<" + kinds, kind, *sizes), row * cells
