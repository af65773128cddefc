"""Bounds on sounds, checked from their headers before libmtmd decodes them.

libmtmd allocates as many samples as a header promises, and an allocation that fails there ends the
process.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ...errors import InvalidArgument, TooLarge
from ...media_types import check_content, damaged

SECONDS_MAX = 600.0
SECONDS_MIN = 0.05
"""libmtmd aborts on sounds of less than two windows of a spectrum, 10 ms each."""
RATE_MAX = 768_000
RATE_MIN = 1000
CHANNELS_MAX = 64
_PLAIN = (1, 3, 6, 7)
"""Formats of WAV with equal samples: whole numbers, floating point, A-law and µ-law."""
_EXTENSIBLE = 0xFFFE
_BITRATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
"""Of MP3 in kbit/s: MPEG 1, then MPEG 2 and 2.5."""
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_FRAME_BYTES_MIN = 24
_LOOKS_MAX = 200_000
"""Places of an MP3 where a frame may begin; 10 minutes have 25 000 frames."""


def check_sound(data: bytes, seconds_max: float = SECONDS_MAX) -> bytes:
    """Return the sound in *data* as libmtmd may decode it: the size in the header of a WAV is that
    of its samples, even if its writer did not know it.

    :raises InvalidArgument: it is not a sound that can be read, is damaged, or is too short.
    :raises TooLarge: it takes more than *seconds_max*.
    """
    found = check_content(data, "audio")
    try:
        if found == "audio/wav":
            data, seconds = _checked_wav(data)
        elif found == "audio/flac":
            seconds = _flac_seconds(data)
        else:
            seconds = _mp3_seconds(data, seconds_max)
    except (struct.error, IndexError, ZeroDivisionError) as exc:
        raise damaged(data, "its header is cut off") from exc
    if seconds > seconds_max:
        raise TooLarge(
            f"the sound takes {seconds:.0f} s; at most {seconds_max:.0f} s are allowed",
            hint="send a shorter one, or several",
            data={"seconds": seconds, "seconds_max": seconds_max},
        )
    if seconds < SECONDS_MIN:
        raise InvalidArgument(
            f"the sound takes {1000 * seconds:.1f} ms; it has to take {1000 * SECONDS_MIN:.0f} ms",
            hint="send a longer one",
        )
    return data


class _WavFormat(NamedTuple):
    tag: int
    channels: int
    rate: int
    block: int
    bits: int


def _checked_wav(data: bytes) -> tuple[bytes, float]:
    """Return the WAV with the format and the samples alone, and its seconds."""
    position, layout, extension = 12, None, b""
    while position + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        begin = position + 8
        if name == b"fmt ":
            layout = _WavFormat._make(struct.unpack_from("<HHIxxxxHH", data, begin))
            extension = data[begin : begin + min(size, 40)]
        elif name == b"data":
            if layout is None:
                raise damaged(data, "its samples come before their format")
            _check_layout(layout, extension, data)
            samples = data[begin : begin + size]
            samples = samples[: len(samples) // layout.block * layout.block]
            seconds = len(samples) / layout.block / layout.rate
            return _wav(extension, samples), seconds
        position = begin + size + size % 2
    raise damaged(data, "it has no samples")


def _check_layout(layout: _WavFormat, extension: bytes, data: bytes) -> None:
    tag = layout.tag
    if tag == _EXTENSIBLE:
        (tag,) = struct.unpack_from("<H", extension, 24)
    if tag not in _PLAIN:
        raise InvalidArgument(
            f"the samples of the WAV sound are compressed (format {tag:#06x})",
            hint="send it with plain samples (PCM), or as MP3 or FLAC",
        )
    block = layout.channels * layout.bits // 8
    if (
        layout.bits not in (8, 16, 24, 32, 64)
        or not 1 <= layout.channels <= CHANNELS_MAX
        or not RATE_MIN <= layout.rate <= RATE_MAX
        or layout.block != block
    ):
        raise damaged(data, f"its format is {tuple(layout)}")


def _wav(extension: bytes, samples: bytes) -> bytes:
    extension += bytes(len(extension) % 2)
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(extension)) + extension
    body += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _flac_seconds(data: bytes) -> float:
    """Return the seconds that the first block of a FLAC states."""
    if data[4] & 0x7F != 0 or int.from_bytes(data[5:8], "big") != 34 or len(data) < 42:
        raise damaged(data, "it does not begin with its format")
    packed = int.from_bytes(data[18:26], "big")
    rate, frames = packed >> 44, packed & ((1 << 36) - 1)
    if not RATE_MIN <= rate <= RATE_MAX:
        raise damaged(data, f"its sample rate is {rate}")
    if not frames:
        raise damaged(data, "its header does not state its length")
    return frames / rate


def _mp3_seconds(data: bytes, seconds_max: float) -> float:
    """Return the seconds of an MP3's frames, or more than *seconds_max* as soon as it is that."""
    position, seconds = 0, 0.0
    if data.startswith(b"ID3"):
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte & 0x7F
        position = 10 + size
    for _ in range(_LOOKS_MAX):
        position = data.find(b"\xff", position)
        if position < 0 or position + 4 > len(data) or seconds > seconds_max:
            return seconds
        length, duration = _mp3_frame(data, position)
        seconds += duration
        position += length or 1
    raise damaged(data, "it is not a row of frames")


def _mp3_frame(data: bytes, at: int) -> tuple[int, float]:
    """Return the bytes and seconds of the frame of MPEG layer III at *at*; zeros if none begins
    there.
    """
    version, layer = data[at + 1] >> 3 & 3, data[at + 1] >> 1 & 3
    bitrate, rate, padding = data[at + 2] >> 4, data[at + 2] >> 2 & 3, data[at + 2] >> 1 & 1
    if data[at + 1] & 0xE0 != 0xE0 or version == 1 or layer != 1 or rate == 3:
        return 0, 0.0
    if not 0 < bitrate < 15:
        return 0, 0.0
    is_first = version == 3
    samples, hertz = (1152 if is_first else 576), _RATES[version][rate]
    bits = 1000 * _BITRATES[not is_first][bitrate]
    return max(_FRAME_BYTES_MIN, samples // 8 * bits // hertz + padding), samples / hertz
