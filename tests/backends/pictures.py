"""Images with random embeddings, and their steps: by the backend, and by bare llama.cpp as mtmd's
helper calls it (`mtmd_helper_decode_image_chunk`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from inferd.backends import Chunk
from inferd.backends.batch import MediaInput
from inferd.backends.llama.model import LlamaModel
from inferd.backends.media import MediaContent, MediaItem
from tests.backends.driving import prefill
from tests.backends.tiny import Bare
from tests.tiny_gguf import EMBEDDING

__all__ = (
    "Part",
    "Picture",
    "compute",
    "picture",
    "positions_of",
    "reference",
    "size_of",
    "step_picture",
)

_DECODE = 1
"""`LLAMA_PROCESS_TYPE_DECODE`."""


class Picture(NamedTuple):
    """An image of *rows* × *columns* entries."""

    entries: list[int]
    media: MediaInput
    rows: NDArray[np.float32]
    places: NDArray[np.int32]


def picture(
    seed: int,
    rows: int = 3,
    columns: int = 4,
    *,
    mrope: bool = False,
    causal: bool = True,
    width: int = EMBEDDING,
    scale: float = 1.0,
) -> Picture:
    """Return an image whose embeddings have *width* numbers of about *scale*."""
    size, generator = rows * columns, np.random.default_rng(seed)
    numbers = (generator.standard_normal((size, width)) * scale).astype(np.float32)
    grid = [(0, row, column, 0) for row in range(rows) for column in range(columns)]
    places = np.array(grid, np.int32) if mrope else np.array([(i,) for i in range(size)], np.int32)
    positions = max(rows, columns) if mrope else size
    content = MediaContent(seed.to_bytes(32, "big"))
    item = MediaItem.of_content(
        content, "projector", "build", index=0, size=size, positions=positions
    )
    media = MediaInput(
        embeddings=memoryview(numbers.tobytes()),
        size=size,
        positions=positions,
        places=memoryview(places.tobytes()) if mrope else None,
        causal=causal,
    )
    return Picture(item.entries(), media, numbers, places)


Part = list[int] | Picture


def size_of(part: Part) -> int:
    return part.media.size if isinstance(part, Picture) else len(part)


def positions_of(parts: Sequence[Part]) -> int:
    """Return the position after *parts*."""
    return sum(p.media.positions if isinstance(p, Picture) else len(p) for p in parts)


def step_picture(
    model: LlamaModel, slot: int, it: Picture, position: int, chunk: int = 0, *, last: bool = False
) -> None:
    """Compute an image, in parts of *chunk* entries if that is not 0."""
    size = it.media.size
    for begin in range(0, size, chunk or size):
        tokens = it.entries[begin : begin + (chunk or size)]
        logits = int(last and begin + len(tokens) == size)
        model.step([Chunk(slot, tokens, position + begin, logits, it.media, begin)])


def compute(model: LlamaModel, slot: int, parts: Sequence[Part], chunk: int = 0) -> int:
    """Compute *parts* behind the contents of a slot; return its length."""
    for part in parts:
        position, last = model.length(slot), part is parts[-1]
        if isinstance(part, Picture):
            step_picture(model, slot, part, position, chunk, last=last)
        else:
            prefill(model, slot, part, position)
    return model.length(slot)


def decode_as_helper(bare: Bare, slot: int, it: Picture, first: int) -> NDArray[np.float32]:
    """Decode an image from position *first* on, as mtmd's helper does; return the last logits."""
    batch = lib.llama_batch_ext_init(bare.context)
    assert batch
    for row, place in zip(it.rows, it.places, strict=True):
        data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        index = lib.llama_batch_ext_add_embd(batch, slot, lib.llama_embd(data, 1, len(row)))
        moved = [first + int(number) for number in place]
        if len(moved) == 4:
            moved[3] = 0
        assert lib.llama_batch_ext_set_pos(batch, index, (ctypes.c_int32 * 4)(*moved))
    assert lib.llama_batch_ext_set_output_logits(batch, len(it.rows) - 1, True)
    if not it.media.causal:
        lib.llama_set_causal_attn(bare.context, False)
    assert lib.llama_process(bare.context, _DECODE, batch) == 0
    lib.llama_set_causal_attn(bare.context, True)
    lib.llama_batch_ext_free(batch)
    return np.array(lib.llama_get_logits_ith(bare.context, -1)[: bare.vocab_size], np.float32)


def reference(bare: Bare, parts: Sequence[Part], slot: int = 0) -> NDArray[np.float32]:
    """Return the logits after *parts*."""
    bare.clear(slot)
    logits, position = np.zeros(0, np.float32), 0
    for part in parts:
        if isinstance(part, Picture):
            logits = decode_as_helper(bare, slot, part, position)
        else:
            logits = bare.decode(slot, part, position)
        position += positions_of([part])
    return logits
