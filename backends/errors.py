"""The one error tree: what every refusal and failure is called, on the wire and in Python.

::

    InferdError
    ├── InvalidArgument 1             a value, handle or call that can never work
    │   └── ProtocolError 209         a frame that cannot be read; the connection ends
    ├── InvalidEncoding 2             a graph encoding other than ggml, or bad JSON
    ├── OutOfMemory 3                 "MissingMemory" on the wire, WasmEdge's name
    ├── Busy 4                        full now; `retry_after_s` says when to come back
    │   ├── SessionBusy 202           this session has a turn under way
    │   ├── ShuttingDown 208          the daemon finishes what runs and takes nothing new
    │   └── QuotaExceeded 213         a bound of the caller's own, by the rules of access
    ├── BackendError 5                "RuntimeError" on the wire, WasmEdge's name
    │   ├── KvFull 212                no KV cells are left for this turn
    │   ├── WorkerCrashed 205         the process that ran the model is gone
    │   └── LoadFailed 206            the model could not be loaded
    ├── UnsupportedOperation 6
    │   └── VersionMismatch 210       the other side speaks another major version
    ├── TooLarge 7                    a buffer, frame or tensor past its bound
    ├── NotFound 8
    ├── EndOfSequence 100             a turn has ended: normal in `compute_single` loops
    ├── ContextFull 101
    ├── PromptTooLong 102
    ├── ModelNotFound 103
    ├── Timeout 200
    │   └── ReaderTimeout 204         nobody read the stream for too long
    ├── Cancelled 201
    ├── SessionExpired 203
    ├── PermissionDenied 207
    └── ConnectionLost 211            raised by the client only

Numbers 0–8 and 100–103 are WasmEdge's; our own begin at 200, and each names in `wasi_number` the
WasmEdge number under which a Wasm guest sees it. Names and numbers never change once released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

__all__ = (
    "ERRORS_BY_NAME",
    "BackendError",
    "Busy",
    "Cancelled",
    "ConnectionLost",
    "ContextFull",
    "EndOfSequence",
    "InferdError",
    "InvalidArgument",
    "InvalidEncoding",
    "KvFull",
    "LoadFailed",
    "ModelNotFound",
    "NotFound",
    "OutOfMemory",
    "PermissionDenied",
    "PromptTooLong",
    "ProtocolError",
    "QuotaExceeded",
    "ReaderTimeout",
    "SessionBusy",
    "SessionExpired",
    "ShuttingDown",
    "Timeout",
    "TooLarge",
    "UnsupportedOperation",
    "VersionMismatch",
    "WorkerCrashed",
    "error_from_wire",
    "load_cancelled",
)


class InferdError(Exception):
    """What happened (`message`, with the values), what to do (`hint`), and `data` for programs."""

    name: ClassVar[str] = "Unknown"
    number: ClassVar[int] = 299
    wasi_number: ClassVar[int] = 5
    retryable: ClassVar[bool] = False
    hint_default: ClassVar[str] = "see the daemon's log for the cause"

    def __init__(self, message: str, *, hint: str = "", data: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint or self.hint_default
        self.data: dict[str, Any] = dict(data or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_wire, (self.to_wire(),)

    def to_wire(self) -> dict[str, Any]:
        """Return the five fields that the protocol sends."""
        return {
            "name": self.name,
            "number": self.number,
            "message": self.message,
            "hint": self.hint,
            "data": self.data,
        }


class InvalidArgument(InferdError):
    """A value, handle or call that can never work as given."""

    name = "InvalidArgument"
    number = wasi_number = 1
    hint_default = "correct the argument; docs/protocol.md has the limits"


class ProtocolError(InvalidArgument):
    """A frame that cannot be read: the connection that sent it is closed."""

    name = "ProtocolError"
    number = 209
    wasi_number = 1
    hint_default = "send a 4-byte little-endian length and one msgpack array; see docs/protocol.md"


class InvalidEncoding(InferdError):
    """A graph encoding that inferd does not run, or JSON that does not parse."""

    name = "InvalidEncoding"
    number = wasi_number = 2
    hint_default = "inferd runs GGUF language models: use the encoding ggml or autodetect"


class OutOfMemory(InferdError):
    """Memory that is not there."""

    name = "MissingMemory"
    number = wasi_number = 3
    hint_default = "use a smaller ctx-size, fewer slots or a smaller model"


class Busy(InferdError):
    """A bound is reached; `retry_after_s` says when another try makes sense."""

    name = "Busy"
    number = wasi_number = 4
    retryable = True
    hint_default = "try again after retry_after_s seconds"

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a retry may succeed."""
        return float(self.data.get("retry_after_s", 1.0))


class SessionBusy(Busy):
    """The session has a turn under way: one turn at a time."""

    name = "SessionBusy"
    number = 202
    hint_default = "wait for the turn to end, or call cancel or fini_single first"


class ShuttingDown(Busy):
    """The daemon finishes what runs and takes nothing new."""

    name = "ShuttingDown"
    number = 208
    hint_default = "connect again once the daemon is back"


class QuotaExceeded(Busy):
    """A bound of the user's own is reached: sessions, waiting tasks or tokens a minute."""

    name = "QuotaExceeded"
    number = 213
    hint_default = "try again after retry_after_s seconds, or ask whoever runs the daemon for more"


class BackendError(InferdError):
    """The engine or its process failed."""

    name = "RuntimeError"
    number = wasi_number = 5


class KvFull(BackendError):
    """No cells of the KV cache are left for this turn, and no other turn holds any."""

    name = "KvFull"
    number = 212
    wasi_number = 3
    hint_default = "use a shorter prompt, or let the model be loaded with a larger ctx-size"


class WorkerCrashed(BackendError):
    """The process that ran the model is gone; it starts again with the next request."""

    name = "WorkerCrashed"
    number = 205
    retryable = True
    hint_default = "send the request again: the model is loaded anew on demand"


class LoadFailed(BackendError):
    """The model file could not be loaded."""

    name = "LoadFailed"
    number = 206
    wasi_number = 1
    hint_default = "check the file with `inferd show NAME`"


class UnsupportedOperation(InferdError):
    """A call or option that this daemon does not have."""

    name = "UnsupportedOperation"
    number = wasi_number = 6
    hint_default = "docs/protocol.md lists the calls"


class VersionMismatch(UnsupportedOperation):
    """The other side speaks another major version of the protocol."""

    name = "VersionMismatch"
    number = 210
    wasi_number = 6
    hint_default = "install the same major version of inferd on both sides"


class TooLarge(InferdError):
    """Something past its bound; `data` holds the bound and, for buffers, what is needed."""

    name = "TooLarge"
    number = wasi_number = 7
    hint_default = "give a larger buffer, or send less"


class NotFound(InferdError):
    """Something named that does not exist."""

    name = "NotFound"
    number = wasi_number = 8
    hint_default = "check the name"


class EndOfSequence(InferdError):
    """The turn has ended; the index-1 metadata says why."""

    name = "EndOfSequence"
    number = wasi_number = 100
    hint_default = "read the output; call fini_single or set_input for the next turn"


class ContextFull(InferdError):
    """No room for another token in the context."""

    name = "ContextFull"
    number = wasi_number = 101
    hint_default = "start anew with less history, or load the model with a larger ctx-size"


class PromptTooLong(InferdError):
    """The prompt does not fit into the context."""

    name = "PromptTooLong"
    number = wasi_number = 102
    hint_default = "shorten the prompt, or load the model with a larger ctx-size"


class ModelNotFound(InferdError):
    """No model of that name."""

    name = "ModelNotFound"
    number = wasi_number = 103
    hint_default = "`inferd models` lists the names; `inferd pull` gets one"


class Timeout(InferdError):
    """A queue or total timeout has passed."""

    name = "Timeout"
    number = 200
    hint_default = "raise the timeout or the priority"


class ReaderTimeout(Timeout):
    """Nobody read the stream for `reader_timeout_s`."""

    name = "ReaderTimeout"
    number = 204
    hint_default = "read the stream steadily, or use compute and get_output"


class Cancelled(InferdError):
    """The turn was cancelled; what was computed can still be read."""

    name = "Cancelled"
    number = 201
    hint_default = "get_output returns what was computed until then"


class SessionExpired(InferdError):
    """The session was idle for too long, or was closed to make room."""

    name = "SessionExpired"
    number = 203
    wasi_number = 1
    hint_default = "open it again: by its session id the history is still there"


class PermissionDenied(InferdError):
    """The caller's user may not do this."""

    name = "PermissionDenied"
    number = 207
    wasi_number = 6
    hint_default = "ask whoever runs the daemon"


class ConnectionLost(InferdError):
    """The connection to the daemon is gone, or never was (client side)."""

    name = "ConnectionLost"
    number = 211
    hint_default = "is the daemon running? start it with `inferd serve`"


def load_cancelled(name: str) -> Cancelled:
    """Return the error of who waits for a load that was broken off."""
    return Cancelled(
        f"the load of {name!r} was cancelled",
        hint="it was unloaded meanwhile, or the daemon ends; ask again to have it loaded",
    )


def _tree(root: type[InferdError]) -> Iterator[type[InferdError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


ERRORS_BY_NAME: dict[str, type[InferdError]] = {cls.name: cls for cls in _tree(InferdError)}


def error_from_wire(fields: Mapping[str, Any]) -> InferdError:
    """Build the error that *fields* name; an unknown name becomes `InferdError` itself."""
    cls = ERRORS_BY_NAME.get(str(fields.get("name")), InferdError)
    data = fields.get("data")
    return cls(
        str(fields.get("message", "")),
        hint=str(fields.get("hint", "")),
        data=data if isinstance(data, Mapping) else None,
    )
