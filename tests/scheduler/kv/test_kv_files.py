"""KV states on disk: a written state is read back or refused, whatever happens to the files."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inferd.scheduler.kv.disk import (
    QUEUE_BYTES_MAX,
    QUEUE_COUNT_MAX,
    FileFailed,
    FileFound,
    FileRead,
    FilesDeleted,
    FileWritten,
    KvFiles,
)
from inferd.scheduler.kv.file_format import HEADER_BYTES_MAX, KvFile, KvKey
from inferd.scheduler.messages import pack_tokens
from tests.repetitions import repetitions

KEY = KvKey(1000, pack_tokens([1, 2, 3]), "chat", adapters=("a",))
STATE = bytes(range(256)) * 20
Result = FileFound | FileWritten | FileRead | FilesDeleted | FileFailed


@contextmanager
def opened(directory: Path, fingerprint: str = "model") -> Iterator[KvFiles]:
    files = KvFiles(directory, fingerprint)
    try:
        yield files
    finally:
        files.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KvFiles]:
    with opened(tmp_path / "kv") as files:
        yield files


def answers(files: KvFiles, count: int = 1) -> list[Result]:
    """Wait for *count* results on the descriptor, as the engine does."""
    results: list[Result] = []
    while len(results) < count:
        assert select.select([files], [], [], 30)[0], "no result arrived"
        results += files.results()
    assert len(results) == count
    return results


def written(files: KvFiles, key: KvKey = KEY, state: bytes = STATE) -> KvFile:
    assert files.queue_write(key, state, 1.5)
    (result,) = answers(files)
    assert isinstance(result, FileWritten), result
    return result.file


def read(files: KvFiles, file: KvFile) -> Result:
    assert files.queue_read(file)
    (result,) = answers(files)
    return result


def refusal(files: KvFiles, file: KvFile) -> str:
    """Read a file that must be refused; return the cause."""
    result = read(files, file)
    assert isinstance(result, FileFailed) and (result.key, result.operation) == (file.key, "read")
    assert not os.path.lexists(file.path), "a refused file was left"
    return result.cause


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


class Gated(KvFiles):
    """Files whose thread does no job while the gate is closed."""

    def __init__(self, directory: Path) -> None:
        self.gate = threading.Event()
        super().__init__(directory, "model")

    def _run_job(self, job: Any, size: int) -> Any:
        assert self.gate.wait(30)
        return super()._run_job(job, size)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    files = Gated(tmp_path / "kv")
    yield files
    files.gate.set()
    files.close()


# Writing and reading.


def test_a_written_state_is_read(files: KvFiles) -> None:
    file = written(files)

    assert read(files, file) == FileRead(file, STATE)
    assert file.size == file.path.stat().st_size
    assert (file.key, file.seconds) == (KEY, 1.5)


@pytest.mark.parametrize("state", [b"", b"x", bytes(9 << 20)], ids=["empty", "small", "large"])
def test_a_state_of_any_size_is_read(files: KvFiles, state: bytes) -> None:
    assert read(files, file := written(files, state=state)) == FileRead(file, state)


def test_only_the_owner_of_the_process_can_read_files(files: KvFiles, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = written(files).path
    finally:
        os.umask(umask)

    assert path == tmp_path / "kv" / "model" / "1000" / KEY.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, tmp_path / "kv"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_each_part_of_a_key_changes_the_name() -> None:
    keys = [
        KEY,
        replace(KEY, owner=1001),
        replace(KEY, tokens=pack_tokens([1, 2, 4])),
        replace(KEY, session="other"),
        replace(KEY, private=True),
        replace(KEY, adapters=("a", "b")),
    ]
    assert len({key.name for key in keys}) == len(keys)
    assert KEY.name == replace(KEY).name and len(KEY.name) == 40


def test_one_key_is_one_file_with_the_last_state(files: KvFiles) -> None:
    written(files)
    file = written(files, state=b"newer")

    assert read(files, file) == FileRead(file, b"newer")
    assert files.scan() == [file]


def test_reads_precede_writes(files: KvFiles, gated: Gated) -> None:
    file = written(files)
    keys = [replace(KEY, session=str(i)) for i in range(3)]

    assert all(gated.queue_write(key, STATE, 1) for key in keys)
    assert gated.queue_read(file)
    gated.gate.set()
    assert gated.flush(30)

    kinds = [type(result) for result in gated.results()]
    # The thread may have taken the first write before the read was there.
    assert kinds in (
        [FileRead, FileWritten, FileWritten, FileWritten],
        [FileWritten, FileRead, FileWritten, FileWritten],
    )


def test_a_delete_comes_after_the_writes_before_it(gated: Gated) -> None:
    other = replace(KEY, session="other")
    assert gated.queue_write(KEY, STATE, 1)
    gated.queue_delete([KEY])
    assert gated.queue_write(other, STATE, 1)
    gated.gate.set()

    assert [type(result) for result in answers(gated, 3)] == [
        FileWritten,
        FilesDeleted,
        FileWritten,
    ]
    assert [file.key for file in gated.scan()] == [other]


def test_a_delete_is_pending_until_it_is_done(files: KvFiles) -> None:
    file = written(files)
    assert files.pending == 0

    files.queue_delete([file.key])
    assert files.pending == 1
    assert files.flush(30)

    expected: list[Result] = [FilesDeleted((file.key,))]
    assert files.results() == expected and files.pending == 0
    assert not file.path.exists()
    files.queue_delete([file.key])  # deleting a deleted file is not an error
    assert answers(files, 1) == [FilesDeleted((file.key,))]
    assert refusal(files, file) == "No such file or directory"


# Bounds.


def test_a_full_queue_refuses_at_once_until_it_is_drained(files: KvFiles) -> None:
    keys = [replace(KEY, session=str(i)) for i in range(QUEUE_COUNT_MAX)]
    assert all(files.queue_write(key, STATE, 1) for key in keys)

    assert files.flush(30)
    assert not files.queue_write(KEY, STATE, 1), "results that were not drained count"
    file = KvFile(KEY, 1, 1, files.path(KEY))
    assert not files.queue_read(file)
    assert files.pending == QUEUE_COUNT_MAX

    answers(files, QUEUE_COUNT_MAX)
    assert files.queue_write(KEY, STATE, 1)


def test_bytes_are_bounded_except_for_a_single_larger_state(files: KvFiles) -> None:
    file = KvFile(KEY, QUEUE_BYTES_MAX, 1, files.path(KEY))
    assert files.queue_read(file)  # it does not exist: the result needs no memory
    assert not files.queue_write(KEY, b"x", 1)
    assert files.queue_write(KEY, b"", 1)
    answers(files, 2)

    assert files.queue_read(replace(file, size=2 * QUEUE_BYTES_MAX))
    assert not files.queue_read(replace(file, size=1))
    answers(files)


def test_a_closed_store_accepts_nothing(tmp_path: Path) -> None:
    files = KvFiles(tmp_path, "model")
    assert files.queue_write(KEY, STATE, 1)
    files.close()
    files.close()

    assert not files.queue_write(KEY, STATE, 1)
    assert files.results() == []
    assert not files.flush(0)


def test_flush_returns_after_its_timeout(gated: Gated) -> None:
    assert gated.flush(30), "the queue is empty"

    assert gated.queue_write(KEY, STATE, 1)
    assert not gated.flush(0.001)

    gated.gate.set()
    assert gated.flush(30)
    assert isinstance(answers(gated)[0], FileWritten)


# Damage.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KvFiles, KvFile, bytes]]:
    with opened(tmp_path_factory.mktemp("kv")) as files:
        file = written(files)
        yield files, file, file.path.read_bytes()


def refused_with(whole: tuple[KvFiles, KvFile, bytes], content: bytes) -> None:
    files, file, _ = whole
    file.path.write_bytes(content)
    refusal(files, file)


@given(place=st.integers(0), change=st.integers(1, 255))
@example(place=8, change=1)
@example(place=12, change=255)
@example(place=15, change=255)
@settings(max_examples=repetitions(100))
def test_every_flipped_bit_is_detected(
    whole: tuple[KvFiles, KvFile, bytes], place: int, change: int
) -> None:
    content = bytearray(whole[2])
    content[place % len(content)] ^= change
    refused_with(whole, bytes(content))


@given(size=st.integers(0), more=st.binary(max_size=3))
@settings(max_examples=repetitions(100))
def test_a_truncated_or_extended_file_is_refused(
    whole: tuple[KvFiles, KvFile, bytes], size: int, more: bytes
) -> None:
    content = whole[2]
    refused_with(whole, content[: size % len(content)])
    if more:
        refused_with(whole, content + more)


def test_every_byte_of_the_header_is_checked(whole: tuple[KvFiles, KvFile, bytes]) -> None:
    content = whole[2]
    for place in range(len(content) - len(STATE)):
        refused_with(whole, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@given(content=st.binary(max_size=200))
def test_other_content_is_refused(whole: tuple[KvFiles, KvFile, bytes], content: bytes) -> None:
    refused_with(whole, content)


def test_an_oversized_header_is_refused_unread(whole: tuple[KvFiles, KvFile, bytes]) -> None:
    files, file, content = whole
    file.path.write_bytes(content[:12] + (HEADER_BYTES_MAX + 1).to_bytes(4, "little"))
    os.truncate(file.path, 2 * HEADER_BYTES_MAX)
    assert f"more than {HEADER_BYTES_MAX}" in refusal(files, file)


def test_a_key_that_exceeds_the_header_is_not_written(files: KvFiles) -> None:
    key = replace(KEY, tokens=bytes(HEADER_BYTES_MAX))
    assert files.queue_write(key, STATE, 1)
    (result,) = answers(files)
    assert isinstance(result, FileFailed) and (result.key, result.operation) == (key, "write")


def test_a_file_in_the_place_of_another_is_refused(files: KvFiles, tmp_path: Path) -> None:
    content = written(files).path.read_bytes()
    with opened(tmp_path / "kv", "another") as another:
        for store, key in (
            (another, KEY),
            (files, replace(KEY, owner=1001)),
            (files, replace(KEY, private=True)),
        ):
            path = store.path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            assert "another" in refusal(store, KvFile(key, len(content), 1, path))


def test_a_path_outside_the_folder_is_neither_read_nor_deleted(
    files: KvFiles, tmp_path: Path
) -> None:
    file = written(files)
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")

    assert read(files, replace(file, path=outside)) == FileRead(replace(file, path=outside), STATE)
    files.queue_delete([file.key])
    assert files.flush(30)
    assert outside.exists() and not file.path.exists()


def test_a_link_is_not_followed(files: KvFiles, tmp_path: Path) -> None:
    file = written(files)
    file.path.rename(tmp_path / "elsewhere")
    file.path.symlink_to(tmp_path / "elsewhere")

    assert refusal(files, file) == "it is a symbolic link"
    assert (tmp_path / "elsewhere").exists()


def test_a_pipe_is_not_waited_for(files: KvFiles) -> None:
    file = written(files)
    file.path.unlink()
    os.mkfifo(file.path)

    assert refusal(files, file) == "it is not a regular file of this user"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(files: KvFiles) -> None:
    file = written(files)
    os.chown(file.path, 12345, -1)

    assert refusal(files, file) == "it is not a regular file of this user"


# Scanning.


def test_a_scan_finds_all_owners_least_recently_used_first(files: KvFiles, tmp_path: Path) -> None:
    found = [written(files, replace(KEY, owner=i % 3, session=str(i))) for i in range(9)]
    for age, file in enumerate(found):
        os.utime(file.path, (age, age))
    read(files, found[0])

    with opened(tmp_path / "kv") as again:
        assert again.scan() == [*found[1:], found[0]]
    with opened(tmp_path / "kv", "another") as another:
        assert another.scan() == []


def test_a_scan_deletes_damaged_unrelated_and_unfinished_files(
    files: KvFiles, tmp_path: Path
) -> None:
    good = written(files)
    folder = good.path.parent
    content = good.path.read_bytes()
    (folder / f".{good.key.name}.77").write_bytes(content)
    (folder / "0123").write_bytes(content)
    (folder / "empty").touch()
    (folder / replace(KEY, session="b").name).write_bytes(content[:-1])
    (folder / "link").symlink_to(good.path)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()

    assert files.scan() == [good]
    assert tree(tmp_path / "kv") == [f"model/1000/{KEY.name}"]


def test_a_thousand_files_are_scanned_quickly(files: KvFiles) -> None:
    tokens = pack_tokens(range(2000))
    for i in range(1000):
        while not files.queue_write(replace(KEY, tokens=tokens, session=str(i)), bytes(5000), 1):
            assert select.select([files], [], [], 30)[0]
            files.results()
    assert files.flush(30)

    start = time.monotonic()
    assert len(files.scan()) == 1000
    assert time.monotonic() - start < 5, "measured: 0.1 s"


# Disk and machine failures.


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    head = "import os, resource, signal, sys\nfrom pathlib import Path\n"
    head += "from inferd.scheduler.kv.disk import *\n"
    head += "from inferd.scheduler.kv.file_format import *\n"
    return subprocess.run(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_write_past_the_file_size_limit_fails_and_the_thread_continues(tmp_path: Path) -> None:
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
files = KvFiles(Path(sys.argv[1]), "model")
for size in (200_000, 50_000):
    assert files.queue_write(KvKey(size, b""), bytes(size), 1)
assert files.flush(30)
failed, fine = files.results()
assert failed == FileFailed(KvKey(200_000, b""), "write", "File too large"), failed
assert isinstance(fine, FileWritten), fine
files.close()
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path) == [f"model/50000/{KvKey(50_000, b'').name}"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        made = False
    if not made:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_fails_the_write_and_leaves_no_file(small_disk: Path) -> None:
    with opened(small_disk) as files:
        assert files.queue_write(KEY, bytes(2 << 20), 1)
        assert answers(files) == [FileFailed(KEY, "write", "No space left on device")]
        assert tree(small_disk) == []

        file = written(files, state=bytes(500_000))
        assert isinstance(read(files, file), FileRead)


def test_a_directory_that_cannot_be_created_fails_the_write(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    with opened(tmp_path / "kv") as files:
        assert files.queue_write(KEY, STATE, 1)
        (result,) = answers(files)
        assert isinstance(result, FileFailed) and result.operation == "write"
        (tmp_path / "kv").unlink()
        assert isinstance(read(files, written(files)), FileRead)


@pytest.mark.parametrize("place", ["before a write", "within a write", "before the name", "after"])
def test_a_kill_at_any_point_of_a_write_leaves_no_trusted_damage(
    tmp_path: Path, place: str
) -> None:
    code = """
write, rename, place = os.write, os.replace, sys.argv[2]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def write_and_die(fd, content):
    if place == "before a write":
        die()
    count = write(fd, content[: len(content) // 2])
    if place == "within a write" and len(content) > 100_000:
        die()
    return count if count else write(fd, content)

def rename_and_die(a, b):
    if place == "after":
        rename(a, b)
    die()

files = KvFiles(Path(sys.argv[1]), "model")
os.write, os.replace = write_and_die, rename_and_die
files.queue_write(KvKey(7, b"", "s"), bytes(1_000_000), 1)
files.flush(30)
"""
    done = run(code, tmp_path, place)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(tree(tmp_path)) == 1, "it died elsewhere"

    with opened(tmp_path) as files:
        found = files.scan()
        assert len(found) == (place == "after")
        assert all(read(files, f) == FileRead(f, bytes(1_000_000)) for f in found)
        assert len(tree(tmp_path)) == len(found), "a temporary file was left"
