"""Images and sounds in descriptors: only files are read, and of the size that was checked."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.ipc.server.descriptors import content_size, read_content


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """The descriptor of a file of 1000 bytes."""
    path = tmp_path / "image.png"
    path.write_bytes(bytes(range(250)) * 4)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_a_file_is_read_from_its_beginning_wherever_its_position_is(file: int) -> None:
    os.lseek(file, 0, os.SEEK_END)
    assert content_size(file, 1000) == 1000
    assert read_content(file, 1000) == bytes(range(250)) * 4


def test_a_file_above_the_bound_is_refused_before_it_is_read(file: int) -> None:
    with pytest.raises(TooLarge) as caught:
        content_size(file, 999)
    assert caught.value.data == {"bytes": 1000, "media_bytes_max": 999}
    os.ftruncate(file, 1 << 40)  # a sparse file, as large as a file may be
    with pytest.raises(TooLarge):
        content_size(file, 999)


@pytest.mark.parametrize("size", [0, 999, 1001, 1 << 40])
def test_a_file_that_changes_its_size_is_refused(file: int, size: int) -> None:
    checked = content_size(file, 1000)
    os.ftruncate(file, size)
    with pytest.raises(InvalidArgument, match="has changed while it was read"):
        read_content(file, checked)


def test_what_is_no_file_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    one, two = socket.socketpair()
    others = [os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK), one.detach(), two.detach()]
    others += [os.open(path, os.O_RDONLY) for path in ("/dev/zero", "/dev/null", tmp_path)]
    try:
        for descriptor in others:
            with pytest.raises(InvalidArgument, match="not that of a file"):
                content_size(descriptor, 1000)
    finally:
        for descriptor in others:
            os.close(descriptor)


def test_a_descriptor_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "write-only", os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, b"abc")
        assert content_size(descriptor, 10) == 3
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read_content(descriptor, 3)
    finally:
        os.close(descriptor)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        content_size(descriptor, 10)


def test_a_file_of_the_kernel_without_a_size_is_refused() -> None:
    descriptor = os.open("/proc/self/status", os.O_RDONLY)
    try:
        with pytest.raises(InvalidArgument, match="has changed while it was read"):
            read_content(descriptor, content_size(descriptor, 1000))
    finally:
        os.close(descriptor)
