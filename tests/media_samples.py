"""Images and sounds for tests, made without files."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image

__all__ = ("encoded_image", "flac", "mp3", "picture", "png", "wav")


def picture(width: int = 64, height: int = 48, seed: int = 1) -> Image.Image:
    """Return an image with a gradient and noise, so that every pixel counts."""
    noise = np.random.default_rng(seed).integers(0, 64, (height, width, 3))
    rows, columns = np.mgrid[0:height, 0:width]
    gradient = np.stack([rows * 190 // height, columns * 190 // width, (rows + columns) % 190], 2)
    return Image.fromarray((gradient + noise).astype(np.uint8), "RGB")


def encoded_image(image: Image.Image, name: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def png(width: int = 64, height: int = 48, seed: int = 1) -> bytes:
    return encoded_image(picture(width, height, seed), "PNG")


def wav(seconds: float = 1.0, rate: int = 16_000, seed: int = 1) -> bytes:
    """Return a sound of noise with 16 bits."""
    random = np.random.default_rng(seed)
    samples = random.integers(-8000, 8000, int(seconds * rate)).astype("<i2").tobytes()
    layout = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    body = b"WAVE" + b"fmt " + struct.pack("<I", 16) + layout
    body += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def mp3(frames: int = 40) -> bytes:
    """Return silence: frames of MPEG 1 layer III with 128 kbit/s, 44.1 kHz, mono."""
    frame = b"\xff\xfb\x90\xc0" + bytes(417 - 4)
    return frame * frames


def flac(seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """Return a constant level in mono with 16 bits, in blocks of 4096 samples."""
    count, block = int(seconds * rate), 4096
    packed = rate << 44 | 15 << 36 | count
    info = struct.pack(">HH", block, block) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    data = b"fLaC" + b"\x80" + len(info).to_bytes(3, "big") + info
    for number in range(-(-count // block)):
        size = min(block, count - number * block)
        # The block's size and 16 bits of it behind the header, sample rate and bits of the format.
        header = b"\xff\xf8\x70\x08" + bytes([number]) + struct.pack(">H", size - 1)
        header += bytes([_crc(header, 8, 0x07)])
        frame = header + b"\x00" + struct.pack(">h", 1000)
        data += frame + _crc(frame, 16, 0x8005).to_bytes(2, "big")
    return data


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    crc, top = 0, 1 << bits - 1
    for byte in data:
        crc ^= byte << bits - 8
        for _ in range(8):
            crc = (crc << 1 ^ (polynomial if crc & top else 0)) & (1 << bits) - 1
    return crc
