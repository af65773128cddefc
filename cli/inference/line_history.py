"""The file of the lines that a user has typed in chats: private, bounded in entries and bytes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import platformdirs

ENTRIES_MAX = 1000
ENTRY_CHARACTERS_MAX = 16_384
"""A longer text, which was pasted, is not kept."""
FILE_BYTES_MAX = 1 << 20
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


def history_path() -> Path:
    """Return the path of this user's file."""
    return platformdirs.user_state_path("inferd") / f"chat-history-{os.getuid()}"


def escape_entry(entry: str) -> str:
    """Return an entry as a line of the file."""
    return "".join(_ESCAPES.get(c, c) for c in entry)


def read_entry(line: str) -> str:
    """Return the entry of a line of the file."""
    parts = line.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)


class LineHistory:
    """The typed lines: those of the file at *path*, and new ones; without a path, only these.

    A file that cannot be read or written keeps nobody from chatting.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self.entries = self._read()

    def add(self, entry: str) -> None:
        """Add a line, unless it is that before it."""
        if not entry.strip() or len(entry) > ENTRY_CHARACTERS_MAX or entry in self.entries[-1:]:
            return
        self.entries = [*self.entries[1 - ENTRIES_MAX :], entry]
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._append(self._path, f"{escape_entry(entry)}\n".encode(errors="replace"))

    def _append(self, path: Path, line: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path, flags | os.O_NONBLOCK, 0o600)
        try:
            os.fchmod(file, 0o600)
            os.write(file, line)
            full = os.fstat(file).st_size > FILE_BYTES_MAX
        finally:
            os.close(file)
        if full:
            self._replace(path)

    def _replace(self, path: Path) -> None:
        """Write the last entries, up to half of the file's bytes, in place of the file."""
        kept: list[bytes] = []
        free = FILE_BYTES_MAX // 2
        for entry in reversed(self.entries):
            line = f"{escape_entry(entry)}\n".encode(errors="replace")
            free -= len(line)
            if free < 0:
                break
            kept.append(line)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(number, "wb") as file:
                file.write(b"".join(reversed(kept)))
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise

    def _read(self) -> list[str]:
        if self._path is None:
            return []
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
                f.seek(max(0, os.fstat(f.fileno()).st_size - FILE_BYTES_MAX))
                data = f.read(FILE_BYTES_MAX)
        except OSError:
            return []
        lines = data.decode(errors="replace").rstrip("\n").split("\n")
        return [read_entry(line) for line in lines[-ENTRIES_MAX:] if line]
