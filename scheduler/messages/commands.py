"""The commands that the daemon sends to a worker."""

from __future__ import annotations

from typing import Any

import msgspec

from ...backends import AdapterSpec, ModelSpec, Rendering, SamplingParams, Shape
from ...backends.tensors import NamedTensor
from ..owner import Owner
from ..priority import Requester
from .base import Message, RequestMessage, TaskMessage
from .reports import MemoryEstimate
from .tasks import TaskSpec

NOBODY = Requester(Owner(-1))
"""Stands for the daemon itself."""


class Logging(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Log settings from now on: the lowest level of each logger, and whether to log texts."""

    levels: dict[str, str] = {}
    texts: bool = False


class LoadModel(Message):
    """Load a model: the first command, sent once. Answered with `MemoryEstimate`; nothing is
    allocated before `Proceed`. A descriptor is sent beside the frame. *settings* are fields of
    `EngineSettings`. KV states are written below *kv_dir*, or to memory only if that is empty.
    *known* are earlier estimates of the same file, which are not reported again.
    """

    spec: ModelSpec
    settings: dict[str, Any]
    kv_dir: str = ""
    known: list[MemoryEstimate] = []
    logging: Logging = Logging()


class EstimateMemory(Message):
    """Estimate again, in another shape. Answered with `MemoryEstimate`."""

    shape: Shape


class Proceed(Message):
    """Load the model in the shape that was estimated last."""


class Submit(Message):
    """Queue a task."""

    task: TaskSpec


class Cancel(TaskMessage):
    """Stop a task before the next step."""


class Park(RequestMessage):
    """Give a task's slot, or its place, to those that wait. Answered with whether it did so."""

    task_id: int


class Credit(TaskMessage):
    """Allow a push task to send this many more *events*."""

    events: int


class PullToken(TaskMessage):
    """Request the next token of a pull task."""


class SentenceCompared(TaskMessage):
    """The result of comparing the sentence that ends before the byte *end*. With a *detail*, the
    task ends.
    """

    end: int
    detail: str = ""


class Adjust(TaskMessage):
    """Set parameters of a task from its next token on."""

    sampling: SamplingParams
    n_predict: int
    stop: tuple[str, ...]
    reverse_prompt: tuple[str, ...]


class Tokenize(RequestMessage):
    """Tokenize a text. Answered with packed token ids. After one for a *turn*, `Submit` follows.

    A text that is too long for any context is refused, or loses its middle, but not its first
    *cut_behind* tokens, if that is not negative.
    """

    text: bytes
    special: bool
    bos: bool
    turn: bool = False
    requester: Requester = NOBODY
    cut_behind: int = -1


class Detokenize(RequestMessage):
    """Return the bytes of packed token ids, which are in the vocabulary."""

    tokens: bytes
    requester: Requester = NOBODY


class ChatPrompt(RequestMessage):
    """Render and tokenize messages. Answered with `(text, tokens, appended, form)`.

    If the rendered text begins with *history* (the text so far, which ends with its last *answer*),
    only the rest is tokenized and *appended* is true, so that the history's tokens stay as they
    are. White space around the answer may differ, because templates trim it. After a request for a
    *turn*, `Submit` follows.

    An answer with tool calls, the message number *answer_at*, has other *forms*, the last one of
    which is its text. *form* is the number of the form that was rendered; 0 is that of `messages`.
    *cut_behind* is as in `Tokenize`.
    """

    messages: list[dict[str, Any]]
    history: str
    answer: str = ""
    rendering: Rendering = Rendering()
    turn: bool = False
    requester: Requester = NOBODY
    answer_at: int = -1
    forms: list[dict[str, Any]] = []
    cut_behind: int = -1


class ComputeTensors(RequestMessage):
    """Compute the outputs of a tensor model: a list of `NamedTensor`. The computation must begin
    within *wait_s* seconds, if that is not 0.
    """

    inputs: list[NamedTensor]
    requester: Requester = NOBODY
    wait_s: float = 0.0


InputRequest = Tokenize | Detokenize | ChatPrompt | ComputeTensors
"""A request with texts or tensors, which is answered between steps, in a fair order."""


class DropInput(Message):
    """Forget an `InputRequest` by its id, whose answer nobody awaits. Not answered. An input that a
    thread works on is answered nevertheless.
    """

    request: int


class DeleteSessionStates(RequestMessage):
    """Delete the KV states of a session, in memory and on disk. Answered when that is done."""

    user: int
    session: str


class _PrefixRequest(RequestMessage):
    """A request about the KV state of packed *tokens*."""

    user: int
    session: str
    adapters: tuple[str, ...]
    tokens: bytes


class Lookup(_PrefixRequest):
    """Return the number of tokens that need not be computed, as of now."""


class PersistState(_PrefixRequest):
    """Write the tokens' state of a dormant session to disk. Answered with how many were kept."""


class ExportState(_PrefixRequest):
    """Write the tokens' state of a dormant session to disk, unless it is there. Answered, once it
    is written, with the name of its file, or with an empty name if there is no state.
    """


class SaveNamedState(RequestMessage):
    """Write the KV state of packed *tokens* to disk, under the engine's *name* of a named state. If
    it is there already, read it into memory. Answered, once it is written, with the number of
    tokens on disk.
    """

    user: int
    name: str
    adapters: tuple[str, ...]
    tokens: bytes


class ShareKv(Message):
    """Bring the KV state of packed *tokens*, which a user's named state *name* has, into memory for
    another user, *for_user*, if it is in memory or on disk. Not answered.
    """

    user: int
    name: str
    adapters: tuple[str, ...]
    tokens: bytes
    for_user: int


class KvFileAdded(Message):
    """The daemon has written a KV file of a user. Not answered."""

    owner: int
    name: str


class KvFileEvicted(Message):
    """The daemon has deleted a KV file. Not answered."""

    name: str


class AddAdapter(RequestMessage):
    """Load an adapter. Answered with its `AdapterInfo`, as builtins."""

    spec: AdapterSpec


class RemoveAdapter(RequestMessage):
    """Remove an adapter; with *force* the tasks that use it fail. Answered when that is done."""

    adapter_id: str
    force: bool


class Queue(RequestMessage):
    """Return the running and waiting tasks in order: a list of `QueueEntry`, as builtins."""


class ExchangeServed(RequestMessage):
    """Count tokens that other nodes of a fleet have computed, by user. Answered with the tokens
    computed here since the load, for each user with tasks or with tokens since the last such
    command.
    """

    elsewhere: dict[int, int]


class SetThreads(Message):
    """Use this many threads from the next step on."""

    threads: int


class SetMeasuring(Message):
    """Measure the model's settings while it has no work, or stop and free the memory for that. The
    result is reported once, with `Measured`.
    """

    on: bool


class SetLowMemory(RequestMessage):
    """While *on*, hold no KV states in memory except those of parked tasks; states that may be
    persisted are written to disk. Answered with the number of bytes that are freed.
    """

    on: bool


class Stats(RequestMessage):
    """Return a dict of counters."""


class Quit(Message):
    """Free the model and exit."""


Command = (
    LoadModel
    | EstimateMemory
    | Proceed
    | Submit
    | Cancel
    | Park
    | Credit
    | PullToken
    | SentenceCompared
    | Adjust
    | Tokenize
    | Detokenize
    | ChatPrompt
    | ComputeTensors
    | DropInput
    | Lookup
    | PersistState
    | ExportState
    | SaveNamedState
    | ShareKv
    | DeleteSessionStates
    | KvFileAdded
    | KvFileEvicted
    | AddAdapter
    | RemoveAdapter
    | Queue
    | ExchangeServed
    | Logging
    | SetThreads
    | SetMeasuring
    | SetLowMemory
    | Stats
    | Quit
)
