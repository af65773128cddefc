"""The options of a turn on the command line, the output of its answer as it arrives, and losses of
the daemon meanwhile: the line about the wait, and the daemon's restart.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from ...backends.errors import ConnectionLost, InferdError
from ...backends.params import BY_NAME, BY_SPELLING, FORMATS
from ...backends.params.json_texts import SCHEMA_BYTES_MAX
from .. import completion
from ..client import NO_END_TEXTS, repeat_refused
from ..options import read_file, read_pairs
from ..output import (
    end_terminal_line,
    has_colors,
    note,
    write,
    write_answer,
    write_dimmed,
    write_json_line,
)
from ..starting import start_on_demand

if TYPE_CHECKING:
    from ...ipc.client import Session, Stream
    from ...ipc.payloads import Prompt
    from .markdown_output import MarkdownOutput


class AnswerOutput:
    """An answer that is written as the model wrote it, except for control characters."""

    def __init__(self) -> None:
        self._last = ""
        self._within_line = False

    def write_reasoning(self, text: str) -> None:
        """Write reasoning, which does not belong to the answer."""
        write_dimmed(text)
        self._note_end(text)

    def write_text(self, text: str) -> None:
        """Write a piece of the answer."""
        write_answer(text, end="")
        self._last = text or self._last
        self._note_end(text)

    def _note_end(self, text: str) -> None:
        if text:
            self._within_line = not text.endswith("\n")

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """End the present line before messages are printed."""
        if self._within_line:
            end_terminal_line()
        yield

    def end(self, tool_calls: Sequence[str]) -> None:
        """End the answer, and write its tool calls after it."""
        if not self._last.endswith("\n") and (self._last or not tool_calls):
            write("")
        for call in tool_calls:
            write_answer(call)


ResumeTimeout = Annotated[
    float,
    typer.Option(
        "--resume-timeout",
        metavar="SECONDS",
        min=0.001,
        help="How long a daemon that has ended is waited for; then the answer continues.",
    ),
]


class Interruptible(Protocol):
    """The output of an answer, between whose pieces a line is printed."""

    def interrupted(self) -> AbstractContextManager[None]:
        """Interrupt it for messages."""


class LossNotice:
    """The line that is printed each time a session has lost its daemon.

    *waits* is true from then on until `note_piece`.
    """

    def __init__(self, socket: Path | None, model: str, resume_s: float):
        self.model = model
        self.waits = False
        self.output: Interruptible | None = None
        self.socket, self._resume_s = socket, resume_s

    def print(self, error: InferdError) -> None:
        """Print the line. Start a daemon if the last one has crashed and commands may start one."""
        self.waits = True
        with nullcontext() if self.output is None else self.output.interrupted():
            note(loss_text(error, self._resume_s))
            if isinstance(error, ConnectionLost):
                start_on_demand(self.socket, self.model)

    def note_piece(self) -> None:
        """Note that the daemon has answered."""
        self.waits = False


def loss_text(error: InferdError, resume_s: float) -> str:
    """Return the line about a lost daemon, for which a conversation waits up to *resume_s*."""
    return (
        f"{error.message_for_people}; waiting up to {resume_s:g} s for its return,"
        " then this continues (Ctrl-C ends the wait)"
    )


Temperature = Annotated[float | None, typer.Option("--temp", metavar="T", help=BY_NAME["temp"].doc)]
TokensMax = Annotated[
    int | None, typer.Option("--n-predict", metavar="N", help=BY_NAME["n-predict"].doc)
]
JsonSchema = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="The JSON schema of the answer, in a file."),
]
SessionId = Annotated[
    str | None,
    typer.Option(
        "--session",
        metavar="ID",
        help="Continue the session with this id.",
        autocompletion=completion.sessions,
    ),
]
Markdown = Annotated[
    bool, typer.Option(help="Render Markdown in an answer on a terminal with colors.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Print token counts and times at the end.")]


def turn_options(
    pairs: list[str] | None, temp: float | None, n_predict: int | None, json_schema: Path | None
) -> dict[str, Any]:
    """Return the parameters of a session; flags override --option."""
    named: dict[str, Any] = {"temp": temp, "n-predict": n_predict}
    if json_schema is not None:
        named["json-schema"] = _schema_text(json_schema)
    return read_pairs(pairs) | {k: v for k, v in named.items() if v is not None}


def _schema_text(path: Path) -> str:
    text = read_file(path, SCHEMA_BYTES_MAX, f"--json-schema {path}")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"--json-schema {path}: it is not UTF-8") from None


def has_format(options: Mapping[str, Any]) -> bool:
    """Return whether the *options* of a turn prescribe a format, in which Markdown has no place."""
    spelled = {
        BY_SPELLING[name].name: value
        for key, value in options.items()
        if (name := key.replace("_", "-")) in BY_SPELLING
    }
    return any(spelled.get(name) for name in FORMATS)


def print_answer(
    session: Session,
    prompt: Prompt,
    losses: LossNotice,
    *,
    as_json: bool,
    stats: bool,
    markdown: bool,
    timeout: float,
) -> None:
    """Stream the answer to *prompt*; an early exit, also by Ctrl-C, cancels the turn. A turn that
    is refused before its first token is repeated as by `repeat_refused`. A line of *losses* stands
    between the pieces of an answer.
    """
    output = losses.output = None if as_json else _answer_output(markdown)
    until = time.monotonic() + timeout
    stream, pieces = repeat_refused(lambda: _begin(session, prompt, until), until)
    with stream, _answer_key(session):
        try:
            for piece in pieces:
                losses.note_piece()
                reasoning = getattr(piece, "reasoning", "")
                calls = getattr(piece, "tool_calls", ())
                if output is None:
                    more = {"reasoning": reasoning, "tool_calls": calls}
                    given = {key: value for key, value in more.items() if value}
                    write_json_line({"text": str(piece)} | given)
                else:
                    output.write_reasoning(reasoning)
                    output.write_text(piece)
        finally:
            losses.output = None
            if output is not None:
                output.end([f"{call.name}({call.arguments})" for call in stream.tool_calls])
    losses.note_piece()
    if as_json:
        write_json_line({"metadata": session.metadata})
    if (turns := session.metadata.get("dropped_turns", 0)) and not as_json:
        note(f"the context was full: the model no longer reads {turns} old turns of this chat")
    if session.metadata.get("stop_reason") == "context_full" and not as_json:
        note(
            f"the answer was cut off: the context of {session.graph.ctx_size} tokens is full"
            " (-o ctx-size=N requests a larger one)"
        )
    if stats:
        note(stats_text(session.metadata))


@contextmanager
def _answer_key(session: Session) -> Iterator[None]:
    """Let Ctrl-\\ end the reasoning of the turn under way, so that its answer begins now. Without a
    terminal its signal ends the command, as usual.
    """
    if not sys.stdin.isatty() or threading.current_thread() is not threading.main_thread():
        yield
        return
    requesting = threading.Lock()

    def request_end() -> None:
        with requesting, suppress(InferdError):  # the turn may have ended meanwhile
            found = session.end_reasoning()
            if not found.ended:
                note(NO_END_TEXTS.get(found.reason, found.reason))

    def pressed(_: int, __: object) -> None:
        # The main thread waits for the stream, within the client.
        if not requesting.locked():
            threading.Thread(target=request_end, name="end-reasoning", daemon=True).start()

    before = signal.signal(signal.SIGQUIT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)


def _answer_output(markdown: bool) -> AnswerOutput | MarkdownOutput:
    if not markdown or not has_colors(sys.stdout):
        return AnswerOutput()
    from .markdown_output import MarkdownOutput

    return MarkdownOutput()


def _begin(session: Session, prompt: Prompt, until: float) -> tuple[Stream, Iterator[str]]:
    """Return a stream whose turn was admitted, and its pieces."""
    with ExitStack() as stack:
        stream = stack.enter_context(session.stream(prompt, timeout=until - time.monotonic()))
        pieces = iter(stream)
        first = [piece for piece in (next(pieces, None),) if piece is not None]
        stack.pop_all()
    return stream, chain(first, pieces)


def _media_text(metadata: Mapping[str, Any]) -> str:
    tokens, seconds = metadata.get("media_tokens", 0), metadata.get("encode_s", 0.0)
    encoded = f", encoded in {seconds:.1f} s" if seconds else ""
    return f"; {tokens} of images and sounds{encoded}" if tokens else ""


def stats_text(metadata: Mapping[str, Any]) -> str:
    """Return the statistics of a turn in one line."""
    tokens, predicted_ms = metadata.get("output_tokens", 0), metadata.get("predicted_ms", 0.0)
    rate = f", {1000 * tokens / predicted_ms:.1f} tokens/s" if predicted_ms > 0 else ""
    recomputed, reason = metadata.get("recomputed_tokens", 0), metadata.get("recomputed_reason", "")
    history = f"; {recomputed} of the history recomputed: {reason}" if recomputed else ""
    return (
        f"prompt {metadata.get('input_tokens', 0)} tokens"
        f" ({metadata.get('cached_tokens', 0)} cached{history}{_media_text(metadata)})"
        f", first token after {metadata.get('ttft_ms', 0.0):.0f} ms"
        f", answer {tokens} tokens{rate}, stopped by {metadata.get('stop_reason')}"
    )
