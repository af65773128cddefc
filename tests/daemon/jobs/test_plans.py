"""The decisions on jobs: whose request is next, what is deleted for newer results, and the lines of
the files.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.daemon.jobs import store
from inferd.daemon.jobs.jobs import DAY_S, Space, to_delete, too_old
from inferd.daemon.jobs.runner import (
    JOB_REQUESTS_MAX,
    RETRY_S,
    RETRY_S_MAX,
    Candidate,
    next_job,
    retry_pause_s,
)
from inferd.daemon.jobs.store import (
    NewerRows,
    Store,
    StoredFile,
    number_in,
    read_request,
    result_line,
)
from inferd.scheduler.owner import Owner

BODY = b'{"model": "m", "messages": []}'


def candidate(
    name: str, user: int = 1, running: int = 0, at: float = 0, low: bool = True
) -> Candidate:
    return Candidate(name, user, low, running, at)


def test_the_user_with_the_fewest_requests_comes_first_then_the_older_job() -> None:
    jobs = [
        candidate("a", running=2, at=1),
        candidate("b", running=0, at=3),
        candidate("c", running=0, at=2),
        candidate("d", user=2, running=1, at=9),
    ]
    assert next_job(jobs, jobs, 16) == "d"
    assert next_job(jobs[:3], jobs, 16) == "c"


def test_low_jobs_leave_places_to_others_and_no_job_takes_more_than_its_own() -> None:
    low, response = candidate("low", running=6), candidate("response", user=2, low=False)
    assert next_job([low], [low], 8) == ""
    assert next_job([low, response], [low, response], 8) == "response"
    full = candidate("full", running=JOB_REQUESTS_MAX)
    assert next_job([full], [full], 100) == ""
    assert next_job([low], [low, candidate("x", running=2, low=False)], 8) == ""
    assert next_job([candidate("one")], [], 1) == "one"


def test_pauses_grow_and_are_bounded_and_the_daemons_estimate_counts() -> None:
    pauses = [retry_pause_s(number, None) for number in range(20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (RETRY_S, RETRY_S_MAX)
    assert retry_pause_s(9, 2.0) == 2.0
    assert retry_pause_s(0, 9999) == RETRY_S_MAX


def test_the_oldest_are_deleted_until_there_is_space() -> None:
    spaces = [Space("new", 3, 10), Space("old", 1, 10), Space("middle", 2, 10)]
    assert to_delete(spaces, 0, 0) == []
    assert to_delete(spaces, 11, 0) == ["old", "middle"]
    assert to_delete(spaces, 0, 1) == ["old"]
    assert to_delete(spaces, 31, 0) is None
    assert to_delete(spaces, 0, 4) is None
    assert too_old(spaces, 2 + DAY_S, 1.0) == ["old"]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"not json", "is not a request in JSON"),
        (b"\xff\xfe", "is not a request in JSON"),
        (b"[1]", "is not a request in JSON"),
        (b'{"url": "/v1/embeddings"}', "is not a request in JSON"),
        (b'{"url": "/v1/embeddings", "body": [1]}', "body that is not an object"),
        (b'{"url": "/v1/embeddings", "method": "GET", "body": {}}', "the method 'GET'"),
        (b'{"url": "/etc/passwd", "body": {}}', "the url '/etc/passwd'"),
        (b'{"body": {}}', "the url ''"),
        (b'{"url": "/v1/embeddings", "custom_id": "' + b"x" * 600 + b'", "body": {}}', "600"),
    ],
)
def test_a_line_that_is_not_a_request_is_refused_with_its_number(line: bytes, cause: str) -> None:
    with pytest.raises(InvalidArgument, match=cause) as refused:
        read_request(line, 6, "")
    assert refused.value.data["line"] == 7


def test_a_request_has_the_endpoint_of_its_job_and_a_name() -> None:
    request = read_request(b'{"body": {}}', 2, "/v1/completions")
    assert (request.url, request.custom_id) == ("/v1/completions", "request-3")
    with pytest.raises(InvalidArgument, match="but the job's endpoint is"):
        read_request(b'{"url": "/v1/embeddings", "body": {}}', 2, "/v1/completions")


def test_results_say_which_requests_they_belong_to() -> None:
    line = result_line("batch_1", 17, "mine", 200, b'{"a":\n 1}')
    assert number_in(line) == 17
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line)["response"] == {
        "status_code": 200,
        "request_id": "batch_req_batch_1_17",
        "body": {"a": 1},
    }
    assert number_in(b'{"type": "response.created", "sequence_number": 0}') == 0
    for damaged in (b"", b"\0\0\0", line[:-9], b'{"id": "x"}', b'{"id": 3}'):
        assert number_in(damaged) is None


@pytest.fixture
def opened(tmp_path: Path) -> Store:
    found = Store(tmp_path / "jobs")
    assert found.open() == []
    return found


def test_a_cut_result_is_removed_before_the_next_one(opened: Store) -> None:
    whole = result_line("b", 0, "r0", 200, BODY)
    opened.append("f", 0, whole + b'{"id": "batch_req_b_1", "custom')
    found = opened.read_results("f")
    assert (found.bytes, found.numbers) == (len(whole), [0])
    following = result_line("b", 1, "r1", 200, BODY)
    opened.append("f", found.bytes, following)
    assert opened.read_results("f").numbers == [0, 1]
    assert opened.path("f").read_bytes() == whole + following
    assert opened.path("f").stat().st_mode & 0o777 == 0o600
    assert opened.folder.stat().st_mode & 0o777 == 0o700


def test_requests_are_read_from_any_line_on_without_empty_ones(opened: Store) -> None:
    lines = [b'{"custom_id": "%d", "url": "/v1/embeddings", "body": {}}' % n for n in range(4)]
    opened.append("f", 0, b"\n\n".join(lines))
    assert opened.check_requests("f", "", single=False) == 4
    found = list(opened.scan("f"))
    assert [(line.number, data.strip()) for line, data in found] == list(
        zip((0, 2, 4, 6), lines, strict=True)
    )
    third = found[2][0]
    assert list(opened.scan("f", third.offset, third.number)) == found[2:]
    assert opened.read("f", third.offset, third.size).strip() == lines[2]
    with pytest.raises(InvalidArgument, match="has 4 requests"):
        opened.check_requests("f", "", single=True)


def test_two_requests_with_one_name_and_an_empty_file_are_refused(opened: Store) -> None:
    opened.append("f", 0, b'{"custom_id": "a", "url": "/v1/embeddings", "body": {}}\n' * 2)
    with pytest.raises(InvalidArgument, match="line 2 of the file has the custom_id"):
        opened.check_requests("f", "", single=False)
    opened.append("g", 0, b"\n\n")
    with pytest.raises(InvalidArgument, match="has 0 requests"):
        opened.check_requests("g", "", single=False)


def test_a_line_at_the_bound_is_read_and_a_longer_one_refused(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LINE_BYTES_MAX", 10)
    opened.append("f", 0, b"123456789\n")
    assert len(list(opened.scan("f"))) == 1
    opened.append("f", 0, b"1234567890\n")
    with pytest.raises(TooLarge, match="line 1 of the file has more than 10 bytes"):
        list(opened.scan("f"))


def row(name: str) -> StoredFile:
    return StoredFile(id=name, owner=Owner(7, "l"), name="n", bytes=3, lines=1, created_at=1.5)


def test_rows_survive_and_files_without_a_row_are_deleted(opened: Store) -> None:
    for name in ("kept", "unfinished"):
        opened.create(name)
    opened.save(row("kept"))
    opened.close()
    again = Store(opened.folder)
    assert again.open() == [row("kept")]
    assert again.path("kept").exists()
    assert not again.path("unfinished").exists()
    again.delete(row("kept"))
    assert not again.path("kept").exists()
    assert b"kept" not in b"".join(p.read_bytes() for p in again.folder.iterdir())
    again.close()


def test_rows_of_a_newer_version_are_not_touched(opened: Store) -> None:
    opened.create("kept")
    opened.close()
    path = opened.folder / store.ROWS_FILE
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    before = path.read_bytes()
    with pytest.raises(NewerRows):
        Store(opened.folder).open()
    assert path.read_bytes() == before
    assert opened.path("kept").exists()


def test_damaged_rows_are_set_aside_and_files_stay(opened: Store) -> None:
    opened.create("kept")
    opened.close()
    path = opened.folder / store.ROWS_FILE
    path.write_bytes(b"garbage" * 1000)
    again = Store(opened.folder)
    with pytest.raises(sqlite3.DatabaseError):
        again.open()
    [aside] = opened.folder.glob("*.damaged-*")
    assert aside.read_bytes() == b"garbage" * 1000
    assert opened.path("kept").exists()
    again.save(row("new"))  # the new rows can be used
    again.close()
