"""A daemon in the background: its process, its report of readiness or of the error that ends it,
the wait for that report, and its end if it fails to start.

The process has its own session and no terminal. Its log is the log file, to which its standard
error also goes, with the errors of a start and tracebacks.

The starter passes a descriptor by `--ready-fd`, usually the write end of a pipe, as s6 and dinit
do. The daemon writes one newline when it is ready. If it ends before, it writes its error as JSON
without a newline, for `inferd start`; other starters only see the end of the pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ...backends.errors import (
    BackendError,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    Timeout,
    error_from_wire,
)
from ..config.settings import Config
from ..logs.log_lines import background_log, lines_backwards, open_log

READY = b"\n"
REPORT_BYTES_MAX = 64 << 10
"""A pipe has space for as many bytes, so the daemon never waits for its starter."""


class ReadinessReport:
    """Writes the report to *descriptor*, which may be None, and then closes it.

    :raises InvalidArgument: the descriptor is not open.
    """

    def __init__(self, descriptor: int | None = None):
        self._descriptor = descriptor
        if descriptor is not None:
            try:
                os.set_inheritable(descriptor, False)  # no child may keep the pipe open
            except OSError:
                raise InvalidArgument(
                    f"--ready-fd {descriptor} is not an open file",
                    hint="pass the number of a pipe that the daemon inherits",
                ) from None

    def send_ready(self) -> bool:
        """Report that the daemon is ready; return False if the starter has ended."""
        return self._send(READY)

    @contextlib.contextmanager
    def errors_sent(self) -> Iterator[None]:
        """Report an error that leaves this block, and raise it again."""
        try:
            yield
        except InferdError as exc:
            self.send_error(exc)
            raise

    def send_error(self, error: InferdError) -> None:
        """Report the error that ends the daemon before it is ready."""
        self._send(msgspec.json.encode(error.to_wire())[:REPORT_BYTES_MAX])

    def _send(self, data: bytes) -> bool:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return True
        try:
            os.write(descriptor, data)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def error_of_report(report: bytes) -> InferdError | None:
    """Return the error in a report without readiness, or None if the daemon has sent none."""
    with contextlib.suppress(msgspec.DecodeError):
        fields = msgspec.json.decode(report)
        if isinstance(fields, Mapping):
            return error_from_wire(dict[str, Any](fields))
    return None


LOG_FILE_BYTES_MAX = 16 << 20
"""Limit of the log file, where the configuration sets neither a file nor a limit."""
LOG_LINES = 20
"""Lines of the log in the error of a daemon that ended without a reason."""
END_S_MAX = 10.0
"""The time that a daemon which is not ready has to end after SIGTERM."""
_LOG_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_OF_OUR_MANAGER = (
    *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "JOURNAL_STREAM", "INVOCATION_ID"),
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
)
"""Variables of the service manager, which concern the starting process alone."""


def serve_command(arguments: Sequence[str], config: Config) -> list[str]:
    """Return the command of a daemon in the background with these *arguments* of `serve`."""
    # -P: no module is imported from the current folder.
    command = [sys.executable, "-P", "-m", "inferd", "serve", *arguments]
    if config.log_file is None:
        command.append(f"--set=log-file={background_log(config)}")
        if not config.log_file_bytes_max:
            command.append(f"--set=log-file-bytes-max={LOG_FILE_BYTES_MAX}")
    return command


@contextlib.contextmanager
def lock_starts(folder: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of starts with the state directory *folder*, so that of several starts at once
    one starts a daemon, and the others find it.

    :raises PermissionDenied: the directory cannot be made or read.
    :raises Timeout: another start holds the lock until *deadline*.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise PermissionDenied(
            f"the state directory {folder} cannot be used: {exc.strerror}",
            hint="choose another with --state-dir or INFERD_STATE_DIR, or use `inferd serve`, which"
            " logs to the terminal",
        ) from None
    try:
        if not _lock_until(descriptor, deadline):
            raise Timeout(
                f"another `inferd start` with {folder} has not ended",
                hint="`inferd status` shows whether its daemon runs; try again",
            )
        yield
    finally:
        os.close(descriptor)


def _lock_until(descriptor: int, deadline: float) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # A thread, since flock has no time limit. It ends with the process at the latest.
        waiting = threading.Thread(
            target=fcntl.flock, args=(descriptor, fcntl.LOCK_EX), daemon=True
        )
        waiting.start()
        waiting.join(max(0.0, deadline - time.monotonic()))
        return not waiting.is_alive()
    return True


def start_in_background(arguments: Sequence[str], config: Config, deadline: float) -> int:
    """Start a daemon with *config*, which `serve` reads by these *arguments*, and wait until it is
    ready; return its pid. If the wait ends in another way, the daemon is ended.

    :raises Timeout: it was not ready at *deadline*.
    :raises PermissionDenied: the log cannot be written.
    :raises InferdError: the error with which the daemon ended.
    """
    log, output = background_log(config), _open_log(config)
    try:
        begin = os.fstat(output).st_size
        reader, writer = os.pipe()
        try:
            process = _spawn(serve_command(arguments, config), output, writer)
        finally:
            os.close(writer)
    finally:
        os.close(output)
    try:
        report = _read_report(reader, deadline)
        if report is None:
            raise Timeout(
                "the daemon was not ready in time, and was stopped",
                hint=f"its log is {log}; --wait allows more time",
            )
        if READY not in report:
            raise _error_of_end(process, report, log, begin)
    except BaseException:  # also Ctrl-C
        os.close(reader)  # so that a daemon that becomes ready now ends, too
        _end(process)
        raise
    os.close(reader)
    return process.pid


def _open_log(config: Config) -> int:
    """Open the log file for the daemon's standard output and error."""
    path = background_log(config)
    # Root may run this in a user's home, so that only a configured file may be a link.
    flags = _LOG_FLAGS | (os.O_NOFOLLOW if config.log_file is None else 0)
    try:
        return os.open(path, flags, 0o600)
    except OSError as exc:
        raise PermissionDenied(
            f"the log {path} cannot be written: {exc.strerror}",
            hint="name another file: --set log-file=PATH",
        ) from None


def _spawn(command: Sequence[str], output: int, writer: int) -> subprocess.Popen[bytes]:
    environ = {name: text for name, text in os.environ.items() if name not in _OF_OUR_MANAGER}
    try:
        return subprocess.Popen(
            [*command, f"--ready-fd={writer}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            pass_fds=(writer,),
            start_new_session=True,
        )
    except OSError as exc:
        raise BackendError(
            f"no process can be started: {exc.strerror}",
            hint=f"may this user run {command[0]}, and start more processes (ulimit -u)?",
        ) from None


def _read_report(reader: int, deadline: float) -> bytes | None:
    """Return the report up to readiness or to the pipe's end; None if *deadline* comes first."""
    report, poll = b"", select.poll()
    poll.register(reader, select.POLLIN)
    while READY not in report:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not poll.poll(1000 * remaining_s):
            return None
        data = os.read(reader, REPORT_BYTES_MAX)
        if not data:
            break
        report = (report + data)[:REPORT_BYTES_MAX]
    return report


def _error_of_end(
    process: subprocess.Popen[bytes], report: bytes, log: Path, begin: int
) -> InferdError:
    """Return the reason that the daemon reported, or else the end of its log from *begin* on."""
    _wait_for_end(process)
    if error := error_of_report(report):
        return error
    code = process.returncode
    cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    lines = [f"\n  {line}" for line in _lines_since(log, begin)]
    return BackendError(
        f"the daemon ended {cause} before it was ready" + (":" if lines else "") + "".join(lines),
        hint=f"its log: {log}",
    )


def _lines_since(log: Path, begin: int) -> list[str]:
    """Return the last `LOG_LINES` lines of the log, but none before *begin*."""
    try:
        with open_log(log) as file:
            end = os.fstat(file.fileno()).st_size
            lines = filter(None, lines_backwards(file, end, max(0, begin - 1)))
            return [line.decode(errors="replace") for line in islice(lines, LOG_LINES)][::-1]
    except InferdError:  # it has been removed, or is a pipe
        return []


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    _wait_for_end(process)


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has ended, and kill it after `END_S_MAX`."""
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
