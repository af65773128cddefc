"""What daemon and worker say to each other: commands down, reports up, lists of them a frame.

Both sides are of one version, so the structs are arrays without names; nothing else speaks this.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from ..backends import (
    AdapterInfo,
    AdapterSpec,
    Device,
    EmbedSpec,
    MemoryNeed,
    ModelInfo,
    ModelSpec,
    Rendering,
    SamplingParams,
    Shape,
)
from ..backends.params import StoppingParams

__all__ = (
    "AdapterReport",
    "AddAdapter",
    "Adjust",
    "Answer",
    "Cancel",
    "CUT_REASONS",
    "ChatPrompt",
    "Command",
    "Credit",
    "Detokenize",
    "Embedded",
    "Evicted",
    "Failed",
    "Finished",
    "Forget",
    "Keep",
    "Likely",
    "Load",
    "LoadFailed",
    "Loaded",
    "Logging",
    "Lookup",
    "Moved",
    "Park",
    "Position",
    "Proceed",
    "Progress",
    "Progressed",
    "Pull",
    "Queue",
    "QueueEntry",
    "Quit",
    "Reckon",
    "Reckoned",
    "Refused",
    "RemoveAdapter",
    "Report",
    "Said",
    "Sentence",
    "Shifted",
    "Stats",
    "Stored",
    "Submit",
    "TaskSpec",
    "Threads",
    "Thrift",
    "Tokenize",
    "Tokens",
    "TurnStats",
    "Unstored",
    "Verdict",
    "count_tokens",
    "pack_floats",
    "pack_tokens",
    "unpack_floats",
    "unpack_tokens",
)


_TOKEN_BYTES = array("i").itemsize


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32: 20 times faster to send than a list."""
    return array("i", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Return the token ids that `pack_tokens` packed."""
    tokens = array("i")
    tokens.frombytes(data)
    return tokens.tolist()


def count_tokens(data: bytes) -> int:
    """Return how many token ids `pack_tokens` packed."""
    return len(data) // _TOKEN_BYTES


def pack_floats(numbers: Sequence[float]) -> bytes:
    """Return numbers as little-endian doubles."""
    return array("d", numbers).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Return the numbers that `pack_floats` packed."""
    numbers = array("d")
    numbers.frombytes(data)
    return numbers.tolist()


class Progressed(msgspec.Struct, frozen=True, kw_only=True):
    """How far a turn had come in a worker that is gone: another one goes on from here.

    The answer has *told* tokens so far, context shifts took *dropped* tokens out of the task's;
    its reader was told *text_bytes* and waits for *asked* more tokens (pull). Seconds count from
    when the turn was queued; *admitted_s* and *first_token_s* are None if that did not happen.
    """

    told: int = 0
    text_bytes: int = 0
    answer: bytes = b""
    """The answer's tokens, packed, where a shift dropped some of the task's."""
    surprises: bytes = b""
    """Their surprises, packed, where those count."""
    asked: int = 0
    dropped: int = 0
    shifts: int = 0
    age_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to compute.

    `tokens` is the whole history, packed; `owner` shares the machine fairly and scopes KV reuse.
    A push task generates while it has `credit` (events its reader can take; -1: no limit); a pull
    task generates one token per `Pull`. `n_predict` -1 is what is left of the context.
    """

    id: int
    owner: int
    tokens: bytes
    sampling: SamplingParams
    priority: int = 1
    pull: bool = False
    credit: int = -1
    n_predict: int = -1
    ctx_size: int = 0
    """A context smaller than the worker's; 0: the worker's."""
    stop: tuple[str, ...] = ()
    reverse_prompt: tuple[str, ...] = ()
    stopping: StoppingParams = StoppingParams()
    """The other ends; they hold for the whole turn."""
    special: bool = False
    """Show special tokens' names in the text, as WasmEdge does."""
    queue_timeout_s: float = 0.0
    total_timeout_s: float = 0.0
    session: str = ""
    """The session's name among its owner's: states that serve it alone are found by it, and
    `Forget` forgets by it."""
    persist: bool = False
    """Its KV state may be written to disk."""
    adapters: tuple[str, ...] = ()
    """Their keys (`backends.adapters`), sorted: tasks with different ones share neither a batch nor
    KV state."""
    ctx_shift: bool = False
    n_keep: int = 0
    n_discard: int = 0
    cache_reuse: int = 0
    fresh: bool = False
    """The prompt is computed anew, whatever KV state is there."""
    embed: EmbedSpec | None = None
    """Make an embedding of the tokens and say nothing: it is told in `Embedded`."""
    watch: bool = False
    """Tell the place in the queue when it changes (`Position`)."""
    progressed: Progressed | None = None
    """Set where another worker had begun the turn."""
    request: str = ""
    """Which request of a client it is, as the log names it."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# Commands: daemon to worker.


class Logging(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What is to be logged from now on: the least level of each room that a worker has events of,
    and whether prompts and answers are.
    """

    levels: dict[str, str] = {}
    texts: bool = False


class Load(_Message):
    """Load a model: the first command, once. Answered with `Reckoned`; nothing is allocated
    before `Proceed`. A descriptor travels beside the frame; *limits* are fields of `plan.Limits`
    that differ from its defaults; KV states go to disk below *kv_dir* (empty: they do not). *known*
    was reported of the same file before: the daemon decides by that, and is told when it asks.
    """

    spec: ModelSpec
    limits: dict[str, Any]
    kv_dir: str = ""
    known: list[Reckoned] = []
    logging: Logging = Logging()


class Reckon(_Message):
    """Reckon again, in another shape. Answered with `Reckoned`."""

    shape: Shape


class Proceed(_Message):
    """Load the model in the shape that was reckoned last."""


class Submit(_Message):
    """Queue a task."""

    task: TaskSpec


class Cancel(_Message):
    """Stop a task before the next step."""

    task_id: int


class Park(_Message):
    """Let a task give its slot, or its place, to those who wait. Answered with whether it does."""

    id: int
    task_id: int


class Credit(_Message):
    """The reader of a push task can take *events* more."""

    task_id: int
    events: int


class Pull(_Message):
    """The reader of a pull task wants its next token."""

    task_id: int


class Verdict(_Message):
    """What was made of the sentence that ends before the byte *end*; with a *detail* it ends its
    task.
    """

    task_id: int
    end: int
    detail: str = ""


class Adjust(_Message):
    """Parameters of a task that hold from its next token on."""

    task_id: int
    sampling: SamplingParams
    n_predict: int
    stop: tuple[str, ...]
    reverse_prompt: tuple[str, ...]


class Tokenize(_Message):
    """Answered with packed token ids."""

    id: int
    text: bytes
    special: bool
    bos: bool


class Detokenize(_Message):
    """Answered with the bytes of packed token ids, which are in the vocabulary."""

    id: int
    tokens: bytes


class ChatPrompt(_Message):
    """Render messages and tokenise them, answered with `(text, tokens, appended)`.

    Where the rendered text begins with *said* (the history's text so far, which ends with its last
    *answer*), only the rest is tokenised and *appended* is true: tokens of the history stand as
    they are. White space around the answer need not be the same: templates trim it.
    """

    id: int
    messages: list[dict[str, Any]]
    said: str
    answer: str = ""
    rendering: Rendering = Rendering()


class Lookup(_Message):
    """Answered with how many of packed *tokens* need not be computed again, as of now."""

    id: int
    owner: int
    session: str
    adapters: tuple[str, ...]
    tokens: bytes


class Keep(_Message):
    """Write to disk what is known of packed *tokens*: the session goes to sleep. Answered with
    how many of the tokens are kept.
    """

    id: int
    owner: int
    session: str
    adapters: tuple[str, ...]
    tokens: bytes


class Forget(_Message):
    """Forget the KV states of a session, in memory and on disk. Answered when it is done."""

    id: int
    owner: int
    session: str


class Evicted(_Message):
    """The daemon has deleted a KV file. Not answered."""

    name: str


class AddAdapter(_Message):
    """Load an adapter. Answered with its `AdapterInfo`, as builtins."""

    id: int
    spec: AdapterSpec


class RemoveAdapter(_Message):
    """Let go of an adapter; with *force* the tasks that have it fail. Answered when it is gone."""

    id: int
    adapter_id: str
    force: bool


class Queue(_Message):
    """Answered with a list of `QueueEntry`, as builtins: who runs and who waits, in order."""

    id: int


class Threads(_Message):
    """Use this many threads from the next step on."""

    threads: int


class Thrift(_Message):
    """Hold no KV states in memory but those of parked tasks, while *on*: what may be on disk goes
    there. Answered with the bytes that are let go.
    """

    id: int
    on: bool


class Stats(_Message):
    """Answered with a dict of counters."""

    id: int


class Quit(_Message):
    """Free the model and end."""


Command = (
    Load
    | Reckon
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
    | Thrift
    | Stats
    | Quit
)

# Reports: worker to daemon.


CUT_REASONS = frozenset(("stop", "pattern", "complete", "indent", "similarity"))
"""Stop reasons with which text is cut whose tokens stand: they say more than the text."""


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
    effective_priority: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    waited_s: float
    starts_in_s: float
    """When it is expected to get a slot: seconds from now."""


class Reckoned(_Message):
    """What the model will take in this shape; the worker waits for the daemon's answer."""

    shape: Shape
    need: MemoryNeed
    devices: list[Device] = []


class Progress(_Message):
    """How far the load is, 0 … 1."""

    fraction: float


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a model; *error* has five fields, where it could not be loaded."""

    spec: AdapterSpec
    info: AdapterInfo | None = None
    error: dict[str, Any] | None = None


class Loaded(_Message):
    """The model is ready, with the adapters that its spec names."""

    info: ModelInfo
    adapters: list[AdapterReport] = []


class LoadFailed(_Message):
    """The model could not be loaded; *error* is an error's five fields."""

    error: dict[str, Any]


class Likely(msgspec.Struct, frozen=True, array_like=True):
    """A token with its text and how likely it is: see `backends.TokenProbs`. Of a drawn one *top*
    are the likeliest ones.
    """

    token: int
    piece: bytes
    value: float
    top: list[Likely] = []


class Tokens(_Message):
    """New tokens of a task, and the text that they release (whole UTF-8 characters); where that is
    asked for, how likely they were.
    """

    task_id: int
    tokens: list[int]
    text: bytes
    surprise: float | None = None
    """−ln of the probability that the model gave the last of them, where that counts."""
    likely: list[Likely] = []


class Sentence(_Message):
    """A sentence of a task's answer, which ends before the byte *end*: the task waits for its
    `Verdict`. One that goes on in another worker may ask again.
    """

    task_id: int
    end: int
    text: str


class Said(_Message):
    """Something to be logged; *fields* name the task and its request."""

    level: str
    room: str
    event: str
    fields: dict[str, Any]


class Moved(_Message):
    """A task went from one state to another: waiting, running, parked."""

    task_id: int
    state: str


class Position(_Message):
    """A watched task's place in the queue: 1 is the next to get a slot, of *waiting* in all;
    *starts_in_s* is when it is expected to.
    """

    task_id: int
    position: int
    waiting: int
    starts_in_s: float


class Shifted(_Message):
    """A full context dropped *discard* tokens after the first *keep*: so does the history."""

    task_id: int
    keep: int
    discard: int


class Stored(_Message):
    """A KV state was written to disk, as the file *name* of *size* bytes, or read again."""

    name: str
    owner: int
    session: str
    size: int
    seconds: float


class Unstored(_Message):
    """The KV file *name* is gone; or, with a *cause*, it could not be written."""

    name: str
    cause: str = ""


class Embedded(_Message):
    """What a task made of its text, by *pooling*: vectors of *size* float32 each, little-endian. It
    is one, or without pooling one a token.
    """

    task_id: int
    size: int
    pooling: str
    vectors: bytes


class Finished(_Message):
    """A task has ended; *text* is what was withheld until now, *end* the name of the token that
    ended it (WasmEdge shows it at the end of the output).
    """

    task_id: int
    text: bytes
    end: bytes
    stats: TurnStats


class Failed(_Message):
    """A task has failed; *error* is an error's five fields."""

    task_id: int
    error: dict[str, Any]


class Answer(_Message):
    """The answer to a command that has an id."""

    id: int
    value: Any


class Refused(_Message):
    """The refusal of a command that has an id."""

    id: int
    error: dict[str, Any]


Report = (
    Reckoned
    | Progress
    | Loaded
    | LoadFailed
    | Tokens
    | Sentence
    | Moved
    | Position
    | Said
    | Shifted
    | Stored
    | Unstored
    | Embedded
    | Finished
    | Failed
    | Answer
    | Refused
)
