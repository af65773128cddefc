"""The reports that a worker sends to the daemon, and its answers."""

from __future__ import annotations

from typing import Any

import msgspec

from ...backends import AdapterInfo, AdapterSpec, Device, MemoryNeed, ModelInfo, Shape
from ...backends.errors import ErrorFields
from ...backends.tuning_choice import ModelTuning, TuningRecord
from ..priority import Priority
from .base import Message, RequestMessage, TaskMessage


class TurnStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The statistics of a finished turn."""

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
    """The KV state was approximate after a shift in this turn or an earlier one."""
    forced_tokens: int = 0
    """Output tokens that the grammar forced."""


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One task in the answer to `Queue`. `position` is 0 in a slot, 1 for the next to get one."""

    task_id: int
    state: str
    position: int
    effective_priority: Priority
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    waited_s: float
    starts_in_s: float | None
    """Estimated seconds until it gets a slot; None if that cannot be estimated."""


class MemoryEstimate(Message):
    """The memory that the model needs in this shape; the worker waits for the daemon's answer."""

    shape: Shape
    need: MemoryNeed
    devices: list[Device] = []


class Progress(Message):
    """The fraction of the model that is loaded, 0 … 1."""

    fraction: float


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a model, or the *error* that prevented loading it."""

    spec: AdapterSpec
    info: AdapterInfo | None = None
    error: ErrorFields | None = None


class Loaded(Message):
    """The model is ready, with the adapters that its spec names."""

    info: ModelInfo
    adapters: list[AdapterReport] = []
    tuning: ModelTuning | None = None


class Measured(Message):
    """The settings have been measured in *slices* that took *seconds* in all. Without a *record*,
    the *cause* prevented it.
    """

    slices: int
    seconds: float
    record: TuningRecord | None = None
    cause: str = ""


class ModelNotLoaded(Message):
    """The model could not be loaded."""

    error: ErrorFields


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token with its text and logprob (`backends.TokenProbs`). Tokens that were sampled or are in
    a prompt have top tokens. The first token of a prompt has neither a rank nor a logprob.
    """

    token: int
    piece: bytes
    value: float
    top: list[TokenLogprob] = []
    rank: int = 0


class Tokens(TaskMessage):
    """New tokens of a task, the text that they release (whole UTF-8 characters), and logprobs. The
    last *forced* tokens were not sampled.
    """

    tokens: list[int]
    text: bytes
    surprisal: float | None = None
    """−ln of the probability that the model gave the last token, if the turn needs it."""
    logprobs: list[TokenLogprob] = []
    forced: int = 0


class PromptLogprobs(TaskMessage):
    """The logprobs of a prompt's tokens, from number *offset* on. It uses a credit."""

    offset: int
    logprobs: list[TokenLogprob]


class SentenceEnded(TaskMessage):
    """A sentence, up to the byte *end*, whose task waits for `SentenceCompared`. A resumed task may
    send it again.
    """

    end: int
    text: str


class ConstraintsDropped(TaskMessage):
    """The *paths* of constraints in a task's JSON schema that its grammar does not enforce."""

    paths: list[str]


class LogEvent(Message):
    """An event for the log; *fields* name the task and its request."""

    level: str
    logger: str
    event: str
    fields: dict[str, Any]


class StateChanged(TaskMessage):
    """A task has changed its state to waiting, running or parked. At its first slot,
    at *started_at* in monotonic seconds, *cached_tokens* of its prompt needed no computing; both
    then stay.
    """

    state: str
    cached_tokens: int = 0
    started_at: float = 0.0


class Position(TaskMessage):
    """A task's place among the *waiting* tasks, of which 1 is the next to get a slot. *starts_in_s*
    is about the time until then, or None if nothing bounds it.
    """

    position: int
    waiting: int
    starts_in_s: float | None


class PromptProgress(TaskMessage):
    """The progress of a task's prompt of *total* tokens, *ms* after its first slot: *processed*
    tokens are in the KV state, of which *cached* were not computed.
    """

    total: int
    cached: int
    processed: int
    ms: float


class Shifted(TaskMessage):
    """A full context dropped *discard* tokens after the first *keep*, and so must the history."""

    keep: int
    discard: int


class KvFileWritten(Message):
    """A KV state was written to disk as the file *name* of *size* bytes, or was read from it."""

    name: str
    owner: int
    session: str
    size: int
    seconds: float


class KvFileLost(Message):
    """The KV file *name* no longer exists or, if there is a *cause*, could not be written."""

    name: str
    cause: str = ""


class Embedded(TaskMessage):
    """A text's vectors, each of *size* little-endian float32. There is one vector, or one a token
    if *pooling* is `none`.
    """

    size: int
    pooling: str
    vectors: bytes


class Finished(TaskMessage):
    """A task has ended. *text* was withheld until now. *end* is the name of the token that ended
    the task; WasmEdge shows this name at the end of the output. *logprobs* are those of that token,
    which is not in the answer.
    """

    text: bytes
    end: bytes
    stats: TurnStats
    logprobs: list[TokenLogprob] = []


class Failed(TaskMessage):
    """A task has failed."""

    error: ErrorFields


class CommandResult(RequestMessage):
    """The answer to a command that has an id."""

    value: Any


class Refused(RequestMessage):
    """The refusal of a command that has an id."""

    error: ErrorFields


Report = (
    MemoryEstimate
    | Progress
    | Loaded
    | Measured
    | ModelNotLoaded
    | Tokens
    | PromptLogprobs
    | SentenceEnded
    | ConstraintsDropped
    | StateChanged
    | Position
    | PromptProgress
    | LogEvent
    | Shifted
    | KvFileWritten
    | KvFileLost
    | Embedded
    | Finished
    | Failed
    | CommandResult
    | Refused
)
