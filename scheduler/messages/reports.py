"""Reports: what a worker tells the daemon, and answers it."""

from __future__ import annotations

from typing import Any

import msgspec

from ...backends import AdapterInfo, AdapterSpec, Device, MemoryNeed, ModelInfo, Shape
from ..priority import Priority
from .base import Message

__all__ = (
    "AdapterReport",
    "Answer",
    "Embedded",
    "Failed",
    "Finished",
    "TokenLogprob",
    "ModelNotLoaded",
    "Loaded",
    "Moved",
    "Position",
    "Progress",
    "QueueEntry",
    "MemoryEstimate",
    "Refused",
    "Report",
    "LogEvent",
    "SentenceEnded",
    "Shifted",
    "KvFileWritten",
    "Tokens",
    "TurnStats",
    "KvFileLost",
)


class TurnStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a finished turn took."""

    stop_reason: str
    stop_detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    parks: int = 0
    shifts: int = 0
    """Context shifts in this turn."""
    shifted: bool = False
    """The KV state was approximate, by a shift in this turn or an earlier one."""


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One task as `Queue` tells it. `position` is 0 in a slot, 1 for the next to get one."""

    task_id: int
    state: str
    position: int
    effective_priority: Priority
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    waited_s: float
    starts_in_s: float
    """When it is expected to get a slot: seconds from now."""


class MemoryEstimate(Message):
    """What the model will take in this shape; the worker waits for the daemon's answer."""

    shape: Shape
    need: MemoryNeed
    devices: list[Device] = []


class Progress(Message):
    """How far the load is, 0 … 1."""

    fraction: float


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a model; *error* has five fields, where it could not be loaded."""

    spec: AdapterSpec
    info: AdapterInfo | None = None
    error: dict[str, Any] | None = None


class Loaded(Message):
    """The model is ready, with the adapters that its spec names."""

    info: ModelInfo
    adapters: list[AdapterReport] = []


class ModelNotLoaded(Message):
    """The model could not be loaded; *error* is an error's five fields."""

    error: dict[str, Any]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token with its text and how likely it is: see `backends.TokenProbs`. Of a drawn one *top*
    are the likeliest ones.
    """

    token: int
    piece: bytes
    value: float
    top: list[TokenLogprob] = []


class Tokens(Message):
    """New tokens of a task, and the text that they release (whole UTF-8 characters); where that is
    asked for, how likely they were.
    """

    task_id: int
    tokens: list[int]
    text: bytes
    surprisal: float | None = None
    """−ln of the probability that the model gave the last of them, where that counts."""
    logprobs: list[TokenLogprob] = []


class SentenceEnded(Message):
    """A sentence of a task's answer, which ends before the byte *end*: the task waits for its
    `Verdict`. One that goes on in another worker may ask again.
    """

    task_id: int
    end: int
    text: str


class LogEvent(Message):
    """Something to be logged; *fields* name the task and its request."""

    level: str
    logger: str
    event: str
    fields: dict[str, Any]


class Moved(Message):
    """A task went from one state to another: waiting, running, parked."""

    task_id: int
    state: str


class Position(Message):
    """A watched task's place in the queue: 1 is the next to get a slot, of *waiting* in all;
    *starts_in_s* is when it is expected to.
    """

    task_id: int
    position: int
    waiting: int
    starts_in_s: float


class Shifted(Message):
    """A full context dropped *discard* tokens after the first *keep*: so does the history."""

    task_id: int
    keep: int
    discard: int


class KvFileWritten(Message):
    """A KV state was written to disk, as the file *name* of *size* bytes, or read again."""

    name: str
    owner: int
    session: str
    size: int
    seconds: float


class KvFileLost(Message):
    """The KV file *name* is gone; or, with a *cause*, it could not be written."""

    name: str
    cause: str = ""


class Embedded(Message):
    """What a task made of its text, by *pooling*: vectors of *size* float32 each, little-endian. It
    is one, or without pooling one a token.
    """

    task_id: int
    size: int
    pooling: str
    vectors: bytes


class Finished(Message):
    """A task has ended; *text* is what was withheld until now, *end* the name of the token that
    ended it (WasmEdge shows it at the end of the output).
    """

    task_id: int
    text: bytes
    end: bytes
    stats: TurnStats


class Failed(Message):
    """A task has failed; *error* is an error's five fields."""

    task_id: int
    error: dict[str, Any]


class Answer(Message):
    """The answer to a command that has an id."""

    id: int
    value: Any


class Refused(Message):
    """The refusal of a command that has an id."""

    id: int
    error: dict[str, Any]


Report = (
    MemoryEstimate
    | Progress
    | Loaded
    | ModelNotLoaded
    | Tokens
    | SentenceEnded
    | Moved
    | Position
    | LogEvent
    | Shifted
    | KvFileWritten
    | KvFileLost
    | Embedded
    | Finished
    | Failed
    | Answer
    | Refused
)
