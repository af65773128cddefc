"""Commands: what the daemon tells a worker, and asks of it."""

from __future__ import annotations

from typing import Any

import msgspec

from ...backends import AdapterSpec, ModelSpec, Rendering, SamplingParams, Shape
from .base import Message
from .reports import MemoryEstimate
from .tasks import TaskSpec

__all__ = (
    "AddAdapter",
    "Adjust",
    "Cancel",
    "ChatPrompt",
    "Command",
    "Credit",
    "Detokenize",
    "Evicted",
    "Forget",
    "Keep",
    "LoadModel",
    "Logging",
    "Lookup",
    "Park",
    "Proceed",
    "Pull",
    "Queue",
    "Quit",
    "EstimateMemory",
    "RemoveAdapter",
    "Stats",
    "Submit",
    "Threads",
    "SetLowMemory",
    "Tokenize",
    "Verdict",
)


class Logging(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What is to be logged from now on: the least level of each logger that a worker has events of,
    and whether prompts and answers are.
    """

    levels: dict[str, str] = {}
    texts: bool = False


class LoadModel(Message):
    """Load a model: the first command, once. Answered with `MemoryEstimate`; nothing is allocated
    before `Proceed`. A descriptor travels beside the frame; *limits* are fields of `Limits`
    that differ from its defaults; KV states go to disk below *kv_dir* (empty: they do not). *known*
    was reported of the same file before: the daemon decides by that, and is told when it asks.
    """

    spec: ModelSpec
    limits: dict[str, Any]
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


class Cancel(Message):
    """Stop a task before the next step."""

    task_id: int


class Park(Message):
    """Let a task give its slot, or its place, to those who wait. Answered with whether it does."""

    id: int
    task_id: int


class Credit(Message):
    """The reader of a push task can take *events* more."""

    task_id: int
    events: int


class Pull(Message):
    """The reader of a pull task wants its next token."""

    task_id: int


class Verdict(Message):
    """What was made of the sentence that ends before the byte *end*; with a *detail* it ends its
    task.
    """

    task_id: int
    end: int
    detail: str = ""


class Adjust(Message):
    """Parameters of a task that hold from its next token on."""

    task_id: int
    sampling: SamplingParams
    n_predict: int
    stop: tuple[str, ...]
    reverse_prompt: tuple[str, ...]


class Tokenize(Message):
    """Answered with packed token ids. Where it is for a *turn*, its task follows at once."""

    id: int
    text: bytes
    special: bool
    bos: bool
    turn: bool = False


class Detokenize(Message):
    """Answered with the bytes of packed token ids, which are in the vocabulary."""

    id: int
    tokens: bytes


class ChatPrompt(Message):
    """Render messages and tokenise them, answered with `(text, tokens, appended)`.

    Where the rendered text begins with *said* (the history's text so far, which ends with its last
    *answer*), only the rest is tokenised and *appended* is true: tokens of the history stand as
    they are. White space around the answer need not be the same: templates trim it.
    Where it is for a *turn*, its task follows at once.
    """

    id: int
    messages: list[dict[str, Any]]
    said: str
    answer: str = ""
    rendering: Rendering = Rendering()
    turn: bool = False


class Lookup(Message):
    """Answered with how many of packed *tokens* need not be computed again, as of now."""

    id: int
    owner: int
    session: str
    adapters: tuple[str, ...]
    tokens: bytes


class Keep(Message):
    """Write to disk what is known of packed *tokens*: the session goes to sleep. Answered with
    how many of the tokens are kept.
    """

    id: int
    owner: int
    session: str
    adapters: tuple[str, ...]
    tokens: bytes


class Forget(Message):
    """Forget the KV states of a session, in memory and on disk. Answered when it is done."""

    id: int
    owner: int
    session: str


class Evicted(Message):
    """The daemon has deleted a KV file. Not answered."""

    name: str


class AddAdapter(Message):
    """Load an adapter. Answered with its `AdapterInfo`, as builtins."""

    id: int
    spec: AdapterSpec


class RemoveAdapter(Message):
    """Let go of an adapter; with *force* the tasks that have it fail. Answered when it is gone."""

    id: int
    adapter_id: str
    force: bool


class Queue(Message):
    """Answered with a list of `QueueEntry`, as builtins: who runs and who waits, in order."""

    id: int


class Threads(Message):
    """Use this many threads from the next step on."""

    threads: int


class SetLowMemory(Message):
    """Hold no KV states in memory but those of parked tasks, while *on*: what may be on disk goes
    there. Answered with the bytes that are let go.
    """

    id: int
    on: bool


class Stats(Message):
    """Answered with a dict of counters."""

    id: int


class Quit(Message):
    """Free the model and end."""


Command = (
    LoadModel
    | EstimateMemory
    | Proceed
    | Submit
    | Cancel
    | Park
    | Credit
    | Pull
    | Verdict
    | Adjust
    | Tokenize
    | Detokenize
    | ChatPrompt
    | Lookup
    | Keep
    | Forget
    | Evicted
    | AddAdapter
    | RemoveAdapter
    | Queue
    | Logging
    | Threads
    | SetLowMemory
    | Stats
    | Quit
)
