"""A terminal with a screen, on which commands of the tests are shown."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyte

from tests.daemon.command_line import Terminal, on_terminal

__all__ = ("Screen", "shown_chat")

WAIT_S_MAX = 60.0
CHUNK_BYTES = 1024
PASTE_END = b"\x1b[?2004l"
"""It ends the brackets of pastes, at the end of each prompt."""


class Screen:
    """The screen of a command's terminal."""

    def __init__(self, terminal: Terminal, lines: int, columns: int):
        self.process, self._descriptor = terminal.process, terminal.descriptor
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        """All bytes that the command has written."""
        self._prompt_ends = 0
        self.resize(lines, columns)

    def resize(self, lines: int, columns: int) -> None:
        """Change the size, of which the kernel notifies the command."""
        self._screen.resize(lines, columns)
        size = struct.pack("4H", lines, columns, 0, 0)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, size)

    @property
    def lines(self) -> list[str]:
        """The lines that are not blank, with those that have left the screen at its top."""
        scrolled = [
            "".join(line[n].data for n in sorted(line)) for line in self._screen.history.top
        ]
        return [line.rstrip() for line in (*scrolled, *self._screen.display) if line.strip()]

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    def type(self, text: str) -> None:
        """Type *text*, and read the output meanwhile, so that neither end waits for the other."""
        data = text.encode()
        while data:
            readable, writable, _ = select.select([self._descriptor], [self._descriptor], [], 10)
            assert readable or writable, "the command reads nothing"
            if readable:
                assert self._read(), "the command has ended"
            if writable:
                data = data[os.write(self._descriptor, data[:CHUNK_BYTES]) :]

    def paste(self, text: str) -> None:
        """Paste *text* as terminals do: in brackets, with the line ends of the Enter key."""
        assert b"\x1b[?2004h" in self.raw, "the command has not asked for brackets"
        self.type(f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~")

    def until(self, condition: Callable[[Screen], bool] | str) -> None:
        """Read the output until *condition* is true, or its text is on the screen."""
        found = condition if callable(condition) else lambda screen: condition in screen.text
        deadline = time.monotonic() + WAIT_S_MAX
        while not found(self):
            wait_s = deadline - time.monotonic()
            assert wait_s > 0 and self._is_readable(wait_s), f"{condition} is not in\n{self.text}"
            while self._is_readable(0):  # the screen is read only once it is complete
                assert self._read(), f"the command has ended without {condition} in\n{self.text}"

    def _is_readable(self, seconds: float) -> bool:
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def enter(self, text: str = "") -> None:
        """Type *text* and Enter."""
        self._prompt_ends = self.raw.count(PASTE_END) + 1
        self.type(f"{text}\r")

    def interrupt_prompt(self) -> None:
        """Type Ctrl-C at a prompt."""
        self._prompt_ends = self.raw.count(PASTE_END) + 1
        self.type("\x03")

    def until_prompt(self) -> None:
        """Read the output until the command waits for the line after the one that was entered."""
        self.until(
            lambda screen: (
                screen.raw.count(PASTE_END) >= self._prompt_ends and screen.lines[-1:] == [">>>"]
            )
        )

    def until_end(self) -> int:
        """Read the output up to the command's end, and return its status."""
        while self._read():
            pass
        return self.process.wait(WAIT_S_MAX)

    def hang_up(self) -> int:
        """Close the terminal, and return the command's status."""
        number = os.open(os.devnull, os.O_RDONLY)
        os.dup2(number, self._descriptor)  # the owner of the descriptor closes it
        os.close(number)
        return self.process.wait(WAIT_S_MAX)

    def _read(self) -> bool:
        data = b""
        with suppress(OSError):  # Linux reports so that the other end was closed
            data = os.read(self._descriptor, 65536)
        self.raw += data
        self._stream.feed(data)
        return bool(data)


@contextmanager
def shown_chat(
    *arguments: str, socket: str, state: Path, lines: int = 40, columns: int = 80, **environ: str
) -> Iterator[Screen]:
    """Run `inferd chat`, with its history in the folder *state*, and wait for its prompt."""
    more = {"XDG_STATE_HOME": str(state), "TERM": "xterm-256color", "NO_COLOR": "", **environ}
    with on_terminal("chat", *arguments, socket=socket, **more) as terminal:
        screen = Screen(terminal, lines, columns)
        screen.until_prompt()
        yield screen
