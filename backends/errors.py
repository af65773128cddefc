"""The tree of all errors, with their names and numbers on the wire.

::

    InferdError
    ├── InvalidArgument 1
    │   └── ProtocolError 209
    ├── Busy 4
    │   └── SessionBusy 202, ShuttingDown 208, QuotaExceeded 213
    ├── BackendError 5 ("RuntimeError" on the wire, WasmEdge's name)
    │   └── KvFull 212, WorkerCrashed 205, LoadFailed 206
    ├── UnsupportedOperation 6
    │   └── VersionMismatch 210
    ├── Timeout 200
    │   └── ReaderTimeout 204
    ├── OutOfMemory 3 ("MissingMemory" on the wire, WasmEdge's name)
    ├── InvalidEncoding 2, TooLarge 7, NotFound 8
    ├── EndOfSequence 100, ContextFull 101, PromptTooLong 102, ModelNotFound 103
    └── Cancelled 201, SessionExpired 203, PermissionDenied 207, ConnectionLost 211,
        InvalidAnswer 214

Numbers 0–8 and 100–103 are WasmEdge's; inferd's own begin at 200. `wasi_number` is the WasmEdge
number that a Wasm guest sees. Released names and numbers never change.

Messages and hints are for programs, which use the protocol or the Python client. The command line,
the web page and the HTTP APIs show `message_for_people` and `hint_for_people` instead.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypedDict

_FOR_PROGRAMS = re.compile(
    r"[\w.]\((?!s\))"  # a call in Python, such as resume(tokens, text); not the URL http(s)://
    r"|\b(finalize_execution_context|fini_single|get_output|save_state|set_input|set_options)\b"
    r"|\b(connect_timeout|from_state|resume_timeout|retry_after_s|session_id|sessions_max)\b"
    r"|`(append|data|drop|fd|keep|path|rewind|sessions|tokenize)`"
    r"|\b(new|another) client\b|\bnew Client\b|\breconnect="
    r"|\b(new|reset the|rewind the) context\b|\bhandles are\b"
    r"|\b(frames?|memfd|msgpack|SCM_RIGHTS)\b"
)
"""Words of hints that only a program can follow."""
_ABOUT_CALLS = re.compile(
    r"\b(frames?|msgpack|handles?|params|builder|execution context|the credit|tensor's)\b"
    r"|\bgraph \d|\d graphs\b|\bgraph (?:encoding|of context)\b"
    r"|\ba tensor of \d|\bis not a tensor\b|\bon this connection\b|\bdescriptors?\b(?!-)"
    r"|^the context (?:has no history|is |makes embeddings)|\bearlier calls\b|\bno call\b"
    r"|\b(connect_timeout|delete_session|fini_single|resume_timeout|undo_s)\b"
    r"|\b((cancel|history|rewind) takes|resume needs)\b"
)
"""Words of messages about a program's calls. No page and no command lets people make such calls."""
_PEOPLE_WAIT_S_MAX = 86_400.0
"""The longest wait in a hint for people."""


class Outcome(StrEnum):
    """The end of a call or turn, as metrics count it. Only `FAILED` is a failure of the service."""

    OK = "ok"
    CANCELLED = "cancelled"
    """Its reader or an operator ended it."""
    TIMEOUT = "timeout"
    """A time limit has passed that the client set, or for which the client is the cause."""
    REFUSED = "refused"
    """It cannot be served as requested, or a bound of the daemon or the user is reached."""
    FAILED = "failed"


class ErrorFields(TypedDict):
    """An error as the protocol sends it."""

    name: str
    """Its name; never changes once released."""
    number: int
    """The name as a number: 0–8 and 100–103 are WasmEdge's, inferd's own begin at 200."""
    message: str
    """A description with the values, for people."""
    hint: str
    """A remedy, for people."""
    retryable: bool
    """Whether the same request may succeed later."""
    data: dict[str, Any]
    """Values for programs, as described below."""


class InferdError(Exception):
    """An error: a `message` with the values, a `hint` on what to do, and `data` for programs.

    A class whose `hint_default` is for programs has another default for people.

    `name` is the class's own name, unless the class sets another. `retryable` means that the same
    call may succeed later; a single error may differ in it from its class. Each class declares the
    *outcome* of the calls and turns that end with its errors.
    """

    name: ClassVar[str] = "Unknown"
    number: ClassVar[int] = 299
    wasi_number: ClassVar[int] = 5
    retryable: bool = False
    people_message: ClassVar[str] = "the request failed"
    """The message for people, if the message itself is about a program's calls."""
    hint_default: ClassVar[str] = "see the daemon's log for the cause"
    people_default: ClassVar[str] = hint_default
    outcome_default: ClassVar[Outcome] = Outcome.FAILED

    def __init_subclass__(cls, *, outcome: Outcome) -> None:
        cls.name = vars(cls).get("name", cls.__name__)
        cls.outcome_default = outcome
        if "hint_default" in vars(cls) and "people_default" not in vars(cls):
            cls.people_default = cls.hint_default

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        data: Mapping[str, Any] | None = None,
        retryable: bool | None = None,
    ):
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable
        self.message = message
        self.hint = hint or self.hint_default
        self.data: dict[str, Any] = dict(data or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"

    @property
    def hint_for_people(self) -> str:
        """The clauses of the hint that people can follow, or else the default for people."""
        clauses = [part for part in self.hint.split("; ") if not _FOR_PROGRAMS.search(part)]
        return "; ".join(clauses) or self._people_default()

    def _people_default(self) -> str:
        return self.people_default

    @property
    def message_for_people(self) -> str:
        """The message, or a plain one if it is about a program's calls."""
        return self._plain_message() if _ABOUT_CALLS.search(self.message) else self.message

    def _plain_message(self) -> str:
        return self.people_message

    @property
    def text_for_people(self) -> str:
        """The message and the hint for people."""
        return f"{self.message_for_people} ({self.hint_for_people})"

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_wire, (self.to_wire(),)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the call or turn that ends with this error."""
        return self.outcome_default

    def to_wire(self) -> ErrorFields:
        """Return the fields that the protocol sends."""
        return {
            "name": self.name,
            "number": self.number,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "data": self.data,
        }


class InvalidArgument(InferdError, outcome=Outcome.REFUSED):
    """A value, handle or call that can never work as given."""

    number = wasi_number = 1
    people_message = "the program has sent a request that is not possible here"
    hint_default = "correct the argument"
    people_default = "change the request as the message says"


class ProtocolError(InvalidArgument, outcome=Outcome.REFUSED):
    """A frame that cannot be read; its connection is closed."""

    number = 209
    people_message = "the program and the daemon do not understand each other"
    hint_default = "send a 4-byte little-endian length and one msgpack array"
    people_default = "check that both sides run the same version of inferd"


class InvalidEncoding(InferdError, outcome=Outcome.REFUSED):
    """A graph encoding that inferd does not run, or JSON that does not parse."""

    number = wasi_number = 2
    hint_default = "inferd runs GGUF language models: use the encoding ggml or autodetect"
    people_default = "inferd runs language models in GGUF files"


class OutOfMemory(InferdError, outcome=Outcome.FAILED):
    """Memory could not be allocated."""

    name = "MissingMemory"
    number = wasi_number = 3
    hint_default = "use a smaller ctx-size, fewer slots or a smaller model"


class Busy(InferdError, outcome=Outcome.REFUSED):
    """A bound is reached; a retry may succeed after `retry_after_s`."""

    number = wasi_number = 4
    people_message = "too many requests are under way"
    retryable = True
    hint_default = "try again after retry_after_s seconds"
    people_default = "try again in {wait}"

    @property
    def retry_after_s(self) -> float:
        """The seconds after which a retry may succeed."""
        return float(self.data.get("retry_after_s", 1.0))

    def _people_default(self) -> str:
        seconds = math.ceil(max(1.0, min(self.retry_after_s, _PEOPLE_WAIT_S_MAX)))
        wait = f"{seconds} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
        return self.people_default.format(wait=wait)


class SessionBusy(Busy, outcome=Outcome.REFUSED):
    """The session has a turn under way, and only one turn at a time is possible."""

    number = 202
    hint_default = "wait for the turn to end, or call cancel or fini_single first"
    people_default = "wait until its answer has ended, or stop it"


class ShuttingDown(Busy, outcome=Outcome.REFUSED):
    """The daemon finishes its turns and accepts no requests."""

    number = 208
    hint_default = "connect again once the daemon is back"
    people_default = "try again once the daemon is back"


class QuotaExceeded(Busy, outcome=Outcome.REFUSED):
    """A quota of the user is used up: sessions, waiting tasks, tokens per minute, or crashes."""

    number = 213
    hint_default = "try again after retry_after_s seconds, or ask the daemon's operator for more"
    people_default = "try again in {wait}, or ask the daemon's operator for more"


class BackendError(InferdError, outcome=Outcome.FAILED):
    """The engine or its process failed."""

    name = "RuntimeError"
    number = wasi_number = 5


class KvFull(BackendError, outcome=Outcome.FAILED):
    """The KV cache has no cells left for this turn, and no other turn holds any."""

    number = 212
    wasi_number = 3
    hint_default = "use a shorter prompt, or let the model be loaded with a larger ctx-size"


class WorkerCrashed(BackendError, outcome=Outcome.FAILED):
    """The process that ran the model has exited; the next request starts it again."""

    number = 205
    retryable = True
    hint_default = "send the request again: the model is loaded again on demand"


class LoadFailed(BackendError, outcome=Outcome.FAILED):
    """The model file could not be loaded."""

    number = 206
    wasi_number = 1
    hint_default = "check the file with `inferd show NAME`"


class UnsupportedOperation(InferdError, outcome=Outcome.REFUSED):
    """A call or option that this daemon does not have."""

    number = wasi_number = 6
    people_message = "this is not supported here"
    hint_default = "use calls and options of the protocol version that the daemon's hello names"
    people_default = "leave it out, or use a model or a version of inferd that has it"


class VersionMismatch(UnsupportedOperation, outcome=Outcome.REFUSED):
    """The other side speaks another major version of the protocol."""

    number = 210
    hint_default = "install the same major version of inferd on both sides"


class TooLarge(InferdError, outcome=Outcome.REFUSED):
    """A value is past its bound; `data` has the bound and, for buffers, the size needed."""

    number = wasi_number = 7
    people_message = "the request is too large"
    hint_default = "give a larger buffer, or send less"
    people_default = "send less"

    def _plain_message(self) -> str:
        most = self.data.get("frame_bytes_max") or self.data.get("bytes_max")
        if "bytes" not in self.data or most is None:
            return self.people_message
        return (
            "the request has a text, or several that belong together, of"
            f" {self.data['bytes']} bytes; {most} are allowed"
        )


class NotFound(InferdError, outcome=Outcome.REFUSED):
    """The named object does not exist."""

    number = wasi_number = 8
    hint_default = "check the name"


class EndOfSequence(InferdError, outcome=Outcome.OK):
    """The turn has ended; the metadata at index 1 has the reason."""

    number = wasi_number = 100
    hint_default = "read the output; call fini_single or set_input for the next turn"
    people_default = "the answer is complete: send the next message"


class ContextFull(InferdError, outcome=Outcome.REFUSED):
    """The context is full."""

    number = wasi_number = 101
    hint_default = (
        "start again with less history, set the parameter overflow to shift, or load the model with"
        " a larger ctx-size"
    )


class PromptTooLong(InferdError, outcome=Outcome.REFUSED):
    """The prompt does not fit into the context."""

    number = wasi_number = 102
    hint_default = (
        "shorten the prompt, let inferd drop old parts of it (the parameter overflow: drop-turns,"
        " shift or truncate), or load the model with a larger ctx-size"
    )


class ModelNotFound(InferdError, outcome=Outcome.REFUSED):
    """No model has that name."""

    number = wasi_number = 103
    hint_default = "`inferd models` lists the names; `inferd pull` gets one"


class Timeout(InferdError, outcome=Outcome.TIMEOUT):
    """A timeout has passed; `data.timeout` names it.

    A client sets `queue` and `total`; its library raises `total` too, which is retryable if the
    daemon has not received the call. `sampling` limits the time for one token, `template` the time
    in which the machine has to render a chat.
    """

    number = 200
    hint_default = "raise the timeout or the priority"

    @property
    def outcome(self) -> Outcome:
        """The outcome, which is a failure only if the machine was too slow."""
        return Outcome.FAILED if self.data.get("timeout") == "template" else self.outcome_default


class ReaderTimeout(Timeout, outcome=Outcome.TIMEOUT):
    """The client did not read the stream for `reader_timeout_s`."""

    number = 204
    hint_default = "read the stream steadily, or use compute and get_output"
    people_default = "send it again, and read the answer while it arrives"


class Cancelled(InferdError, outcome=Outcome.CANCELLED):
    """The turn was cancelled; its output so far can still be read."""

    number = 201
    people_message = "the answer was stopped"
    hint_default = "get_output returns the output so far"
    people_default = "send it again if the answer is still needed"


class SessionExpired(InferdError, outcome=Outcome.REFUSED):
    """The session was idle for too long, or was closed in favor of others."""

    number = 203
    wasi_number = 1
    hint_default = "open it again by its session id: its history is kept"
    people_default = "open it again, or begin another one"


class PermissionDenied(InferdError, outcome=Outcome.REFUSED):
    """The caller's user lacks the permission."""

    number = 207
    wasi_number = 6
    hint_default = "ask the daemon's operator"


class ConnectionLost(InferdError, outcome=Outcome.FAILED):
    """The connection to the daemon was lost, or could not be made (client side)."""

    number = 211
    hint_default = "is the daemon running? start it with `inferd start`"


class InvalidAnswer(InferdError, outcome=Outcome.FAILED):
    """An answer is not of the type that the program requested (client side); `data.text` has it."""

    number = 214
    hint_default = "data.text has the answer; ask again, with another seed or a simpler type"
    people_default = "ask again"


def not_utf8(byte: int, at: int) -> InvalidArgument:
    """Return the error for the *byte* at *at* of a text, which is not UTF-8 and has no token."""
    return InvalidArgument(
        f"the text is not UTF-8: byte {byte:#04x} at {at}, for which the model has no token",
        hint="send text in UTF-8",
        data={"byte": at, "value": byte},
    )


def load_cancelled(name: str) -> Cancelled:
    """Return the error for callers that wait for a cancelled load."""
    return Cancelled(
        f"the load of {name!r} was cancelled",
        hint="the model was unloaded, or the daemon stops; request the model again to load it",
    )


def _tree(root: type[InferdError]) -> Iterator[type[InferdError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


ERRORS_BY_NAME: dict[str, type[InferdError]] = {cls.name: cls for cls in _tree(InferdError)}


def error_from_wire(fields: Mapping[str, Any]) -> InferdError:
    """Return the error that *fields* name; an unknown name becomes `InferdError` itself."""
    cls = ERRORS_BY_NAME.get(str(fields.get("name")), InferdError)
    data, retryable = fields.get("data"), fields.get("retryable")
    return cls(
        str(fields.get("message", "")),
        hint=str(fields.get("hint", "")),
        data=data if isinstance(data, Mapping) else None,
        retryable=retryable if isinstance(retryable, bool) else None,
    )


def place_of(exc: BaseException) -> str:
    """Return the type of *exc* and the place where it was raised, without its message, which may
    quote a user.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    if not frames:
        return type(exc).__name__
    frame = frames[-1]
    return f"{type(exc).__name__} at {Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def error_of(exc: BaseException, work: str) -> InferdError:
    """Return the error for *exc*, which ended *work*."""
    if isinstance(exc, InferdError):
        return exc
    if isinstance(exc, MemoryError):
        return OutOfMemory(
            f"there is too little memory for {work}",
            hint="unload models or end other programs and try again",
        )
    return failure_of(work, place_of(exc))


def failure_of(work: str, place: str) -> BackendError:
    """Return the error for an exception that ended *work*; *place* is the result of `place_of`."""
    return BackendError(
        f"{work} failed: {place}",
        hint="this is a defect of inferd: please report it with this message",
    )
