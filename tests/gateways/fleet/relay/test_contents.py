"""Contents of descriptors in the frames of an entry: memfds, order, bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from inferd.backends.errors import InvalidArgument, ProtocolError, TooLarge
from inferd.gateways.fleet.link import CONTENTS_MAX, ContentKind
from inferd.gateways.fleet.relay import pipe as module
from inferd.gateways.fleet.relay.pipe import ContentReader, PassedFiles, is_content
from inferd.ipc.messages import Kind
from inferd.wire.frames import FRAME_BYTES_MAX, pack_frame
from tests.processes import open_descriptors

PLAIN = pack_frame([1, 7, "models", {}])
REQUEST = pack_frame([1, 8, "set_input", {"context": 1, "index": 0, "tensor": {"fd": 0}}])


def part(data: bytes) -> bytes:
    return pack_frame([ContentKind.PART, data])


END = pack_frame([ContentKind.END])
DROP = pack_frame([ContentKind.DROP])
WITH = pack_frame([ContentKind.REQUEST, REQUEST[4:]])


@pytest.fixture
def reader() -> Iterator[ContentReader]:
    found = ContentReader(PassedFiles())
    yield found
    found.close()


def contents_of(descriptors: tuple[int, ...]) -> list[bytes]:
    found = []
    for descriptor in descriptors:
        found.append(os.pread(descriptor, 1 << 20, 0))
        os.close(descriptor)
    return found


def open_files() -> int:
    return len(open_descriptors())


def test_frames_without_contents_pass_unchanged(reader: ContentReader) -> None:
    assert [tuple(p) for p in reader.read(PLAIN + PLAIN)] == [(PLAIN + PLAIN, ())]
    assert not is_content(PLAIN[4:]) and all(is_content(f[4:]) for f in (END, DROP, WITH))
    assert not {int(kind) for kind in ContentKind} & {int(kind) for kind in Kind}


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_request_gets_its_contents_however_they_arrive(reader: ContentReader, step: int) -> None:
    data = PLAIN + part(b"ab") + part(b"c") + END + PLAIN + part(b"") + END + WITH + PLAIN
    found = [
        passage
        for start in range(0, len(data), step)
        for passage in reader.read(data[start : start + step])
    ]
    assert b"".join(p.data for p in found) == PLAIN + PLAIN + REQUEST + PLAIN
    (passed,) = (p for p in found if p.descriptors)
    assert passed.data == REQUEST, "the request itself, and no other, carries them"
    assert contents_of(passed.descriptors) == [b"abc", b""]


def test_dropped_contents_are_closed_and_belong_to_no_later_request(reader: ContentReader) -> None:
    before = open_files()
    assert list(reader.read(part(b"a") + END + part(b"b") + DROP)) == []
    assert open_files() == before
    (passed,) = reader.read(part(b"c") + END + WITH)
    assert contents_of(passed.descriptors) == [b"c"]


def test_contents_have_a_size(reader: ContentReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTENTS_BYTES_MAX", 10)
    assert list(reader.read(part(b"x" * 10) + END)) == []
    with pytest.raises(ProtocolError, match="limits"):
        list(reader.read(part(b"x")))


def test_contents_have_a_number(reader: ContentReader) -> None:
    assert list(reader.read(END * CONTENTS_MAX)) == []
    with pytest.raises(ProtocolError, match="limits"):
        list(reader.read(END))


def test_a_frame_has_a_size(reader: ContentReader) -> None:
    with pytest.raises(TooLarge):
        list(reader.read((FRAME_BYTES_MAX + 2000).to_bytes(4, "little")))


@pytest.mark.parametrize("items", [[100, 5], [102, "text"], [100, None]])
def test_a_frame_of_contents_that_cannot_be_read_is_refused(
    reader: ContentReader, items: list[object]
) -> None:
    with pytest.raises(ProtocolError, match="contents"):
        list(reader.read(pack_frame(items)))


def test_an_end_of_the_connection_closes_all() -> None:
    before, reader = open_files(), ContentReader(PassedFiles())
    list(reader.read(part(b"a") + END + part(b"b")))
    assert open_files() == before + 2
    reader.close()
    assert open_files() == before


def test_a_file_that_was_not_passed_is_refused(reader: ContentReader) -> None:
    with pytest.raises(InvalidArgument, match="was not passed"):
        list(reader.read(pack_frame([ContentKind.PASSED, b"x" * 16])))
