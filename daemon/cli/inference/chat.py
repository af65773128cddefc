"""`inferd chat`: a conversation on a terminal or through standard input."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ....backends.errors import ConnectionLost, InferdError, TooLarge
from ....backends.params import nearest
from ..client import RESUME_S, session_of
from ..options import (
    JsonOutput,
    Label,
    ModelOptions,
    ModelOrFile,
    PriorityOption,
    SocketPath,
    SystemPrompt,
)
from ..output import fail, note, write_json_line
from ..starting import start_on_demand
from .answering import (
    JsonSchema,
    SessionId,
    Stats,
    Temperature,
    TokensMax,
    print_answer,
    turn_options,
)
from .resuming import LossNotice, ResumeTimeout

if TYPE_CHECKING:
    from ....ipc.client import Session

COMMANDS_HELP = """/reset   clear the conversation
/exit    end the chat; so does Ctrl-D
/help    print this list
Ctrl-C stops an answer."""
PROMPT = ">>> "
LINE_CHARACTERS_MAX = 1 << 20
HISTORY_LINES_MAX = 1000
TURN_S_MAX = 3600.0
_COMMAND = re.compile(r"/[A-Za-z?][\w-]*")
_COMMANDS = [line.split()[0] for line in COMMANDS_HELP.splitlines() if line.startswith("/")]


def chat(
    model: ModelOrFile,
    system: SystemPrompt = None,
    priority: PriorityOption = "normal",
    temp: Temperature = None,
    n_predict: TokensMax = None,
    option: ModelOptions = None,
    json_schema: JsonSchema = None,
    session: SessionId = None,
    resume_timeout: ResumeTimeout = RESUME_S,
    stats: Stats = False,
    history: Annotated[bool, typer.Option(help="Save typed lines for the next chat.")] = True,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Hold a conversation with a model.

    /help lists the commands. Without a terminal, each line of standard input is a turn.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    options = turn_options(option, temp, n_predict, json_schema)
    start_on_demand(socket, model)
    losses = LossNotice(socket, model, resume_timeout)
    with _exits_by_signals(), session_of(
        socket, model, show_bar=not as_json, system=system, session_id=session,
        is_temporary=session is None, priority=priority, options=options, label=label,
        resume=True, resume_s=resume_timeout, on_loss=losses.print,
    ) as opened:  # fmt: skip
        conversation = InteractiveChat(opened, losses, system, as_json, stats)
        if session is not None:
            note(session_text(session, continued=opened.attached, has_system=system is not None))
        if terminal:
            note(f"{model}: /help lists the commands, Ctrl-D ends")
            with _line_history(history):
                conversation.run_lines(_typed_lines(), stop=True)
        else:
            conversation.run_lines(_piped_lines(), stop=False)


def session_text(session_id: str, *, continued: bool, has_system: bool) -> str:
    """Return a line that says whether a session is new."""
    if not continued:
        return f"the session {session_id} is new"
    system = "; --system applies after /reset" if has_system else ""
    return f"the session {session_id} is continued{system}"


@dataclass(frozen=True)
class InteractiveChat:
    """A session and the format of its turns."""

    session: Session
    losses: LossNotice
    system: str | None
    as_json: bool
    stats: bool

    def run_lines(self, lines: Iterator[str], *, stop: bool) -> None:
        """Run each line as a turn or a command; with *stop*, Ctrl-C ends only the answer."""
        for line in lines:
            command = line.strip()
            if command == "/exit":
                return
            try:
                self._run_line(line, command)
            except KeyboardInterrupt:
                if not stop or self.losses.waits:
                    raise
                note("stopped")
            except ConnectionLost:
                raise
            except InferdError as exc:  # the conversation continues
                if self.as_json:
                    write_json_line({"error": exc.to_wire()})
                fail(exc.message_for_people, exc.hint_for_people)

    def _run_line(self, line: str, command: str) -> None:
        if command == "/reset":
            self.session.reset(self.system)
            note("cleared")
        elif command == "/help":
            note(COMMANDS_HELP)
        elif _COMMAND.fullmatch(command):
            close = nearest(command, _COMMANDS)
            fail(f"there is no command {command[:100]}" + (f"; {close}" if close else ""))
            note(COMMANDS_HELP)
        elif command:
            print_answer(
                self.session, line, self.losses,
                as_json=self.as_json, stats=self.stats, timeout=TURN_S_MAX,
            )  # fmt: skip


@contextlib.contextmanager
def _exits_by_signals() -> Iterator[None]:
    """Exit by SIGTERM and SIGHUP, a closed terminal, as by an error, so that the session of a chat
    is closed. A second one ends the process at once.
    """

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    numbers = [n for n in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


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
    while line := sys.stdin.readline(LINE_CHARACTERS_MAX):
        if len(line) == LINE_CHARACTERS_MAX and not line.endswith("\n"):
            raise TooLarge(
                f"a line of more than {LINE_CHARACTERS_MAX} characters", hint="send less at once"
            )
        yield line.rstrip("\n")


@contextlib.contextmanager
def _line_history(keep: bool) -> Iterator[None]:
    """Enable line editing with history; with *keep*, save it for this user's next chat."""
    try:
        import readline
    except ImportError:  # a Python without it: lines are read without editing
        yield
        return
    import platformdirs

    path = platformdirs.user_state_path("inferd") / f"chat-history-{os.getuid()}"
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
