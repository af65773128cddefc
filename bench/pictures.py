"""Pictures for the bench: PNG files of coloured squares, which no two runs share."""

from __future__ import annotations

import random
import struct
import zlib

__all__ = ("png",)

SQUARE = 16


def png(rng: random.Random, side: int = 512) -> bytes:
    """Return a PNG file of *side* × *side* pixels, with squares of random colours."""
    rows = bytearray()
    squares = -(-side // SQUARE)
    for _ in range(squares):
        line = b"".join(rng.randbytes(3) * SQUARE for _ in range(squares))[: 3 * side]
        rows += (b"\0" + line) * SQUARE
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(rows[: (1 + 3 * side) * side]), 6)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
