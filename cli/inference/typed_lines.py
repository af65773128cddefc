"""The prompt of a chat on a terminal: editing, history with its search, pastes of several lines;
and the file of the lines that a user has typed: private, bounded in entries and bytes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import termios
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import platformdirs

from ..output import note
from .chat_commands import completions

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


PROMPT = ">>> "
CONTINUATION = "... "
CTRL_C_TEXT = "Ctrl-D ends the chat"
_PASTES_IN_BRACKETS = "\x1b[?2004h"
_PASTES_AS_TYPED = "\x1b[?2004l"


class TypedLines:
    """The lines that a user types, each after a prompt; a paste of several lines is one."""

    def __init__(self, history: LineHistory):
        self._history = history
        self._dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        self._session = None if self._dumb else _prompt_session(history)

    def __iter__(self) -> Iterator[str]:
        """Yield lines until Ctrl-D."""
        with contextlib.nullcontext() if self._session is None else _typing_ahead():
            while True:
                try:
                    line = self._read_line()
                except EOFError:
                    note("")
                    return
                except KeyboardInterrupt:
                    note(f"\n{CTRL_C_TEXT}" if self._session is None else CTRL_C_TEXT)
                    continue
                self._history.add(line)
                yield line

    def _read_line(self) -> str:
        if self._session is None:
            return input(PROMPT)
        try:
            return str(self._session.prompt(PROMPT))
        finally:
            _write_sequence(_PASTES_IN_BRACKETS)  # which the prompt has ended


@contextlib.contextmanager
def _typing_ahead() -> Iterator[None]:
    """Keep what is typed or pasted during an answer for the next prompt, out of the answer."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    during = [*before]
    during[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, during)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(terminal, termios.TCSANOW, before)
        _write_sequence(_PASTES_AS_TYPED)


def _write_sequence(sequence: str) -> None:
    sys.stdout.write(sequence)
    sys.stdout.flush()


def _prompt_session(history: LineHistory) -> Any:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output.vt100 import Vt100_Output
    from prompt_toolkit.shortcuts import CompleteStyle

    class PromptHistory(History):
        """The history, as prompt_toolkit loads it: the latest entry first."""

        def load_history_strings(self) -> Iterable[str]:
            """Return all entries."""
            return reversed(history.entries)

        def store_string(self, string: str) -> None:
            """Leave it to `LineHistory.add`."""

    class CommandCompleter(Completer):
        """The completion of commands, by Tab."""

        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            """Return the words that may stand before the cursor."""
            for word, length in completions(document.text_before_cursor):
                yield Completion(word, start_position=-length)

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    output = Vt100_Output.from_pty(sys.stdout)
    output.enable_cpr = False  # no request whose answer a terminal could type into the prompt
    return PromptSession(
        history=PromptHistory(),
        key_bindings=keys,
        output=output,
        prompt_continuation=lambda width, number, wraps: "" if wraps else CONTINUATION,
        completer=CommandCompleter(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_suspend=True,
    )
