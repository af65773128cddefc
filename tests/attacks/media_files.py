"""Images and sounds for attacks: small valid files, made here byte by byte, and mutations of them.

All files derive from a seed. None is larger than 2 MB, but some claim to be, or unpack to more.
"""

from __future__ import annotations

import random
import struct
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

__all__ = ("File", "mutated_files", "png", "special_files", "valid_files", "wav")

SIDE = 48
Kind = Literal["image", "audio"]


class File(NamedTuple):
    """A file with its name for messages, and as what a client sends it."""

    name: str
    kind: Kind
    data: bytes


def png(
    width: int,
    height: int,
    rows: bytes | None = None,
    extra: tuple[bytes, ...] = (),
    color: int = 2,
) -> bytes:
    """Return a PNG file; *rows* are its unpacked pixels, and *extra* are chunks before them."""
    channels = {0: 1, 2: 3, 6: 4}[color]
    if rows is None:
        rows = (b"\0" + bytes(range(256)) * (channels * width // 256 + 1))[: 1 + channels * width]
        rows *= height
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = [
        chunk(b"IHDR", header), *extra,
        chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b""),
    ]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def jpeg(width: int, height: int, claimed: tuple[int, int] | None = None) -> bytes:
    """Return a grey baseline JPEG, whose header may have *claimed* another size."""

    def segment(marker: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, 2 + len(data)) + data

    one_code = bytes([1, *[0] * 15, 0])  # the only code has one bit, and means 0
    blocks = -(-width // 8) * -(-height // 8)
    bits = 2 * blocks  # no change of brightness, then the end of the block
    scan = bytes(bits // 8) + (bytes([0xFF >> bits % 8]) if bits % 8 else b"")
    columns, lines = claimed or (width, height)
    return b"".join(
        (
            b"\xff\xd8",
            segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
            segment(0xDB, b"\0" + b"\1" * 64),
            segment(0xC0, struct.pack(">BHHB", 8, lines, columns, 1) + b"\1\x11\0"),
            segment(0xC4, b"\x00" + one_code),
            segment(0xC4, b"\x10" + one_code),
            segment(0xDA, b"\1\1\0\0\x3f\0"),
            scan,
            b"\xff\xd9",
        )
    )


def gif(width: int, height: int, frames: int = 1, screen: tuple[int, int] | None = None) -> bytes:
    """Return a GIF of several frames; its screen may be larger than these."""
    colors = b"".join(bytes([i * 2, 255 - i * 2, i]) for i in range(128))
    screen = screen or (width, height)
    parts = [b"GIF89a", struct.pack("<HHBBB", *screen, 0xF6, 0, 0), colors]
    for frame in range(frames):
        parts += [b"\x21\xf9\4\0\1\0\0\0", b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0)]
        codes = bytearray()
        for at in range(width * height):
            if at % 100 == 0:
                codes.append(128)  # begin the table anew, so that codes stay bytes
            codes.append((at + frame) % 128)
        codes.append(129)
        blocks = (bytes(codes[at : at + 255]) for at in range(0, len(codes), 255))
        parts += [b"\7", *(bytes([len(block)]) + block for block in blocks), b"\0"]
    return b"".join((*parts, b"\x3b"))


def bmp(width: int, height: int, bits: int = 24) -> bytes:
    """Return a BMP file."""
    line = bytes((bits // 8 * width + 3) // 4 * 4)
    pixels = line * height
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, len(pixels), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + head + pixels


WEBP = b64decode("UklGRiIAAABXRUJQVlA4IBYAAAAwAQCdASoBAAEADsD+JaQAA3AAAAAA")


def wav(
    seconds: float = 0.3, rate: int = 16000, channels: int = 1, kind: int = 1, bits: int = 16
) -> bytes:
    """Return a WAV file of a falling tone."""
    count = int(seconds * min(rate, 48000)) * max(channels, 1)
    samples = struct.pack(f"<{count}h", *((at * at // 64) % 20000 - 10000 for at in range(count)))
    align = max(1, channels * bits // 8)
    form = struct.pack(
        "<HHIIHH", kind, channels, rate, rate * align & 0xFFFFFFFF, align & 0xFFFF, bits
    )
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def mp3(frames: int = 12) -> bytes:
    """Return silent frames of MPEG-1 layer 3, of 417 bytes each."""
    return (b"\xff\xfb\x90\x00" + bytes(413)) * frames


def valid_files() -> list[File]:
    """Return a small valid file of each format."""
    return [
        File("png", "image", png(SIDE, SIDE)),
        File("png with alpha", "image", png(SIDE, SIDE, color=6)),
        File("grey png", "image", png(SIDE, SIDE, color=0)),
        File("jpeg", "image", jpeg(SIDE, SIDE)),
        File("gif", "image", gif(SIDE, SIDE)),
        File("bmp", "image", bmp(SIDE, SIDE)),
        File("webp", "image", WEBP),
        File("wav", "audio", wav()),
        File("mp3", "audio", mp3()),
    ]


def special_files() -> list[File]:
    """Return files that lie about their size, unpack to much, or are of other kinds."""
    bomb = zlib.compress(bytes(64 << 20), 9)
    picture, sound = png(SIDE, SIDE), wav()
    images = {
        "nothing": b"",
        "one byte": b"\x89",
        "only a signature": picture[:8],
        "1 × 60000": png(1, 60000),
        "60000 × 1": png(60000, 1),
        "30000 × 30000 in the header": png(30000, 30000, b"\0"),
        "2^31 - 1 pixels wide": png((1 << 31) - 1, 1, b"\0"),
        "no pixels": png(0, 0, b""),
        "no columns": png(0, 7, bytes(7)),
        "jpeg of 65535 × 65535": jpeg(8, 8, (65535, 65535)),
        "jpeg without lines": jpeg(8, 8, (8, 0)),
        "gif with a screen of 65535 × 65535": gif(8, 8, screen=(65535, 65535)),
        "gif of 200 frames": gif(16, 16, frames=200),
        "bmp of 2^31 - 1 lines": bmp(8, 8)[:22] + struct.pack("<i", (1 << 31) - 1) + bmp(8, 8)[26:],
        "bmp of -8 lines": bmp(8, 8)[:22] + struct.pack("<i", -8) + bmp(8, 8)[26:],
        "png whose pixels are 64 MB": png(SIDE, SIDE, bytes(1))[:33] + chunk(b"IDAT", bomb),
        "png with a text of 64 MB": png(SIDE, SIDE, extra=(chunk(b"zTXt", b"comment\0\0" + bomb),)),
        "png with a colour profile of 64 MB": png(
            SIDE, SIDE, extra=(chunk(b"iCCP", b"profile\0\0" + bomb),)
        ),
        "animated png": png(SIDE, SIDE, extra=(chunk(b"acTL", struct.pack(">II", 9, 0)),)),
        "png and html": picture + b"<html><script>alert(1)</script></html>",
        "png and zip": picture + b"PK\3\4" + bytes(60),
        "html before png": b"<!-- " + picture,
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "xml with entities": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///x">]>',
        "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100),
        "avif": b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + bytes(100),
        "pdf": b"%PDF-1.7\n" + bytes(100),
        "zip": b"PK\3\4" + bytes(100),
        "gzip bomb": b"\x1f\x8b\x08" + bytes(7) + bomb,
        "postscript": b"%!PS-Adobe-3.0\n(/etc/passwd) (r) file\n",
        "a sound": sound,
        "tga": struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 65535, 65535, 24, 0),
        "psd": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 300000, 300000, 8, 3),
        "hdr": b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 99999 +X 99999\n",
        "pnm": b"P6\n99999 99999\n255\n",
        "pic": b"\x53\x80\xf6\x34" + bytes(88) + b"PICT" + struct.pack(">HH", 65535, 65535),
    }
    sounds = {
        "no samples": wav(0),
        "no channels": wav(channels=0),
        "65535 channels": wav(0.001, channels=64)[:22] + b"\xff\xff" + wav(0.001, channels=64)[24:],
        "rate 0": wav(rate=0),
        "rate of 2^32 - 1": wav(0.01, rate=(1 << 32) - 1),
        "rate of 1": wav(rate=1),
        "0 bits": wav(bits=0),
        "65535 bits": wav(bits=65535),
        "floats that are no numbers": wav(kind=3, bits=32).replace(b"\0\0", b"\xff\x7f"),
        "adpcm": wav(kind=2, bits=4),
        "data of 4 GB": sound[:40] + b"\xff\xff\xff\xff" + sound[44:],
        "an hour of silence, claimed": sound[:40] + struct.pack("<I", 115_200_000) + sound[44:],
        "mp3 with broken frames": mp3().replace(bytes(10), b"\xff" * 10),
        "mp3 behind a large tag": b"ID3\4\0\0\x7f\x7f\x7f\x7f" + mp3(),
        "flac": b"fLaC\x80\0\0\x22" + b"\xff" * 34 + bytes(100),
        "ogg": b"OggS\0\2" + bytes(60),
        "an image": picture,
    }
    return [
        *(File(name, "image", data) for name, data in images.items()),
        *(File(name, "audio", data) for name, data in sounds.items()),
    ]


def _truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 12)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _head_changed(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(min(64, len(changed)))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(changed)


def _cut_out(rng: random.Random, data: bytes) -> bytes:
    begin, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:begin] + data[end:]


def _repeated(rng: random.Random, data: bytes) -> bytes:
    begin, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:end] + data[begin:end] * rng.randint(1, 50) + data[end:]


def _filled(rng: random.Random, data: bytes) -> bytes:
    begin, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:begin] + rng.randbytes(end - begin) + data[end:]


def _numbers_changed(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(max(1, len(data) - 4))
    number = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x10000, 0xFFFF))
    return data[:at] + struct.pack(rng.choice("<>") + "I", number) + data[at + 4 :]


_Mutation = Callable[[random.Random, bytes], bytes]
MUTATIONS: tuple[_Mutation, ...] = (
    *(_truncated, _flipped, _head_changed, _cut_out, _repeated, _filled, _numbers_changed),
)


def _repaired(data: bytes) -> bytes:
    """Return a mutated PNG with right checksums, which decoders that check them would refuse."""
    parts, at = [data[:8]], 8
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        if size > len(data) - at - 12:
            return b"".join((*parts, data[at:]))
        parts.append(chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    return b"".join((*parts, data[at:]))


def mutated_files(count: int, seed: int) -> Iterator[File]:
    """Yield *count* mutations of the valid files."""
    rng, bases = random.Random(seed), valid_files()
    bases = [file for file in bases if file.kind == "image"] + bases  # sounds take longer
    for number in range(count):
        base = bases[number % len(bases)]
        change = rng.choice(MUTATIONS)
        data = change(rng, base.data)
        if base.name.endswith("png") and rng.random() < 0.5:
            data = _repaired(data)
        yield File(f"{base.name} {number} {change.__name__}", base.kind, data)
