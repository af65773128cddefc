"""States that move to another machine are those of their new owner, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.scheduler.kv.file_format import (
    KvDamaged,
    KvKey,
    StateWriter,
    export_head,
    read_part,
    read_state,
    write_state,
)

STATE = bytes(range(256)) * 40
PART = 1000


def moved(tmp_path: Path, *, damaged: bool = False) -> StateWriter:
    """Return the writer of a state that has arrived in parts from another machine."""
    key = KvKey(1000, b"\1\0\0\0", "id:diary", False, ("a*1",))
    path = tmp_path / "here" / "echo-1" / "1000" / key.name
    write_state(path, "echo-1", key, STATE, 2.5)
    head, offset = export_head(path)
    writer = StateWriter(tmp_path / "there", head, 2000, "id:diary")
    for at in range(offset, offset + head.size, PART):
        part = read_part(path, at, PART)
        writer.write(part[:-1] + b"x" if damaged else part)
    return writer


def test_a_moved_state_belongs_to_its_new_owner(tmp_path: Path) -> None:
    file = moved(tmp_path).finish()
    assert (file.key.owner, file.key.session, file.seconds) == (2000, "id:diary", 2.5)
    assert file.path.stat().st_size == file.size
    assert read_state(file.path, file.key) == STATE


def test_a_damaged_state_leaves_no_file(tmp_path: Path) -> None:
    writer = moved(tmp_path, damaged=True)
    with pytest.raises(KvDamaged, match="checksum"):
        writer.finish()
    assert [path for path in (tmp_path / "there").rglob("*") if path.is_file()] == []
