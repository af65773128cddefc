"""Frames: splitting a stream into them however it arrives, and their bounds."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.backends.errors import TooLarge
from inferd.wire.frames import ANY_LENGTH, FrameReader, pack_frame

BYTES_MAX = 300
MESSAGES = st.lists(st.one_of(st.integers(0, 1 << 63), st.binary(max_size=100)), max_size=8)
CHUNKS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


def chunks_of(stream: bytes, sizes: list[int]) -> list[bytes]:
    """Return *stream* in pieces, whose sizes repeat *sizes*."""
    chunks: list[bytes] = []
    at = 0
    while at < len(stream):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(stream[at : at + size])
        at += size
    return chunks


@given(st.lists(MESSAGES, max_size=6), CHUNKS, st.integers(0, 10))
@example([[], [1]], [1], 0)
@example([[b"x" * 100], [2]], [4], 3)
def test_frames_are_the_same_however_the_stream_arrives(
    messages: list[list[Any]], sizes: list[int], cut: int
) -> None:
    stream = b"".join(map(pack_frame, messages))
    last = pack_frame([b"unfinished"])[:cut]
    reader = FrameReader(ANY_LENGTH)
    found = [
        frame for chunk in chunks_of(stream + last, sizes) for frame in reader.read_frames(chunk)
    ]
    assert [msgspec.msgpack.decode(frame) for frame in found] == messages
    assert reader.pending == cut


@given(st.binary(max_size=600), CHUNKS)
@example(struct.pack("<I", BYTES_MAX) + bytes(BYTES_MAX), [7])
@example(struct.pack("<I", BYTES_MAX + 1), [4])
def test_any_bytes_are_split_or_refused_alike_and_never_buffered_past_the_bound(
    stream: bytes, sizes: list[int]
) -> None:
    whole, refused = read_all(FrameReader(BYTES_MAX), [stream])
    reader = FrameReader(BYTES_MAX)
    assert read_all(reader, chunks_of(stream, sizes)) == (whole, refused)
    assert all(len(frame) <= BYTES_MAX for frame in whole)
    assert refused or reader.pending < 4 + BYTES_MAX


def read_all(reader: FrameReader, chunks: list[bytes]) -> tuple[list[bytes], bool]:
    """Return the frames of *chunks*, and whether the rest was refused."""
    found: list[bytes] = []
    try:
        for chunk in chunks:
            for frame in reader.read_frames(chunk):
                found.append(frame)  # noqa: PERF402
    except TooLarge:
        return found, True
    return found, False
