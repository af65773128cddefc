"""`inferd chat`: a conversation on a terminal or through standard input."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...backends.errors import (
    Cancelled,
    ConnectionLost,
    InferdError,
    InvalidArgument,
    NotFound,
    Timeout,
    TooLarge,
)
from ...backends.params import BY_SPELLING, nearest
from ...ipc.model_names import offered_models
from ..client import RESUME_S, session_of
from ..one_shot import OneShotClient
from ..options import (
    JsonOutput,
    Label,
    ModelOptions,
    ModelOrFile,
    PriorityOption,
    SocketPath,
    SystemPrompt,
    json_or_text,
)
from ..output import fail, note, write_json_line
from ..starting import start_on_demand
from .answering import (
    JsonSchema,
    LossNotice,
    Markdown,
    ResumeTimeout,
    SessionId,
    Stats,
    Temperature,
    TokensMax,
    has_format,
    print_answer,
    turn_options,
)
from .chat_commands import (
    COMMANDS_HELP,
    CommandLine,
    check_setting,
    export_text,
    message_text,
    read_command,
    read_setting,
    unquoted,
    write_new_file,
)
from .media_files import MediaFile, check_reads, naming_files, open_file, typed_path
from .typed_lines import LineHistory, history_path

if TYPE_CHECKING:
    from ...backends.media import MediaKind
    from ...ipc.client import Session
    from ...ipc.payloads import Prompt

LINE_CHARACTERS_MAX = 1 << 20
SHOWN_CHARACTERS_MAX = 60
TURN_S_MAX = 3600.0
SessionOpener = Callable[..., AbstractContextManager["Session"]]
"""Opens a session: arguments are the model's name, the session's id and a system prompt."""


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
    markdown: Markdown = True,
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
    open_session = partial(
        session_of, socket, show_bar=not as_json, priority=priority, options=options, label=label,
        resume=True, resume_s=resume_timeout, on_loss=losses.print,
    )  # fmt: skip
    conversation = InteractiveChat(
        open_session, losses, model, system=system, options=options, as_json=as_json, stats=stats,
        markdown=markdown,
    )  # fmt: skip
    with _exits_by_signals(), conversation.opened(session):
        if terminal:
            from .typed_lines import TypedLines

            note(f"{model}: /help lists the commands, Ctrl-D ends")
            lines = TypedLines(LineHistory(history_path() if history else None))
            conversation.run_lines(iter(lines), stop=True)
        else:
            conversation.run_lines(_piped_lines(), stop=False)


def session_text(session_id: str, *, continued: bool, has_system: bool) -> str:
    """Return a line that says whether a session is new."""
    if not continued:
        return f"the session {session_id} is new"
    system = "; --system applies after /reset" if has_system else ""
    return f"the session {session_id} is continued{system}"


class InteractiveChat:
    """A session, which other commands can replace, and the format of its turns."""

    session: Session

    def __init__(
        self,
        open_session: SessionOpener,
        losses: LossNotice,
        model: str,
        *,
        system: str | None,
        options: dict[str, Any],
        as_json: bool,
        stats: bool,
        markdown: bool,
    ):
        self._open_session, self._losses = open_session, losses
        self._model, self._system = model, system
        self._options, self._set = options, dict[str, Any]()
        self._as_json, self._stats, self._markdown = as_json, stats, markdown
        self._attached: list[MediaFile] = []
        """The images and sounds that are sent with the next question."""
        self._unanswered: Prompt | None = None
        """A question that /regenerate has taken out of the history, if no answer came."""
        self._closing = ExitStack()

    @contextlib.contextmanager
    def opened(self, session_id: str | None) -> Iterator[None]:
        """Open the session, and close it, or the one in its place, at the end."""
        with ExitStack() as stack:
            self._enter(stack, self._model, session_id)
            if session_id is not None:
                continued, has_system = self.session.attached, self._system is not None
                note(session_text(session_id, continued=continued, has_system=has_system))
            self._closing = stack.pop_all()
        try:
            yield
        finally:
            self._closing.close()

    def _enter(self, stack: ExitStack, model: str, session_id: str | None) -> None:
        self.session = stack.enter_context(
            self._open_session(
                model,
                session_id=session_id,
                is_temporary=session_id is None,
                system=self._system,
            )
        )

    def run_lines(self, lines: Iterator[str], *, stop: bool) -> None:
        """Run each line as a turn or a command; with *stop*, Ctrl-C ends only the answer."""
        with contextlib.closing(lines):  # type: ignore[type-var]
            for line in lines:
                command = read_command(line)
                if command is not None and command.name == "/exit" and not command.error:
                    return
                try:
                    self._run_line(line, command)
                except KeyboardInterrupt:
                    if not stop or self._losses.waits:
                        raise
                    note("stopped")
                except InferdError as exc:  # the conversation continues, unless it was lost
                    if isinstance(exc, ConnectionLost) or self._losses.waits:
                        raise
                    if self._as_json:
                        write_json_line({"error": exc.to_wire()})
                    fail(exc.message_for_people, exc.hint_for_people)

    def _run_line(self, line: str, command: CommandLine | None) -> None:
        if command is None:
            if line.strip():
                self._unanswered = None
                self._answer_with_files(line)
        elif command.error:
            fail(command.error, "/help lists the commands")
        else:
            getattr(self, f"_run_{command.name[1:]}")(command.argument)

    def _answer(self, question: Prompt) -> None:
        options = self._options | self._set
        print_answer(
            self.session, question, self._losses, as_json=self._as_json, stats=self._stats,
            markdown=self._markdown and not has_format(options), timeout=TURN_S_MAX,
        )  # fmt: skip

    def _answer_with_files(self, line: str) -> None:
        """Answer a question with the attached files. If it is refused, the files stay attached,
        except the one of which the error says that it cannot be read.
        """
        files, self._attached = self._attached, []
        try:
            with naming_files(files):
                self._answer([*(file.media for file in files), line] if files else line)
        except (Cancelled, ConnectionLost, Timeout):
            raise  # the history has the question
        except InferdError as exc:
            self._attached = [f for i, f in enumerate(files) if i != exc.data.get("item")]
            raise

    def _run_image(self, argument: str) -> None:
        self._attach(argument, "image")

    def _run_audio(self, argument: str) -> None:
        self._attach(argument, "audio")

    def _attach(self, argument: str, kind: MediaKind) -> None:
        if argument:
            file = open_file(typed_path(argument), kind)
            check_reads(self._losses.socket, self._model, [file])
            self._attached.append(file)
        names = ", ".join(file.name for file in self._attached)
        note(f"with the next question: {names}" if names else "nothing is sent with the question")

    def _run_detach(self, _: str) -> None:
        self._attached = []
        note("nothing is sent with the question")

    def _run_help(self, _: str) -> None:
        note(COMMANDS_HELP)

    def _run_reset(self, _: str) -> None:
        self.session.reset(self._system)
        note("cleared")

    def _run_set(self, argument: str) -> None:
        name, text = read_setting(argument)
        if text is None:
            self._print_settings(name)
            return
        if reason := check_setting(name):
            fail(reason)
            return
        value = json_or_text(unquoted(text))
        self.session.set_options({name: value})
        self._set[name] = value
        note(f"{name} is {value}")

    def _print_settings(self, name: str) -> None:
        """Print a parameter, or without a *name* those that were set for the conversation."""
        found = self.session.parameters()
        if not name:
            chosen = [p for p in found if p["origin"] in ("turn", "session")]
            note(
                "\n".join(map(_setting_text, chosen))
                or "no parameter is set; `inferd parameters` lists them"
            )
            return
        if (parameter := BY_SPELLING.get(name.replace("_", "-"))) is None:
            close = nearest(name, BY_SPELLING)
            fail(
                f"there is no parameter {name[:SHOWN_CHARACTERS_MAX]}" + f"; {close}" * bool(close)
            )
            return
        note("\n".join(_setting_text(p) for p in found if p["name"] == parameter.name))

    def _run_system(self, argument: str) -> None:
        if argument:
            self.session.reset(unquoted(argument))
            self._system = unquoted(argument)
            note("the conversation begins again, with this system prompt")
            return
        first = self.session.history().messages[:1]
        note(next((message_text(m) for m in first if m["role"] == "system"), "no system prompt"))

    def _run_model(self, argument: str) -> None:
        if not argument:
            self._print_models()
            return
        before, model = self.session, self._model
        try:
            with ExitStack() as stack:
                self._losses.model = argument
                self._enter(stack, argument, None)
                if self._set:
                    self.session.set_options(self._set)
                self._closing.close()
                self._closing = stack.pop_all()
                self._model = argument
        except BaseException:
            self.session, self._losses.model = before, model
            raise
        note(f"a new conversation with {argument} begins")

    def _print_models(self) -> None:
        with OneShotClient(self._losses.socket) as client:
            names = [m["name"] for m in offered_models(client.models(), named=[self._model])]
        note("\n".join(f"{name}{' (this chat)' * (name == self._model)}" for name in names))

    def _run_undo(self, _: str) -> None:
        question = self._last_question()
        self.session.rewind(1)
        note(f"undone: {shown_question(question)}")

    def _run_regenerate(self, _: str) -> None:
        question = self._unanswered
        if question is None:
            question = self._last_question()
            self.session.rewind(1)
        self._unanswered = question
        try:
            self._answer(question)
        except (Cancelled, ConnectionLost, KeyboardInterrupt, Timeout):
            self._unanswered = None  # the history has it
            raise
        self._unanswered = None

    def _last_question(self) -> Prompt:
        """Return the last turn's messages, without the answer.

        :raises NotFound: there is no turn.
        """
        history = self.session.history()
        if not history.turns:
            raise NotFound("the conversation has no question yet", hint="type one")
        messages = [m for m in history.messages[history.turns[-1] :] if m["role"] != "assistant"]
        if not messages:
            raise InvalidArgument(
                "the last question is raw text, which the history does not keep as a message",
                hint="type it again",
            )
        if len(messages) == 1 and isinstance(messages[0]["content"], str):
            return str(messages[0]["content"])
        return [message | {"content": self._sendable(message)} for message in messages]

    def _sendable(self, message: Mapping[str, Any]) -> Any:
        """Return the content of a message of the history with the bytes of its images and sounds,
        which the daemon deletes with the turn.
        """
        content = message["content"]
        if isinstance(content, str):
            return content
        return [part if part["type"] == "text" else self._sendable_part(part) for part in content]

    def _sendable_part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: part[key] for key in ("type", "tokens_max", "alt") if key in part}
        return kept | {"data": self.session.media(part["sha256"]).data}

    def _run_export(self, argument: str) -> None:
        path = Path(os.path.expanduser(unquoted(argument)))
        write_new_file(path, export_text(path, self._model, self.session.history().messages))
        note(f"the conversation is in {path}")


def shown_question(question: Prompt) -> str:
    """Return the beginning of a question in one line."""
    last = question if isinstance(question, str) else question[-1]  # type: ignore[index]
    text = " ".join((message_text(last) if isinstance(last, Mapping) else str(last)).split())
    return f"{text[:SHOWN_CHARACTERS_MAX]}{'…' * (len(text) > SHOWN_CHARACTERS_MAX)}"


def _setting_text(parameter: Mapping[str, Any]) -> str:
    adjusted = f"; {parameter['adjusted']}" if parameter["adjusted"] else ""
    return f"{parameter['name']} = {parameter['value']} ({parameter['origin']}{adjusted})"


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


def _piped_lines() -> Iterator[str]:
    while line := sys.stdin.readline(LINE_CHARACTERS_MAX):
        if len(line) == LINE_CHARACTERS_MAX and not line.endswith("\n"):
            raise TooLarge(
                f"a line of more than {LINE_CHARACTERS_MAX} characters", hint="send less at once"
            )
        yield line.rstrip("\n")
