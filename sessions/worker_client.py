"""Interfaces that a session uses of its model and of the worker that runs its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ..backends import ModelInfo, Rendering
from ..backends.base import PLAIN_RENDERING
from ..backends.errors import WorkerCrashed
from ..backends.media import MarkedMedia, MediaContent, MediaTokens
from ..backends.tensors import NamedTensor
from ..scheduler import messages as m
from ..scheduler.messages import AdapterReport, Command, Report, TaskSpec
from ..scheduler.owner import PRIORITY_MAX, Owner, Priority, Requester
from ..scheduler.rank_text import RankTokens

P = TypeVar("P")
T = TypeVar("T")
_RETRIES_MAX = 30
"""Times that a query is repeated after its worker has died. The model's source delays the later
repetitions, to one in 4 s.
"""


class ChatTokens(NamedTuple):
    """The text of a chat and its tokens; if *appended*, only those that extend the history. *form*
    is the index of the form in which the text has the history's last answer.
    """

    text: str
    tokens: list[int]
    appended: bool
    form: int = 0


class TaskReader(Protocol):
    """A listener of a task. It outlives the worker that runs the task."""

    @property
    def spec(self) -> TaskSpec:
        """The task, with the parameters in force from the next token on."""

    @property
    def begun(self) -> bool:
        """Whether the task has had a slot or has sent something."""

    def report(self, report: Report) -> None:
        """Handle a report of the engine; the last one is `Finished` or `Failed`."""

    def continue_on(self, client: TaskClient) -> TaskSpec | None:
        """Switch to the client of another worker, and return the task that continues there, with
        its output so far. Return None if the task has ended.
        """

    def media_encoded(self, items: int, seconds: float) -> None:
        """Note that so many *items* of the task were encoded for it, in this time."""

    def unread_for(self, seconds: float) -> bool:
        """Return whether nobody has read the task's output for *seconds*."""


class TaskClient(Protocol):
    """The part of a worker that a turn uses."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""

    def submit(self, spec: TaskSpec, reader: TaskReader) -> None:
        """Queue a task, which reports to *reader*."""

    def send_command(self, command: Command) -> None:
        """Send a command for a task: `Cancel`, `Credit`, `PullToken`, `Adjust` or
        `SentenceCompared`. After `Cancel`, the task reports `Failed` with the error `Cancelled`.
        """

    def has_task(self, task_id: int, reader: TaskReader) -> bool:
        """Return whether the worker has a task for this *reader*. Otherwise the task has ended, is
        on its way to another worker, or is suspected of having crashed one.
        """

    def withdraw_task(self, task_id: int) -> None:
        """Stop a task that the worker has; it reports nothing more."""

    def keep_turn(self, reader: TaskReader) -> None:
        """Keep a task that no worker has. It continues in a worker after the next `Credit`."""


class TextClient(Protocol):
    """The part of a worker that tokenizes and renders one user's texts."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""

    async def read_media(self, contents: Sequence[MediaContent]) -> list[MediaTokens]:
        """Return the tokens of images and sounds that are in the user's media store.

        :raises UnsupportedOperation: the model reads no images, or no sounds.
        :raises InvalidArgument: a content is not an image or a sound. `data.item` is its index.
        :raises TooLarge: an image has more tokens than a batch holds, or too many pixels.
        """

    async def tokenize(
        self,
        text: bytes,
        *,
        special: bool,
        bos: bool,
        turn: bool = False,
        cut_behind: int = -1,
        media: Sequence[MarkedMedia] = (),
    ) -> list[int]:
        """Return the token ids of *text*; with *turn* the next step waits a moment for its task.
        *media* replace their marks in *text*.

        :raises PromptTooLong: no context holds *text*, and *cut_behind* is negative. Otherwise the
            middle of such a text is left out, but none of its first *cut_behind* tokens.
        """

    async def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens that begin a prompt, and those of each text by itself, in which names
        of special tokens are texts. The next step waits a moment for a task.
        """

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the text of token ids."""

    async def pieces_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the text of each of the token ids, none of which is of an image or a sound."""

    async def rank_prompt(self, query: bytes, document: bytes, tokens_max: int) -> RankTokens:
        """Return the tokens by which the model scores a document for a query. With *tokens_max*,
        which is not 0, the document is truncated to fit.

        :raises UnsupportedOperation: it is not a reranking model.
        :raises PromptTooLong: the query leaves too few tokens for a document, or the model could
            read neither of them whole.
        """

    async def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        said: str = "",
        answer: str = "",
        rendering: Rendering = PLAIN_RENDERING,
        *,
        turn: bool = False,
        answer_at: int = -1,
        forms: Sequence[dict[str, Any]] = (),
        cut_behind: int = -1,
        media: Sequence[MarkedMedia] = (),
    ) -> ChatTokens:
        """Return the rendered text with its tokens, or only with those that extend the text *said*.
        That text ends with *answer*, which is the message number *answer_at*. Other *forms* of this
        message may be rendered instead. *turn*, *cut_behind* and *media* are as in `tokenize`; the
        contents of messages have the marks, and so has the rendered text.
        """


class WorkerClient(TaskClient, Protocol):
    """The client of a loaded model's worker. All calls are made on the daemon's event loop."""

    @property
    def adapters(self) -> Mapping[str, AdapterReport]:
        """The model's adapters, by their names."""

    def texts_of(self, requester: Requester) -> TextClient:
        """Return the client for a user's texts, which are queued by *requester*'s class."""

    async def compute_tensors(
        self,
        requester: Requester,
        inputs: Sequence[NamedTensor],
        wait_s: float = 0.0,
        *,
        alone: bool = False,
        use: m.BufferUse = m.NO_BUFFERS,
    ) -> m.ComputedTensors:
        """Return the outputs that a tensor model computes of *inputs*, which are queued by the
        *requester*'s class, and the time that it took. *alone* is as in `ComputeTensors`;
        *use* are the parts of buffers that it reads and writes.

        :raises UnsupportedOperation: the model computes no tensors.
        :raises Timeout: the computation did not begin within *wait_s* seconds, if that is not 0.
        """

    async def count_cached_tokens(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        """Return how many of *tokens* need not be computed again for a session, as of now."""

    async def delete_session_states(self, owner: Owner, session: str) -> None:
        """Delete a session's KV states, in memory and on disk; return when it is done."""

    async def reserve_embedding_memory(self) -> None:
        """Reserve memory for the embedding context.

        :raises OutOfMemory: there is too little of it.
        """

    def save_session(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Request that a session's KV state is written to disk; do not wait for it."""

    async def export_state(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> str:
        """Ensure that the KV state of a dormant session is on disk, if there is one; return the
        name of its file, or else an empty text.
        """

    async def save_named_state(
        self, owner: Owner, name: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        """Ensure that the KV state of *tokens* is on disk under the engine's *name* of a named
        state; return the number of its tokens there.
        """

    def prepare_named_state(
        self, owner: Owner, name: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Request that the KV state of a named state is in memory and on disk, as far as it is in
        one of them; do not wait for it.
        """

    def share_named_state(
        self,
        owner: Owner,
        name: str,
        adapters: tuple[str, ...],
        tokens: Sequence[int],
        for_user: int,
    ) -> None:
        """Request that the KV state of a named state is in memory for another user, if it is in
        memory or on disk; do not wait for it.
        """


class Predecessor(Protocol):
    """A model that had a name before a swap."""

    async def ready(self) -> WorkerClient:
        """Return the client of its worker, of a new worker if that has died.

        :raises LoadFailed: it can no longer be loaded.
        :raises WorkerCrashed: it was unloaded for good.
        """


class NameCeilings(NamedTuple):
    """The bounds of turns by one name of a model, in the table *setting* of the configuration."""

    setting: str = ""
    n_predict_max: int | None = None
    reasoning_max: Mapping[str, int] = {}
    """The maximum number of tokens of a thought, by class."""
    priority_max: Priority = PRIORITY_MAX
    """Turns of a higher class have this one."""

    def reasoning_bound(self, priority: Priority) -> tuple[str, int] | None:
        """Return the bound on the tokens of a thought in a turn of a class, if any, after the name
        of its setting.
        """
        if priority.label not in self.reasoning_max:
            return None
        return f"{self.setting}.reasoning-max", self.reasoning_max[priority.label]


NO_CEILINGS = NameCeilings()


class ModelSource(Protocol):
    """A lease on a model, which may have to be loaded first."""

    @property
    def name(self) -> str:
        """The name that clients use."""

    @property
    def base(self) -> str:
        """The model's own name, of which `name` may be another name."""

    @property
    def ceilings(self) -> NameCeilings:
        """The bounds of turns by `name`."""

    @property
    def held(self) -> bool:
        """Whether turns are held back because another model is about to replace this one."""

    async def released(self) -> None:
        """Wait until turns are no longer held back."""

    @property
    def loaded(self) -> WorkerClient | None:
        """The client of the model's worker, if the model is loaded."""

    def predecessor(self, vocabulary: str) -> Predecessor | None:
        """Return the loaded model that had the name before a swap and has this vocabulary hash."""

    async def ready(self) -> WorkerClient:
        """Return the client of the model's worker; load the model if necessary.

        :raises LoadFailed: it cannot be loaded.
        """

    def compare(self, comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        """Compare a sentence of a turn; *report* gets the result soon, also after a failure."""


async def retry_query(ready: Callable[[], Awaitable[P]], query: Callable[[P], Awaitable[T]]) -> T:
    """Return the result of *query* on the worker from *ready*; if that dies, repeat it on another.

    :raises WorkerCrashed: the query's input crashed the worker, or too many workers have died.
    """
    for _ in range(_RETRIES_MAX):
        try:
            return await query(await ready())
        except WorkerCrashed as exc:
            if exc.data.get("cause") == "input":
                raise
    return await query(await ready())


class Comparison(NamedTuple):
    """A sentence and the text to compare it with, for a turn of *owner* with this *priority*."""

    owner: Owner
    priority: Priority
    sentence: str
    text: str


class Similarity(NamedTuple):
    """The cosine of both embeddings, or None if they were not compared, for the reason *why*."""

    cosine: float | None
    why: str = ""
