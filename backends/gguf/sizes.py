"""The size of a GGUF file, as its header states it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .header import GgufHeader

BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),
    41: (128, 18), 42: (64, 18),
}  # fmt: skip
"""By ggml's type of a tensor: the numbers in a block, and the block's bytes."""


def bytes_promised(header: GgufHeader) -> int:
    """Return the bytes that a file with *header* has at least. Of a tensor whose type is unknown,
    only the position counts.
    """
    ends = [header.data_begin if not header.tensors else 0]
    for tensor in header.tensors.values():
        numbers, size = BLOCKS.get(tensor.kind, (1, 0))
        length = math.prod(tensor.shape) // numbers * size
        ends.append(header.data_begin + tensor.begin + length)
    return max(ends)
