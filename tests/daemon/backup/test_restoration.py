"""Restorations that are killed at each line, and archives that are damaged."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import inferd.daemon.backup
import inferd.daemon.jobs.store
from inferd.backends.errors import BackendError, InvalidArgument, NotFound
from inferd.daemon.backup import (
    MANAGED,
    finish_restoration,
    restore_backup,
    write_backup,
)
from inferd.daemon.jobs.store import Store, StoredFile, StoredJob
from inferd.daemon.state_files import KV_DIR
from inferd.scheduler import Owner
from inferd.sessions.entries import HistoryEntry, SessionFacts, encode
from inferd.sessions.journal.journal_file import JournalFile, SavePast
from tests.changing_folders import changing

pytestmark = pytest.mark.process  # forks processes that kill themselves
KV_FILE = "kv/echo-1/1000/0a1b"
SAVED_AT, NOW = 1000.0, 9000.0
FILES = {inferd.daemon.backup.__file__}


def save_session(path: Path, name: str) -> JournalFile:
    """Save a session, and return the open journal."""
    file = JournalFile(path)
    file.open()
    facts, past = encode(SessionFacts(model="echo")), encode(HistoryEntry())
    file.write([SavePast(owner=Owner(1000), session_id=name, facts=facts, past=past, at=1.0)])
    return file


def sessions_of(path: Path) -> list[str]:
    file = JournalFile(path)
    found = file.open()
    file.close()
    assert found.set_aside is None
    return [s.session_id for s in found.sessions]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state whose daemon was killed, with the session `old`; its log is not empty."""
    state, crashed = tmp_path / "writing", tmp_path / "state"
    state.mkdir()
    files = [save_session(state / name, "old") for name in ("sessions.db", "states.db")]
    (state / "models.json").write_text("old")
    (state / "starts").write_text("7")
    kv = state / KV_FILE
    kv.parent.mkdir(parents=True)
    kv.write_bytes(b"old")
    shutil.copytree(state, crashed)
    for file in files:
        file.close()
    assert (crashed / "sessions.db-wal").stat().st_size
    return crashed


@pytest.fixture
def backup(tmp_path: Path) -> bytes:
    """A backup with the session `new`, KV files and no named states."""
    state = tmp_path / "saved"
    state.mkdir()
    file = save_session(state / "sessions.db", "new")
    (state / "models.json").write_text("new")
    (state / KV_FILE).parent.mkdir(parents=True)
    (state / KV_FILE).write_bytes(b"new")
    (state / KV_FILE).with_name(".unfinished").write_bytes(b"")
    os.utime(state / KV_FILE, (5, 5))
    target = io.BytesIO()
    manifest = write_backup(state, target, SAVED_AT, kv=True)
    file.close()
    assert (sorted(manifest.files), manifest.kv_files) == (["models.json", "sessions.db"], 1)
    return target.getvalue()


def content(state: Path) -> dict[str, bytes]:
    """Return the files of a state."""
    paths = [p for name in MANAGED for p in (state / name, *(state / name).rglob("*"))]
    return {str(p.relative_to(state)): p.read_bytes() for p in paths if p.is_file()}


def test_a_restored_state_is_the_saved_one_and_the_old_one_is_kept(
    state: Path, backup: bytes
) -> None:
    old = content(state)
    aside = restore_backup(io.BytesIO(backup), state, NOW)
    assert aside == state / "before-restore-1"
    assert content(aside) == old and sessions_of(aside / "sessions.db") == ["old"]
    assert sorted(content(state)) == [KV_FILE, "models.json", "sessions.db"]
    assert sessions_of(state / "sessions.db") == ["new"]
    assert (state / KV_FILE).read_bytes() == b"new" and (state / KV_FILE).stat().st_mtime == 5
    assert (state / "starts").read_text() == "7", "no handle is used again"
    assert not [p for p in state.iterdir() if p.name.startswith("restore.")]
    for path in state.rglob("*"):
        if path.is_relative_to(aside) or path.name == "starts":
            continue
        assert path.stat().st_mode & 0o077 == 0, path
    assert restore_backup(io.BytesIO(backup), state, NOW) == state / "before-restore-2"


def test_sessions_do_not_age_while_they_are_in_a_backup(state: Path, backup: bytes) -> None:
    restore_backup(io.BytesIO(backup), state, NOW)
    assert dates_of(state) == [1.0 + NOW - SAVED_AT]
    restore_backup(io.BytesIO(backup), state, SAVED_AT - 500)
    assert dates_of(state) == [1.0], "the clock was set back"


def dates_of(state: Path) -> list[float]:
    file = JournalFile(state / "sessions.db")
    found = file.open()
    file.close()
    return [s.at for s in found.sessions]


def killed_at(line: int, work: Callable[[], object]) -> bool:
    """Run *work* in a child that kills itself before its n-th *line* of these modules; return
    whether there is such a line.
    """
    child = os.fork()
    if child == 0:
        left = line

        def count(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in FILES:
                return None
            left -= event == "line"
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        try:
            sys.settrace(count)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def lines_after_changes(state: Path, work: Callable[[], object]) -> list[int]:
    """Run *work*, and return the numbers of its lines before which a file in *state* had changed: a
    kill at any other line leaves the same files as one of these.
    """
    numbers: list[int] = []
    last: set[tuple[Path, int, int, int]] = set()
    number = 0

    def note(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal number, last
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            number += 1
            stats = [(path, path.lstat()) for path in state.rglob("*")]
            now = {(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats}
            if now != last:
                numbers.append(number)
            last = now
        return note

    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(None)
    return numbers


def test_a_kill_at_any_line_leaves_the_old_or_the_new_state(
    state: Path, backup: bytes, tmp_path: Path
) -> None:
    old = content(state)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(state, whole)
    restore = partial(restore_backup, io.BytesIO(backup), whole, NOW)
    lines = lines_after_changes(whole, restore)
    new = content(whole)
    found = []
    for number, line in enumerate(lines):
        shutil.copytree(state, killed)
        assert killed_at(line, partial(restore_backup, io.BytesIO(backup), killed, NOW))
        # The next start is killed, too, and the one after it is not.
        killed_at(1 + 7 * number % 40, partial(finish_restoration, killed))
        finish_restoration(killed)
        assert not [p for p in killed.iterdir() if p.name.startswith("restore.")]
        assert (killed / "starts").read_text() == "7"
        asides = list(killed.glob("before-restore-*"))
        found.append(bool(asides))
        if asides:
            assert content(killed) == new and [content(p) for p in asides] == [old], line
        else:
            assert content(killed) == old, line
        shutil.rmtree(killed)
    assert found == sorted(found) and {*found} == {False, True}
    assert len(found) > 25, "all changes of a restoration were tried"


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def with_members(backup: bytes, *added: tuple[tarfile.TarInfo, bytes], first: bool) -> bytes:
    """Return a backup with other members before or after its own."""
    with tarfile.open(fileobj=io.BytesIO(backup)) as old:
        own = [(info, old.extractfile(info).read()) for info in old]  # type: ignore[union-attr]
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as new:
        for info, data in (*added, *own) if first else (*own, *added):
            new.addfile(info, io.BytesIO(data))
    return target.getvalue()


@pytest.mark.parametrize(
    "added",
    [
        member("../outside", b"x"),
        member("/tmp/outside", b"x"),
        member("lock", b"x"),
        member("kv/../../x/y", b"x"),
        member("kv/a/b/.c", b"x"),
        member("kv", type=tarfile.SYMTYPE, linkname="/etc"),
        member("kv/a/b/c", type=tarfile.LNKTYPE, linkname="sessions.db"),
        member("sessions.db", type=tarfile.FIFOTYPE),
        member("sessions.db", b"x"),
        member("states.db", b"x"),
        member("kv/a/b/c", b"x"),
        member("jobs/jobs.db", b"x"),
        member("jobs/file-1.jsonl", b"x"),
        member("jobs/../x.jsonl", b"x"),
    ],
    ids=lambda m: f"{m[0].name}-{m[0].type.decode()}",
)
@pytest.mark.parametrize("first", [True, False])
def test_other_members_than_those_of_a_backup_are_refused(
    state: Path, backup: bytes, added: tuple[tarfile.TarInfo, bytes], first: bool
) -> None:
    old = content(state)
    with pytest.raises(InvalidArgument, match="not a backup, or is damaged"):
        restore_backup(io.BytesIO(with_members(backup, added, first=first)), state, NOW)
    assert content(state) == old
    assert not [p for p in state.iterdir() if p.name.startswith(("restore.", "before-"))]


def test_a_backup_that_was_cut_off_or_changed_is_refused(state: Path, backup: bytes) -> None:
    old, [end] = content(state), [backup.index(b'{"format"')]
    broken = [backup[:size] for size in (0, 100, 512, 5000, end, end + 20)]
    places = (0, 600, 4000, backup.index(KV_FILE.encode()), end + 3, end + 60)
    broken += [backup[:at] + b"\xff" + backup[at + 1 :] for at in places]
    broken += [b"", b"x" * 10_000, backup[:600] * 3]
    for number, data in enumerate(broken):
        with pytest.raises(InvalidArgument, match=r"not a backup|format"):
            restore_backup(io.BytesIO(data), state, NOW)
            pytest.fail(f"the backup {number} was restored")
        assert content(state) == old
    assert not [p for p in state.iterdir() if p.name.startswith(("restore.", "before-"))]


def test_a_backup_of_a_newer_version_is_refused(state: Path, backup: bytes) -> None:
    old = content(state)
    newer = backup.replace(b'{"format":1', b'{"format":9')
    with pytest.raises(InvalidArgument, match="the format 9, here 1"):
        restore_backup(io.BytesIO(newer), state, NOW)
    assert content(state) == old


def test_a_directory_without_a_state_has_none_to_save(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no state of a daemon"):
        write_backup(tmp_path, io.BytesIO(), NOW)


def test_no_backup_is_made_of_a_restoration_that_was_interrupted(state: Path) -> None:
    (state / "restore.ready").mkdir()
    with pytest.raises(BackendError, match="was interrupted"):
        write_backup(state, io.BytesIO(), NOW)


def test_a_backup_leaves_out_folders_that_are_deleted_meanwhile(state: Path) -> None:
    kept = state / "media" / "1000" / sha256(b"content").hexdigest()
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"content")
    changed = [state / KV_DIR / f"echo-{n}" / "1000" / "0a1b" for n in range(2, 10)]
    with changing(*changed, *(kept.parents[1] / str(n) / kept.name for n in range(2000, 2010))):
        for _ in range(30):
            target = io.BytesIO()
            write_backup(state, target, SAVED_AT, kv=True)
            with tarfile.open(fileobj=io.BytesIO(target.getvalue())) as archive:
                assert {KV_FILE, f"media/1000/{kept.name}"} <= {*archive.getnames()}


def test_a_backup_has_the_images_of_sessions_and_checks_their_hashes(
    state: Path, tmp_path: Path
) -> None:
    saved, target = tmp_path / "saved", io.BytesIO()
    saved.mkdir()
    file = save_session(saved / "sessions.db", "new")
    name = f"media/1000/{sha256(b'the cat').hexdigest()}"
    (saved / name).parent.mkdir(parents=True)
    (saved / name).write_bytes(b"the cat")
    (saved / name).with_name(".new-1").write_bytes(b"half of")
    (state / "media" / "1000").mkdir(parents=True)
    (state / "media" / "1000" / ("0" * 64)).write_bytes(b"old")
    manifest = write_backup(saved, target, SAVED_AT)
    file.close()
    assert manifest.media_files == 1

    with pytest.raises(InvalidArgument, match="is damaged"):
        restore_backup(io.BytesIO(target.getvalue().replace(b"the cat", b"the dog")), state, NOW)
    aside = restore_backup(io.BytesIO(target.getvalue()), state, NOW)

    assert [path.read_bytes() for path in (state / "media").rglob("*") if path.is_file()] == [
        b"the cat"
    ]
    assert aside is not None
    assert (aside / "media" / "1000" / ("0" * 64)).read_bytes() == b"old"


def job_rows(folder: Path, *names: str) -> Store:
    """Save ended jobs, and return the open rows."""
    store = Store(folder)
    store.open()
    for name in names:
        store.create(f"file-{name}")
        store.append(f"file-{name}", 0, f"{name}\n".encode())
        common: dict[str, Any] = {"owner": Owner(1000), "created_at": 5.0}
        store.save(StoredFile(id=f"file-{name}", name=name, bytes=len(name) + 1, lines=1, **common))
        others: dict[str, Any] = {"file": f"file-{name}", "expires_at": 2000.0, "requests": 1}
        others |= {"gateway": 1000, "on_behalf_of": "", "endpoint": "", "priority": "low"}
        others |= {"events": False, "models": None, "metadata": {}}
        store.save(StoredJob(id=name, **common, **others))
    return store


def rows_of(folder: Path) -> dict[str, StoredFile | StoredJob]:
    store = Store(folder)
    rows = {row.id: row for row in store.open()}
    store.close()
    return rows


def test_a_backup_has_jobs_of_a_running_daemon_and_they_do_not_age_in_it(
    state: Path, tmp_path: Path
) -> None:
    saved, target = tmp_path / "saved", io.BytesIO()
    store = job_rows(saved / "jobs", "new")  # an open one, whose rows are in its log
    store.create("file-unfinished-upload")
    job_rows(state / "jobs", "old").close()
    manifest = write_backup(saved, target, SAVED_AT)
    store.close()
    assert (sorted(manifest.files), manifest.job_files) == (["jobs/jobs.db"], 2)
    before = content(state)
    damaged = target.getvalue().replace(b"\0new\n\0", b"\0now\n\0")
    assert damaged != target.getvalue()
    with pytest.raises(InvalidArgument, match="do not match its manifest"):
        restore_backup(io.BytesIO(damaged), state, NOW)
    assert content(state) == before

    aside = restore_backup(io.BytesIO(target.getvalue()), state, NOW)
    assert aside is not None and set(rows_of(aside / "jobs")) == {"file-old", "old"}
    assert (aside / "jobs" / "file-old.jsonl").read_text() == "old\n"
    for path in (state / "jobs").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    rows = rows_of(state / "jobs")
    assert set(rows) == {"file-new", "new"}
    assert {path.name for path in (state / "jobs").glob("*.jsonl")} == {"file-new.jsonl"}
    assert (state / "jobs" / "file-new.jsonl").read_text() == "new\n"
    job = rows["new"]
    assert isinstance(job, StoredJob)
    assert (job.created_at, job.ended_at) == (5.0 + NOW - SAVED_AT, None)
    assert job.expires_at == 2000.0 + NOW - SAVED_AT


def test_jobs_of_a_newer_version_are_neither_saved_nor_restored(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, target = tmp_path / "saved", io.BytesIO()
    job_rows(saved / "jobs", "new").close()
    write_backup(saved, target, SAVED_AT)
    before = content(state)
    monkeypatch.setattr(inferd.daemon.jobs.store, "SCHEMA", 0)
    with pytest.raises(InvalidArgument, match="the jobs of the backup cannot be used"):
        restore_backup(io.BytesIO(target.getvalue()), state, NOW)
    assert content(state) == before
    with pytest.raises(BackendError, match="a newer version of inferd"):
        write_backup(saved, io.BytesIO(), SAVED_AT)
