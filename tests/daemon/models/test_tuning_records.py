"""Records of measured settings on disk: replaced at once, bounded, and ignored if damaged."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from inferd.backends.tuning_choice import ModelShape, Setting, TuningRecord
from inferd.daemon.models.tuning_records import (
    RECORDS_MAX,
    TUNING_BYTES_MAX,
    TUNING_VERSION,
    TuningRecords,
)
from inferd.daemon.state_files import TUNING_FILE

SHAPE = ModelShape(
    architecture="llama", layers=30, embedding=576, heads=9, kv_heads=3, head_k=64, head_v=64,
    size_bytes=145_000_000,
)  # fmt: skip
RECORD = TuningRecord(shape=SHAPE, cpu="c", build="b", chosen=Setting(True, 1, 2), reason="r")


def records_in(records: TuningRecords) -> tuple[TuningRecord, ...]:
    return records.of_machine("c", "b")


def test_a_stored_record_is_read_by_another_process(tmp_path: Path) -> None:
    other = TuningRecords(tmp_path / "state")
    assert records_in(other) == ()
    TuningRecords(tmp_path / "state").store(RECORD)
    assert records_in(other) == (RECORD,)
    assert (tmp_path / "state" / TUNING_FILE).stat().st_mode & 0o777 == 0o600


def test_a_record_replaces_the_one_of_its_shape(tmp_path: Path) -> None:
    records = TuningRecords(tmp_path)
    later = msgspec.structs.replace(RECORD, chosen=Setting(False), requested=True)
    other_build = msgspec.structs.replace(RECORD, build="other")
    for record in (RECORD, other_build, later):
        records.store(record)
    assert records_in(records) == (later,)
    assert records.of_machine("c", "other") == (other_build,)


def test_a_requested_record_is_replaced_only_by_a_requested_one(tmp_path: Path) -> None:
    records = TuningRecords(tmp_path)
    requested = msgspec.structs.replace(RECORD, chosen=Setting(False), requested=True)
    again = msgspec.structs.replace(requested, chosen=Setting(True))
    for record, kept in ((requested, requested), (RECORD, requested), (again, again)):
        records.store(record)
        assert records_in(records) == (kept,)


def test_the_oldest_record_is_dropped_at_the_bound(tmp_path: Path) -> None:
    records = TuningRecords(tmp_path)
    for n in range(RECORDS_MAX + 1):
        shape = msgspec.structs.replace(SHAPE, layers=n)
        records.store(msgspec.structs.replace(RECORD, shape=shape))
    kept = [record.shape.layers for record in records_in(records)]
    assert kept == list(range(1, RECORDS_MAX + 1))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 1, "records": [{"shape": 1}]}',
        json.dumps({"version": TUNING_VERSION + 1, "records": []}).encode(),
        b" " * (TUNING_BYTES_MAX + 1),
    ],
)
def test_a_file_that_cannot_be_read_is_ignored_with_one_log_line(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / TUNING_FILE).write_bytes(content)
    records = TuningRecords(tmp_path)
    with capture_logs() as logged:
        assert records_in(records) == records_in(records) == ()
    assert [event["event"] for event in logged] == ["tuning.ignored"]
    records.store(RECORD)
    assert records_in(records) == (RECORD,)


def test_a_failed_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = TuningRecords(tmp_path)
    records.store(RECORD)

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        records.store(msgspec.structs.replace(RECORD, reason="later"))
    assert records_in(TuningRecords(tmp_path)) == (RECORD,)
