"""The place of the daemon's log, a file or the systemd journal, and the lines in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...backends.errors import InferdError, NotFound, PermissionDenied, Timeout

if TYPE_CHECKING:
    from ..config.settings import Config

BLOCK_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 20
"""Maximum length of a line; a longer one is not from the daemon."""
POLL_S = 0.2
JOURNALCTL_S_MAX = 30.0
"""The time in which journalctl finds one line."""
_RIGHTS = "the machine's journal is for root and the group systemd-journal: sudo inferd logs"
BACKGROUND_LOG = "inferd.log"
"""The log file in the state directory, used unless the configuration names one."""

LineFilter = Callable[[bytes], bool]


class SystemdJournal(msgspec.Struct, frozen=True):
    """A log in the systemd journal, of a unit or of a process without a unit."""

    unit: str = ""
    user: bool = False
    pid: int = 0

    def command(self, count: int, level: str, *options: str) -> list[str]:
        """Return the command that prints the last *count* lines of *level* or above."""
        command = ["journalctl", "--quiet", "--no-pager", "--output=cat", f"--lines={count}"]
        command.append(f"--priority={'err' if level == 'error' else level}")
        command += [*options, *(["--user"] if self.user else [])]
        return [*command, f"--unit={self.unit}" if self.unit else f"_PID={self.pid}"]


def log_place(
    stats: Mapping[str, Any], config: Config | None, service: SystemdJournal | None = None
) -> Path | SystemdJournal | None:
    """Return the place of the log, or None if it is not kept.

    A running daemon reports it in its *stats*; otherwise it is the configured file, the journal of
    an installed *service*, or the file of an earlier daemon in the background.
    """
    if log := stats.get("log"):
        if log.get("file"):
            return Path(log["file"])
        journal = log.get("journal")
        return journal and SystemdJournal(journal["unit"] or "", journal["user"], stats["pid"])
    if config is None or (service is not None and config.log_file is None):
        return service
    path = background_log(config)
    return path if config.log_file is not None or os.path.exists(path) else None


def background_log(config: Config) -> Path:
    """Return the log file of a daemon in the background."""
    return config.log_file or config.state_dir / BACKGROUND_LOG


def last_lines(file: FileIO, count: int, matches: LineFilter) -> list[bytes]:
    """Return the last *count* lines that match, oldest first; leave *file* at its end."""
    end = file.seek(0, os.SEEK_END)
    found: list[bytes] = []
    for line in lines_backwards(file, end):
        if len(found) >= count:
            break
        if line and matches(line):
            found.append(line)
    file.seek(end)
    return found[::-1]


def following_lines(path: Path, file: FileIO) -> Iterator[bytes]:
    """Yield each new line of *file*, forever; close the file at the end.

    When the file was moved, removed or emptied, continue with the file that is then at *path*.
    """
    while True:
        with file:
            yield from _until_moved(path, file)
        while (other := _open_if_present(path)) is None:
            time.sleep(POLL_S)
        file = other


def _until_moved(path: Path, file: FileIO) -> Iterator[bytes]:
    rest, moved = b"", False
    while not moved:
        moved = _was_replaced(path, file)  # then this file gets no more lines
        while data := file.read(BLOCK_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            yield from filter(None, lines)
            rest = rest[-LINE_BYTES_MAX:]
        if not moved:
            time.sleep(POLL_S)


def _open_if_present(path: Path) -> FileIO | None:
    with contextlib.suppress(NotFound):
        return open_log(path)
    return None


def systemd_journal_lines(
    journal: SystemdJournal, count: int, level: str, *, follow: bool
) -> Iterator[bytes]:
    """Yield the last *count* lines in the journal, and with *follow* each new one.

    :raises PermissionDenied: this user sees no line of the daemon.
    :raises NotFound: journalctl is not installed, or it fails, or it has no line of the daemon.
    """
    command = journal.command(count, level, *(["--follow"] if follow else []))
    hint = f"tried: {' '.join(command)}"
    if shutil.which(command[0]) is None:
        raise NotFound("journalctl, which shows the daemon's log, is not installed", hint=hint)
    _check_has_lines(journal)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip(b"\n")
        except BaseException:  # Ctrl-C, or the reader has closed the pipe
            process.terminate()
            raise
    if process.returncode:
        raise NotFound(
            f"journalctl has ended with status {process.returncode}",
            hint=f"{_RIGHTS} ({hint})" if _needs_rights(journal) else hint,
        )


def _check_has_lines(journal: SystemdJournal) -> None:
    """Check that the journal shows this user at least one line, because journalctl prints nothing
    and succeeds, or follows forever, for a user who may not read the machine's journal.
    """
    command = journal.command(1, "debug")
    try:
        done = subprocess.run(command, capture_output=True, timeout=JOURNALCTL_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise Timeout(f"journalctl gave no line within {JOURNALCTL_S_MAX:g} s") from None
    if done.returncode or done.stdout:
        return  # the caller reports how it ends
    source = journal.unit or f"the process {journal.pid}"
    if _needs_rights(journal):
        raise PermissionDenied(f"the systemd journal shows you no line of {source}", hint=_RIGHTS)
    raise NotFound(
        f"the systemd journal has no line of {source}", hint=f"tried: {' '.join(command)}"
    )


def _needs_rights(journal: SystemdJournal) -> bool:
    """Return whether this user may lack the right to read the journal."""
    return not journal.user and os.geteuid() != 0


def open_log(path: Path) -> FileIO:
    """Open the log's file.

    :raises NotFound: the file does not exist.
    :raises PermissionDenied: the caller has no permission to read it.
    """
    try:
        if path.is_fifo():
            raise InferdError(
                f"{path} is a pipe, and each of its lines reaches only one reader",
                hint="read the output of the pipe's reader, or set log-file to a file",
            )
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise NotFound(
            f"the daemon's log file {path} does not exist",
            hint="`inferd status` shows whether it can be written",
        ) from None
    except PermissionError:
        raise PermissionDenied(
            f"you may not read {path}", hint="read it as root: sudo inferd logs"
        ) from None
    except OSError as exc:
        raise InferdError(f"{path}: {exc.strerror}", hint="is log-file a file?") from None


def lines_backwards(file: FileIO, end: int, begin: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from *begin* to *end*, last line first, except a line that *begin*
    may cut. Read only the blocks that are needed.
    """
    rest = b""
    while end > begin:
        start = max(begin, end - BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start)
        first, *lines = (block + rest[:LINE_BYTES_MAX]).split(b"\n")
        yield from reversed(lines)
        rest, end = first, start
    if not begin:
        yield rest


def _was_replaced(path: Path, file: FileIO) -> bool:
    """Return whether *path* is another file now, or *file* was emptied."""
    try:
        at_path, opened = path.stat(), os.fstat(file.fileno())
    except OSError:
        return False  # the next line creates the file again, once its folder exists
    return not os.path.samestat(at_path, opened) or opened.st_size < file.tell()
