"""Small image and sound files, made without a library."""

from __future__ import annotations

import math
import struct
import zlib

Color = tuple[int, int, int]


def png(
    width: int,
    height: int,
    color: Color = (200, 30, 60),
    *,
    padding: int = 0,
    text: bytes = b"",
) -> bytes:
    """Return a PNG image of one color. A comment in it has *text* and *padding* further bytes."""
    row = b"\0" + bytes(color) * width
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(row * height)), (b"IEND", b"")]
    if padding or text:
        chunks.insert(1, (b"tEXt", b"Comment\0" + text + b"x" * padding))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bmp(width: int, height: int, color: Color = (200, 30, 60)) -> bytes:
    """Return a BMP image of one color."""
    row = bytes(reversed(color)) * width
    pixels = (row + b"\0" * (-len(row) % 4)) * height
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(pixels), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + header + pixels


def wav(seconds: float, *, rate: int = 16_000, hertz: float = 440.0) -> bytes:
    """Return a WAV file with a tone, in one channel of 16 bits."""
    samples = [
        round(12_000 * math.sin(2 * math.pi * hertz * i / rate)) for i in range(int(seconds * rate))
    ]
    data = struct.pack(f"<{len(samples)}h", *samples)
    form = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    chunks = b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks
