"""A shell on a pseudo-terminal, into which a script types, and the times of its output."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyte

COLUMNS, LINES = 106, 28
KEY_S = 0.035
SETTLED_S = 0.3
"""The screen is complete once nothing was written for this time."""
STEP_S_MAX = 300.0
SHELL_PROMPT = re.compile(r"\$")
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True)
class Step:
    """A text that is typed, with *keys* after it, and the line of the cursor at the step's end.

    The recording shows it within *shown_s* seconds, and its end for *rests_s* more.
    """

    text: str
    until: re.Pattern[str] = SHELL_PROMPT
    keys: str = "\r"
    lasts_s: float = 0.0
    """The shortest time of a program that goes on by itself."""
    shown_s: float = 3.0
    rests_s: float = 1.2


@dataclass(frozen=True)
class Output:
    """Text of the shell *at_s* seconds after the beginning."""

    at_s: float
    text: str


def shortened(
    outputs: Sequence[Output], step: Step, typed_s: float, begins_s: float
) -> list[Output]:
    """Return the outputs of a step, whose times begin at 0, as the recording shows them: typing
    takes *typed_s*, the rest at most the step's time, and all begins at *begins_s*.
    """
    took_s = max((output.at_s for output in outputs), default=0.0) - typed_s
    factor = min(1.0, step.shown_s / took_s) if took_s > 0 else 1.0
    return [
        Output(
            round(begins_s + min(o.at_s, typed_s) + factor * max(0.0, o.at_s - typed_s), 3), o.text
        )
        for o in outputs
    ]


def without(outputs: Sequence[Output], names: Mapping[str, str]) -> list[Output]:
    """Return *outputs* with each text that a pattern of *names* matches replaced by its name, also
    where it is divided among outputs.
    """
    whole = "".join(output.text for output in outputs)
    pattern = re.compile("|".join(f"({text})" for text in names))
    replacements = list(names.values())
    pieces: list[Output] = []
    position = begin = 0
    for output in outputs:
        end = begin + len(output.text)
        text = ""
        while position < end:
            found = pattern.search(whole, position)
            if found is None or found.start() >= end:
                text += whole[position:end]
                position = end
            else:
                text += whole[position : found.start()] + replacements[(found.lastindex or 1) - 1]
                position = found.end()
        if text:
            pieces.append(Output(output.at_s, text))
        begin = end
    return pieces


class Screen(pyte.Screen):
    """A screen with the alternate one of full-screen programs, which pyte lacks."""

    _ALTERNATE = 1049
    _before: dict[int, Any] | None = None

    def set_mode(self, *modes: int, **kwargs: Any) -> None:
        """Set modes; the alternate screen begins empty."""
        if self._ALTERNATE in modes and kwargs.get("private"):
            self._before = {line: copy(self.buffer[line]) for line in range(self.lines)}
            self._cursor_before = copy(self.cursor)
            self.erase_in_display(2)
        super().set_mode(*modes, **kwargs)

    def reset_mode(self, *modes: int, **kwargs: Any) -> None:
        """Reset modes; after the alternate screen, the old one is shown again."""
        super().reset_mode(*modes, **kwargs)
        if self._ALTERNATE in modes and kwargs.get("private") and self._before is not None:
            self.buffer.update(self._before)
            self.cursor, self._before = self._cursor_before, None
            self.dirty.update(range(self.lines))


class Stream(pyte.Stream):
    """A stream without the sequences that pyte would show as text: the keyboard modes of kitty."""

    _UNKNOWN = re.compile(r"\x1b\[[<>=?][\d;]*u")

    def feed(self, data: str) -> None:
        """Feed the screen."""
        super().feed(self._UNKNOWN.sub("", data))


class Shell:
    """An interactive shell; `outputs` is its output in the recording's times."""

    def __init__(self, folder: Path, environ: Mapping[str, str]):
        self.outputs: list[Output] = []
        self.ends_s = 0.0
        self._screen = Screen(COLUMNS, LINES)
        self._stream = Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._began = time.monotonic()
        self._read: list[Output] = []
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, "bash", "--norc", "--noprofile", "-i"],
            cwd=folder,
            env=dict(environ),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.run(Step("", keys="", shown_s=0.1, rests_s=0.5))

    def run(self, step: Step) -> None:
        """Type the text of a step and wait for its end.

        :raises TimeoutError: it does not end.
        """
        self._began, self._read = time.monotonic(), []
        is_paste = "\x1b" in step.text
        for keys in [step.text] if is_paste else step.text:
            os.write(self._terminal, keys.encode())
            self._read_for(KEY_S)
        typed_s = time.monotonic() - self._began
        os.write(self._terminal, step.keys.encode())
        while self._took_s() < typed_s + step.lasts_s or not step.until.fullmatch(self.last_line):
            while self._read_for(SETTLED_S):
                pass
            if self._took_s() > STEP_S_MAX:
                raise TimeoutError(f"{step.text!r} has not ended at {self.last_line!r}")
        self.outputs += shortened(self._read, step, typed_s, self.ends_s)
        self.ends_s = max((o.at_s for o in self.outputs), default=0.0) + step.rests_s

    def _took_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def last_line(self) -> str:
        """The line of the cursor."""
        return str(self._screen.display[self._screen.cursor.y]).rstrip()

    def _read_for(self, seconds: float) -> bool:
        """Read output that comes within *seconds*, and return whether some came."""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return False
        data = b""
        with suppress(OSError):
            data = os.read(self._terminal, 65536)
        text = self._decoder.decode(data)
        self._stream.feed(text)
        self._read.append(Output(self._took_s(), text))
        return bool(data)

    def close(self) -> None:
        """End the shell."""
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)
