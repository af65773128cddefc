"""Bytes that are recognized, decoded within bounds, or refused with the name of what they are."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.backends.llama.media.images import RATIO_MAX, check_size, decode_image
from inferd.backends.llama.media.sounds import check_sound
from tests.media_samples import encoded_image, flac, mp3, picture, png, wav


def test_all_formats_decode_to_one_image() -> None:
    image = picture()
    expected = np.asarray(image).astype(int)
    for name in ("PNG", "BMP", "GIF", "JPEG", "WEBP"):
        found = np.asarray(decode_image(encoded_image(image, name))).astype(int)
        assert found.shape == expected.shape
        assert np.abs(found - expected).mean() < 25


def test_alpha_palettes_grey_and_sixteen_bits_become_rgb() -> None:
    image = picture()
    clear = image.convert("RGBA")
    clear.putalpha(7)
    assert decode_image(encoded_image(clear, "PNG")).tobytes() == image.tobytes()
    grey = np.asarray(image.convert("L"))
    expected = np.repeat(grey[:, :, None], 3, 2)
    deep = Image.fromarray(grey.astype(np.uint16) << 8 | 0x7F)
    for kind in (image.convert("L"), image.convert("L").convert("LA"), deep):
        found = np.asarray(decode_image(encoded_image(kind, "PNG")))
        assert np.array_equal(found, expected)
    palette = image.quantize(16)
    data = encoded_image(palette, "PNG", transparency=bytes(range(16)))
    assert decode_image(data).tobytes() == palette.convert("RGB").tobytes()
    assert decode_image(encoded_image(image.convert("CMYK"), "JPEG")).mode == "RGB"
    assert decode_image(encoded_image(image.convert("1"), "PNG")).mode == "RGB"


def test_the_first_frame_of_a_moving_image_counts() -> None:
    frames = [picture(seed=seed).quantize(64) for seed in (1, 2, 3)]
    for name in ("GIF", "PNG"):
        data = encoded_image(frames[0], name, save_all=True, append_images=frames[1:])
        assert decode_image(data).tobytes() == frames[0].convert("RGB").tobytes()
    data = encoded_image(picture(), "WEBP", save_all=True, append_images=[picture(seed=2)])
    assert decode_image(data).size == (64, 48)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_each_orientation_is_turned_upright(orientation: int) -> None:
    turns = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image, turn = picture(), turns[orientation]
    exif = image.getexif()
    exif[0x0112] = orientation
    stored = image if turn is None else image.transpose(turn)
    assert decode_image(encoded_image(stored, "PNG", exif=exif)).tobytes() == image.tobytes()


def test_damaged_exif_data_do_not_matter() -> None:
    image = picture()
    data = encoded_image(image, "PNG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert decode_image(data).tobytes() == image.tobytes()


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_truncated_image_is_damaged(name: str) -> None:
    data = encoded_image(picture(200, 200), name)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(InvalidArgument) as error:
            decode_image(data[: int(part * len(data))])
        assert error.value.hint


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that promises a size and has no pixels of it."""
    data = bytearray(png())
    data[16:24] = struct.pack(">II", width, height)
    crc = zlib.crc32(bytes(data[12:29]))
    data[29:33] = struct.pack(">I", crc)
    return bytes(data)


@pytest.mark.parametrize("size", [(30_000, 30_000), (65_000, 65_000), (40_000, 300)])
def test_a_header_with_many_pixels_is_refused_before_they_are_decoded(
    size: tuple[int, int],
) -> None:
    width, height = size
    bmp = bytearray(encoded_image(picture(), "BMP"))
    bmp[18:26] = struct.pack("<ii", width, height)
    webp = bytearray(encoded_image(picture(), "WEBP", lossless=True))
    bits = (min(width, 16_384) - 1) | (min(height, 16_384) - 1) << 14
    webp[21:25] = struct.pack("<I", bits)
    gif = bytearray(encoded_image(picture(), "GIF"))
    gif[6:10] = struct.pack("<HH", min(width, 65_000), height)
    for data in (png_header(width, height), bytes(bmp), bytes(gif)):
        with pytest.raises(TooLarge) as error:
            decode_image(data)
        assert "pixels" in error.value.message
    with pytest.raises((TooLarge, InvalidArgument)):
        decode_image(bytes(webp))


@pytest.mark.parametrize(("width", "height"), [(1, 60_000), (60_000, 1), (1, 201), (4000, 19)])
def test_a_narrow_image_is_refused(width: int, height: int) -> None:
    with pytest.raises((InvalidArgument, TooLarge)) as error:
        decode_image(png_header(width, height))
    assert str(width) in error.value.message


def test_sizes_at_their_bounds() -> None:
    check_size(1, RATIO_MAX, 1000)
    check_size(100, 10, 1000)
    with pytest.raises(TooLarge):
        check_size(101, 10, 1000)
    with pytest.raises(InvalidArgument):
        check_size(0, 10, 1000)
    with pytest.raises(InvalidArgument):
        check_size(1, RATIO_MAX + 1, 1000)


@pytest.mark.parametrize("data", [wav(2.0), flac(2.0), mp3(77)], ids=["wav", "flac", "mp3"])
def test_the_seconds_of_a_sound_are_bounded(data: bytes) -> None:
    assert len(check_sound(data, 2.1)) > 0
    with pytest.raises(TooLarge) as error:
        check_sound(data, 1.9)
    assert error.value.data["seconds_max"] == 1.9


def test_a_wav_whose_writer_did_not_know_its_size_gets_its_own() -> None:
    data = wav(1.0)
    unknown = data[:40] + b"\xff\xff\xff\xff" + data[44:]
    assert check_sound(unknown) == check_sound(data) == data
    tagged = data + b"LIST" + struct.pack("<I", 4) + b"abcd"
    assert check_sound(tagged) == data


def changed_wav(at: int, value: bytes) -> bytes:
    data = bytearray(wav(0.5))
    data[at : at + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        changed_wav(20, b"\x02\x00"),  # ADPCM
        changed_wav(22, b"\x00\x00"),  # no channels
        changed_wav(24, b"\x01\x00\x00\x00"),  # 1 Hz: a year of sound
        changed_wav(24, b"\xff\xff\xff\xff"),
        changed_wav(32, b"\x00\x00"),  # blocks of no bytes
        changed_wav(34, b"\x07\x00"),
        changed_wav(40, bytes(4)),
        changed_wav(12, b"fmtX"),
        wav(0.5)[:30],
        wav(0.5)[:44],
        wav(0.001),
        flac(0.5)[:20],
        b"fLaC" + bytes(60),
        flac(0.001),
        b"\xff\xfb\x00\x00" + bytes(500),
        b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f" + mp3(10),
        b"ID3" + bytes(100),
    ],
)
def test_damaged_short_and_compressed_sounds_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument) as error:
        check_sound(data)
    assert error.value.hint


def test_a_file_full_of_beginnings_of_frames_is_given_up() -> None:
    with pytest.raises(InvalidArgument, match="frames"):
        check_sound(mp3(1)[:4] + b"\xff" * 1_000_000)


def test_a_flac_that_promises_years_is_refused() -> None:
    data = bytearray(flac(0.5))
    data[21:26] = b"\xff\xff\xff\xff\xff"
    with pytest.raises(TooLarge):
        check_sound(bytes(data))
