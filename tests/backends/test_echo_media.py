"""Images and sounds of echo models."""

from __future__ import annotations

import fcntl
import os

import pytest

from inferd.backends.echo.media import (
    ECHO_MEDIA_TOKENS_MAX,
    encode_echo_media,
    read_echo_media,
)
from inferd.backends.echo.options import EchoOptions
from inferd.backends.errors import InvalidArgument
from inferd.backends.media_process import ItemPiece, TextPiece
from inferd.backends.shared_memory import sealed_memory


@pytest.mark.parametrize(
    ("length", "tokens_max", "size"),
    [(0, 0, 1), (63, 0, 1), (64, 0, 2), (640, 4, 4), (1 << 20, 0, ECHO_MEDIA_TOKENS_MAX)],
)
def test_the_size_of_an_item_depends_on_the_length_alone(
    length: int, tokens_max: int, size: int
) -> None:
    assert read_echo_media(bytes(length), "image", tokens_max, EchoOptions()) == [
        ItemPiece(size, size)
    ]


def test_tiles_have_line_breaks_between_them() -> None:
    pieces = read_echo_media(b"x", "audio", 0, EchoOptions(media_tiles=3))
    line_break, item = TextPiece([10]), ItemPiece(1, 1)
    assert pieces == [item, line_break, item, line_break, item]
    encoded = encode_echo_media(pieces)
    assert encoded.causal == [True] * 3
    for descriptor in encoded.descriptors:
        assert os.pread(descriptor, 100, 0) == bytes(16)
        os.close(descriptor)


def test_contents_with_the_mark_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        read_echo_media(b"refuse", "image", 0, EchoOptions())


def test_sealed_memory_cannot_change() -> None:
    memory = sealed_memory([b"da", b"ta"])
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 1)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, 0)
    os.close(memory)
