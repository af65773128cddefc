"""The prompt of a chat on a terminal: editing, history with its search, pastes of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterable, Iterator
from typing import Any

from ..output import note
from .chat_commands import completions
from .line_history import LineHistory

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
