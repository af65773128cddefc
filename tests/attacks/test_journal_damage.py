"""Flipped bits in the journal's header, which must not switch persistence off."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.sessions.journal.journal_file import JournalFile
from tests.sessions.journal.test_journal import a_past, saved

HEADER_BYTES = 100
"""The header of an SQLite file."""
VERSION = range(60, 64)
CHECKSUM = range(68, 72)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a journal with two sessions."""
    file = JournalFile(tmp_path_factory.mktemp("intact") / "sessions.db")
    file.open()
    file.write([saved("a", a_past("hello")), saved("b", a_past("bye"))])
    file.close()
    return file.path.read_bytes()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder in memory: a disk would take a minute for all bits."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def damaged(intact: bytes, folder: Path, byte: int, bit: int) -> JournalFile:
    """Return a journal with one bit of its header flipped."""
    data = bytearray(intact)
    data[byte] ^= 1 << bit
    path = folder / f"{byte}-{bit}" / "sessions.db"
    path.parent.mkdir()
    path.write_bytes(data)
    return JournalFile(path)


@pytest.mark.parametrize("byte", [*VERSION, *CHECKSUM])
def test_a_flipped_bit_in_the_version_costs_no_session(
    intact: bytes, folder: Path, byte: int
) -> None:
    for bit in range(8):
        file = damaged(intact, folder, byte, bit)
        found = file.open()
        assert {s.session_id for s in found.sessions} == {"a", "b"}
        assert found.set_aside is not None and "version" in found.cause
        file.write([saved("new")])
        file.close()
        assert [s.session_id for s in file.open().sessions] == ["new"]
        file.close()


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_no_flipped_bit_in_the_header_stops_the_journal(
    intact: bytes, folder: Path, byte: int
) -> None:
    for bit in range(8):
        file = damaged(intact, folder, byte, bit)
        file.open()
        file.write([saved("new")])
        file.close()
        assert "new" in {s.session_id for s in file.open().sessions}
        file.close()
