"""The messages between daemon and worker: commands down, reports up, a list of them in each frame.

Both sides are of one build, so the structs are arrays without names. Here are the bases of all
messages and the packing of their long fields, tasks as the daemon submits them, the commands, and
the reports with the answers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from ..backends.answer_form import Block
from ..backends.errors import ErrorFields
from ..backends.media import MarkedMedia, MediaItem
from ..backends.params import StoppingParams
from ..backends.tensors import NamedTensor
from ..backends.tuning_choice import ModelTuning, TuningRecord
from .owner import Owner, Priority, Requester


class Message(msgspec.Struct, array_like=True, tag=True):
    """A struct that is sent as an array without field names, tagged with its class name."""


class RequestMessage(Message):
    """A command that is answered with `CommandResult` or `Refused`, or such an answer."""

    id: int


class TaskMessage(Message):
    """A command or report about one task."""

    task_id: int


PACKED_TOKEN_BYTES = array("i").itemsize


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
    return len(data) // PACKED_TOKEN_BYTES


def pack_floats(numbers: Sequence[float]) -> bytes:
    """Return numbers as little-endian doubles."""
    return array("d", numbers).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Return the numbers that `pack_floats` packed."""
    numbers = array("d")
    numbers.frombytes(data)
    return numbers.tolist()


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a turn in a worker that has exited, from which another worker continues.

    The answer has *output_tokens* so far; context shifts took *dropped* tokens out of the task's.
    The reader has received *text_bytes* and, if it pulls, waits for *tokens_requested* more.
    At its first slot, *cached_tokens* of its prompt needed no computing. Seconds count from when
    the turn was queued. *started_s* and *first_token_s* are None if these moments have not come.
    """

    output_tokens: int = 0
    text_bytes: int = 0
    answer: bytes = b""
    """The answer's packed tokens, if a shift dropped some of the task's tokens."""
    surprisals: bytes = b""
    """The packed surprisals of the answer's tokens, if the turn needs them."""
    tokens_requested: int = 0
    prompt_logprobs: int = 0
    """The number of the prompt's first tokens whose logprobs were reported."""
    ending_left: int = 0
    """The number of tokens that a forced end of reasoning still adds."""
    end_requested: bool = False
    """The end of its reasoning was requested, and has not begun."""
    dropped: int = 0
    shifts: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0
    compute_s: float = 0.0
    age_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None


class SharedKv(msgspec.Struct, frozen=True):
    """The KV state of another user's named state, which an access rule shares. It is that of the
    first *size* tokens of a prompt, if these have its *digest*. *name* is the engine's name of the
    state.
    """

    user: int
    name: str
    size: int
    digest: bytes

    @classmethod
    def of_tokens(cls, user: int, name: str, packed: bytes) -> SharedKv:
        """Return the KV state of the packed tokens of a named state."""
        return cls(user, name, count_tokens(packed), _digest(packed))

    def begins(self, packed: bytes) -> bool:
        """Return whether packed tokens begin with those of the state. Other tokens must not be
        looked up among the KV states of its user, because that would show what these contain.
        """
        size = self.size * PACKED_TOKEN_BYTES
        return len(packed) >= size and _digest(packed[:size]) == self.digest


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()


class ReasoningSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The marks of a turn's reasoning in *blocks*, and its bound.

    *opened* is the mark of the answer with which the prompt ends. Some blocks also end where a
    block of content begins (*contents*) or a tool call does (*calls*). After *budget* tokens of a
    thought, or never if that is negative, *message* and the end of the block are added. If
    *rests_grammar*, the grammar begins behind the end of the reasoning with which the answer
    begins.
    """

    blocks: tuple[Block, ...]
    opened: str = ""
    contents: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    budget: int = -1
    message: str = ""
    rests_grammar: bool = False


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to compute.

    `tokens` is the whole history, packed. `owner` is the unit of fairness, and its user scopes KV
    reuse. A push task generates while it has `credit` (events that its reader can take; -1 means no
    limit); a pull task generates one token per `PullToken`. An `n_predict` of -1 means the rest of
    the context.
    """

    id: int
    owner: Owner
    account: int = -1
    """The gateway's user, if the owner is one of the gateway's own users; they share a part of the
    time. -1: the owner's user is a user of the system.
    """
    tokens: bytes
    media: tuple[MediaItem, ...] = ()
    """The images and sounds among the tokens, in their order."""
    sampling: SamplingParams
    priority: Priority = Priority.NORMAL
    pull: bool = False
    credit: int = -1
    n_predict: int = -1
    ctx_size: int = 0
    """A context smaller than the worker's; 0 stands for the worker's."""
    batch_size: int = 0
    """The most prompt tokens that it computes in a step; 0 sets no bound of its own."""
    stop: tuple[str, ...] = ()
    reverse_prompt: tuple[str, ...] = ()
    stopping: StoppingParams = StoppingParams()
    """The other stop conditions; they hold for the whole turn."""
    special: bool = False
    """Show special tokens' names in the text, as WasmEdge does."""
    shown_marks: tuple[str, ...] = ()
    """Special tokens in these are shown in any case; they mark reasoning, content or tool calls."""
    queue_timeout_s: float = 0.0
    total_timeout_s: float = 0.0
    session: str = ""
    """The session's name, unique for its owner, by which states of this session are found and
    deleted.
    """
    persist: bool = False
    """Its KV state may be written to disk."""
    adapters: tuple[str, ...] = ()
    """Sorted adapter keys. Tasks with different adapters share neither a batch nor KV state."""
    ctx_shift: bool = False
    n_keep: int = 0
    n_discard: int = 0
    cache_reuse: int = 0
    shared_kv: SharedKv | None = None
    """The KV state of another user with which the tokens begin."""
    no_cache: bool = False
    """Compute the whole prompt and use no KV state."""
    speculation: str = "auto"
    """The drafter that proposes tokens (`scheduler.drafting`), "off", or "auto" for the model's."""
    draft_max: int = 16
    """The most tokens that are drafted in one step."""
    prediction: str = ""
    """A text that the answer is expected to repeat in part."""
    prompt_logprobs: int | None = None
    """Report the logprobs of the prompt's tokens, each with this many top tokens."""
    reasoning: ReasoningSpec | None = None
    """The reasoning that its answer may have."""
    continued: int = 0
    """The number of the last tokens that begin the answer. Its grammar and its reasoning include
    them.
    """
    embed: EmbedSpec | None = None
    """Return an embedding of the tokens (`Embedded`) instead of generating text."""
    watch: bool = False
    """Report the place in the queue when it changes (`Position`)."""
    watch_prompt: bool = False
    """Report the progress of the prompt after each step (`PromptProgress`)."""
    resume_point: ResumePoint | None = None
    """The progress of a turn resumed from another worker."""
    trial_tokens: int = 0
    """This many of its tokens are computed in steps of their own, as a worker has died in a step
    with it.
    """
    request: str = ""
    """The log's name for the client's request."""


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


class EndReasoning(RequestMessage):
    """End the present thought of a task. Answered with a value of `EndOutcome`."""

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
    *cut_behind* tokens, if that is not negative. *media* are the images and sounds whose marks the
    text has; the marks that it lacks are ignored.
    """

    text: bytes
    special: bool
    bos: bool
    turn: bool = False
    requester: Requester = NOBODY
    cut_behind: int = -1
    media: list[MarkedMedia] = []


class TokenizeParts(RequestMessage):
    """Tokenize the texts of a prompt that is made of their tokens, each by itself and without names
    of special tokens. Answered with a list of packed token ids: those that begin a prompt, then
    those of each text. `Submit` follows.
    """

    texts: list[str]
    requester: Requester = NOBODY


class Detokenize(RequestMessage):
    """Return the bytes of packed token ids, which are in the vocabulary; with *apart* a list of the
    bytes of each.
    """

    tokens: bytes
    requester: Requester = NOBODY
    apart: bool = False


class ChatPrompt(RequestMessage):
    """Render and tokenize messages. Answered with `(text, tokens, appended, form)`.

    If the rendered text begins with *history* (the text so far, which ends with its last *answer*),
    only the rest is tokenized and *appended* is true, so that the history's tokens stay as they
    are. White space around the answer may differ, because templates trim it. After a request for a
    *turn*, `Submit` follows.

    An answer with tool calls, the message number *answer_at*, has other *forms*, the last one of
    which is its text. *form* is the number of the form that was rendered; 0 is that of `messages`.
    *cut_behind* and *media* are as in `Tokenize`; the contents of messages have the marks.
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
    media: list[MarkedMedia] = []


class MediaReady(Message):
    """The embeddings of the item with this *digest*, for each task of *scope* (see `scoped` in
    `kv.store`) that wants them. A descriptor of sealed memory is sent beside the frame: rows of
    float32, as many as the item has entries, then for an M-RoPE model four int32 for each entry,
    its positions relative to the item's first one (time, row, column, 0). *causal* is whether its
    entries see only those before them.
    """

    digest: bytes
    causal: bool = True
    scope: int = -1
    fd: int = -1
    """The descriptor, which the worker's end of the link fills in."""


class MediaFailed(Message):
    """No embeddings of this item can be made. The tasks of *scope* that want them fail."""

    digest: bytes
    error: ErrorFields
    scope: int = -1


class BufferPart(NamedTuple):
    """The input or output *name* is the part of a client's buffer from *offset* on."""

    name: str
    buffer: int
    offset: int
    length: int


class BufferUse(NamedTuple):
    """The parts of clients' buffers that a computation reads (*parts*) and writes (*places*).
    *buffers* are by handle their sizes and functions that return a new descriptor of them.
    """

    parts: Sequence[BufferPart] = ()
    places: Sequence[BufferPart] = ()
    buffers: Mapping[int, tuple[int, Callable[[], int]]] = {}


NO_BUFFERS = BufferUse()


class MapBuffer(Message):
    """Map a client's buffer: shared memory of a fixed *size*. A descriptor of it is sent beside the
    frame. Not answered: a computation that needs it fails if that is not possible.
    """

    buffer: int
    size: int
    fd: int = -1
    """The descriptor, which the worker's end of the link fills in."""


class UnmapBuffer(Message):
    """Unmap a buffer that was freed, after the computations that use it. Not answered."""

    buffer: int


class OpenChannel(Message):
    """Serve a *channel*: a socket whose other end a client has, which sends computations of a graph
    there. They are those of *owner*, in the class *priority* or another one up to *priority_max*.
    A descriptor of the socket is sent beside the frame. Not answered; see `ChannelsUsed`.
    """

    channel: int
    owner: Owner
    priority: Priority
    priority_max: Priority
    fd: int = -1
    """The descriptor, which the worker's end of the link fills in."""


class CloseChannel(Message):
    """Read nothing more from a channel, and close it once its computations have ended; or drop
    them, if its client has left (*at_once*). Not answered; see `ChannelsUsed`.
    """

    channel: int
    at_once: bool = False


class ChannelUse(NamedTuple):
    """The use of a *channel* since its last report."""

    channel: int
    computed: int = 0
    """The computations that have ended with outputs."""
    seconds: float = 0.0
    """The time that they took."""
    priority: Priority = Priority.LOW
    """The highest class of its computations."""
    under_way: int = 0
    """The computations that are under way or wait now."""
    closed: bool = False
    """Whether it has ended; no report follows."""


class ChannelsUsed(Message):
    """The use of channels. One that is used is reported at the first computation, about every
    `channels.REPORT_S` after that, and at its end.
    """

    uses: list[ChannelUse]
    busy_s: float = 0.0
    """The time since the last report in which any computation of a channel was under way or waited.
    """


class ComputedTensors(NamedTuple):
    """The outputs of a tensor model, and the seconds that computing them took."""

    outputs: list[NamedTensor]
    seconds: float


class ComputeTensors(RequestMessage):
    """Compute the outputs of a tensor model: `ComputedTensors`. The computation must begin within
    *wait_s* seconds, if that is not 0. A graph computes it *alone*, beside no other one, if it may
    have crashed the previous process. The bytes of inputs that are among *parts* are in buffers,
    and outputs that are among *places* are written to them: `MapBuffer` has preceded for each
    buffer.
    """

    inputs: list[NamedTensor]
    requester: Requester = NOBODY
    wait_s: float = 0.0
    alone: bool = False
    parts: list[BufferPart] = []
    places: list[BufferPart] = []


class RankPrompt(RequestMessage):
    """Tokenize a *query* with a *document* for a reranking model. Answered with the packed tokens,
    the number of those that depend on the query alone, and whether the document was truncated.

    A text of more than *tokens_max* tokens is truncated, if that is not 0. `Submit` follows.
    """

    query: bytes
    document: bytes
    tokens_max: int = 0
    requester: Requester = NOBODY


InputRequest = Tokenize | TokenizeParts | Detokenize | ChatPrompt | ComputeTensors | RankPrompt
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
    """Use this many threads from the next step on. Threads of a graph that are more than these are
    confined to as many cores, from number *first* on.
    """

    threads: int
    first: int = 0


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
    | EndReasoning
    | Credit
    | PullToken
    | SentenceCompared
    | Adjust
    | Tokenize
    | TokenizeParts
    | Detokenize
    | RankPrompt
    | ChatPrompt
    | ComputeTensors
    | MapBuffer
    | UnmapBuffer
    | OpenChannel
    | CloseChannel
    | MediaReady
    | MediaFailed
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
    """Output tokens that the grammar or the bound of reasoning forced."""
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    """Tokens that a drafter proposed and a step computed."""
    accepted_tokens: int = 0
    """Those of them that equal the sampled tokens."""
    compute_s: float = 0.0
    """Its part of the time of the steps that computed its tokens."""


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One task in the answer to `Queue`. `position` is 0 in a slot, 1 for the next to get one.
    `state` is that of the task, or "encoding" while it waits for the embeddings of an image or a
    sound.
    """

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
    """New tokens of a task, the text that they release (whole UTF-8 characters), and logprobs. Of
    the tokens, *forced* were not sampled. *drafted* and *accepted* count all drafts of the task
    when the first of the tokens was sampled, and *compute_s* is its compute time until then.
    """

    tokens: list[int]
    text: bytes
    surprisal: float | None = None
    """−ln of the probability that the model gave the last token, if the turn needs it."""
    logprobs: list[TokenLogprob] = []
    forced: int = 0
    ending_left: int = 0
    """The number of tokens of a forced end of reasoning that follow."""
    drafted: int = 0
    accepted: int = 0
    compute_s: float = 0.0


class MediaWanted(TaskMessage):
    """A task needs the embeddings of the items with these *digests*, in the order of its prompt.
    Answered, for each, with `MediaReady` or `MediaFailed`. It may want them again later: they are
    freed if a task before it needs the memory, or if a KV state covers the item that is lost later.
    """

    digests: list[bytes]


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
    is about the time until then, or None if nothing bounds it. Beside many tasks, a task's first
    place is reported without it, and then again.
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
    | ChannelsUsed
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
    | MediaWanted
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
