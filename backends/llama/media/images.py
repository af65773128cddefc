"""Decoding of images by Pillow, within bounds that are checked before any pixel is decoded."""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

from PIL import Image

from ...errors import InvalidArgument, OutOfMemory, TooLarge
from ...media_types import check_content, damaged

PIXELS_MAX = 64_000_000
SIDE_MAX = 1 << 15
"""libmtmd multiplies sides as `int32`."""
RATIO_MAX = 200
"""The longer side over the shorter one, as in Qwen-VL's own preprocessing. Scaled to fit a
projector, a narrower image would have no pixels in one direction.
"""
_PILLOW_NAMES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
_ORIENTATION = 0x0112
_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF's orientation, the operation that makes an image upright."""
_REASON_CHARACTERS_MAX = 200

# Sizes are checked here, and with one bound.
Image.MAX_IMAGE_PIXELS = None


def decode_image(data: bytes, pixels_max: int = PIXELS_MAX) -> Image.Image:
    """Return the image in *data*, upright and in RGB; of a moving one the first frame.

    As in stb_image, with which llama.cpp decodes, an alpha channel is left out.

    :raises InvalidArgument: it is not an image, is damaged, or is too narrow.
    :raises TooLarge: it has more than *pixels_max* pixels, or a side of more than `SIDE_MAX`.
    """
    name = _PILLOW_NAMES[check_content(data, "image")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about small damages, which Pillow repairs
            return _decode(data, name, pixels_max)
    except (InvalidArgument, TooLarge):
        raise
    except MemoryError as exc:
        raise OutOfMemory(
            "there is too little memory to decode the image", hint="send a smaller one"
        ) from exc
    except Exception as exc:  # Pillow's decoders raise nearly any of Python's own exceptions
        reason = str(exc)[:_REASON_CHARACTERS_MAX] or type(exc).__name__
        raise damaged(data, reason) from exc


def _decode(data: bytes, name: str, pixels_max: int) -> Image.Image:
    if name == "WEBP":
        check_size(*_webp_size(data), pixels_max)  # Pillow allocates the pixels when it opens one
    image = Image.open(io.BytesIO(data), formats=[name])
    check_size(*image.size, pixels_max)
    orientation = _orientation(image)
    image.seek(0)
    image.load()
    return _transposed(_rgb(image), orientation)


def check_size(width: int, height: int, pixels_max: int) -> None:
    """Check the size of an image before it is decoded.

    :raises InvalidArgument: a side is 0, or one is much longer than the other.
    :raises TooLarge: there are too many pixels.
    """
    size = f"{width} × {height} pixels"
    if min(width, height) < 1:
        raise InvalidArgument(f"the image has {size}", hint="send an image with pixels")
    if width * height > pixels_max or max(width, height) > SIDE_MAX:
        raise TooLarge(
            f"the image has {size}; at most {pixels_max} pixels and {SIDE_MAX} on a side are"
            " allowed",
            hint="send a smaller one",
            data={"pixels": width * height, "pixels_max": pixels_max},
        )
    if max(width, height) > RATIO_MAX * min(width, height):
        raise InvalidArgument(
            f"the image has {size}: it is too narrow",
            hint=f"one side may be up to {RATIO_MAX} times as long as the other",
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the size of a WebP image; (0, 0) if the first chunk does not state it."""
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return width, height
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and len(data) >= 30:
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation; 1 (upright) if the image states none, or damaged ones."""
    try:
        found: Any = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # as in `decode_image`: the image is whole even if its EXIF data is not
        return 1
    return found if isinstance(found, int) else 1


def _rgb(image: Image.Image) -> Image.Image:
    """Return *image* in RGB. Pillow clips the 16 bits of a grey image; their upper half counts."""
    if image.mode.startswith("I"):
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _transposed(image: Image.Image, orientation: int) -> Image.Image:
    operation = _TRANSPOSED.get(orientation)
    return image if operation is None else image.transpose(operation)
