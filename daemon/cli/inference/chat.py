"""`inferd chat`: a conversation, on a terminal or by lines of standard input."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....backends.errors import ConnectionLost, InferdError, TooLarge
from ..client import session_of
from ..help import completion as completing
from ..options import (
    JsonOutput,
    ModelName,
    ModelOptions,
    PriorityName,
    PriorityOption,
    SocketPath,
    SystemPrompt,
)
from ..output import fail, note, write_json_line
from .run import Stats, Temperature, TokensMax, say, turn_options

if TYPE_CHECKING:
    from ....ipc.client import Session

HELP = """/reset   forget the conversation
/exit    leave; so does Ctrl-D
/help    this list
Ctrl-C stops an answer."""
PROMPT = ">>> "
LINE_MAX = 1 << 20
HISTORY_LINES_MAX = 1000
TURN_S_MAX = 3600.0
_COMMAND = re.compile(r"/[a-z]+")


def chat(
    model: ModelName,
    system: SystemPrompt = None,
    priority: PriorityOption = PriorityName.NORMAL,
    temp: Temperature = None,
    n_predict: TokensMax = None,
    option: ModelOptions = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="ID",
            help="Go on with this session.",
            autocompletion=completing.sessions,
        ),
    ] = None,
    stats: Stats = False,
    history: Annotated[bool, typer.Option(help="Keep the lines that you type.")] = True,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Talk with a model.

    /help lists the commands. Without a terminal each line of standard input is a turn.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    options = turn_options(option, temp, n_predict)
    with session_of(
        socket, model, show_bar=not as_json, system=system, session_id=session,
        priority=priority.value, options=options,
    ) as conversation:  # fmt: skip
        talk = Talk(conversation, system, as_json, stats)
        if terminal:
            note(f"{model}: /help lists the commands, Ctrl-D ends")
            with _line_history(history):
                talk.follow(_typed_lines(), stop=True)
        else:
            talk.follow(_piped_lines(), stop=False)


@dataclass(frozen=True)
class Talk:
    """A conversation, and how its turns are written."""

    session: Session
    system: str | None
    as_json: bool
    stats: bool

    def follow(self, lines: Iterator[str], *, stop: bool) -> None:
        """Do what each line asks for; with *stop* Ctrl-C ends the answer, not the program."""
        for line in lines:
            command = line.strip()
            if command == "/exit":
                return
            try:
                self._do(line, command)
            except KeyboardInterrupt:
                if not stop:
                    raise
                note("stopped")
            except ConnectionLost:
                raise
            except InferdError as exc:
                self._tell(exc)

    def _do(self, line: str, command: str) -> None:
        if command == "/reset":
            self.session.reset(self.system)
            note("forgotten")
        elif _COMMAND.fullmatch(command):
            note(HELP)
        elif command:
            say(self.session, line, as_json=self.as_json, stats=self.stats, timeout=TURN_S_MAX)

    def _tell(self, error: InferdError) -> None:
        """Say that a turn failed: the conversation goes on."""
        if self.as_json:
            write_json_line({"error": error.to_wire()})
        fail(error.message, error.hint)


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\nCtrl-D ends the chat")


def _piped_lines() -> Iterator[str]:
    while line := sys.stdin.readline(LINE_MAX):
        if len(line) == LINE_MAX and not line.endswith("\n"):
            raise TooLarge(f"a line of more than {LINE_MAX} characters", hint="send less at once")
        yield line.rstrip("\n")


@contextlib.contextmanager
def _line_history(keep: bool) -> Iterator[None]:
    """Let lines be edited and called back; *keep* them for the next chat, for this user only."""
    try:
        import readline
    except ImportError:  # a Python without it: lines are read all the same
        yield
        return
    path = _history_path()
    if keep:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES_MAX)
    try:
        yield
    finally:
        if keep:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.touch(mode=0o600)
                readline.write_history_file(path)


def _history_path() -> Path:
    import platformdirs

    return platformdirs.user_state_path("inferd") / f"chat-history-{os.getuid()}"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chat)
