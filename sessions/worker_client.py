"""What a session needs of the machine below it: a model, and a worker that runs its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..backends import ModelInfo, Rendering
from ..backends.base import PLAIN_RENDERING
from ..backends.errors import WorkerCrashed
from ..scheduler.messages import AdapterReport, Adjust, Report, TaskSpec, Verdict
from .turns.sentence_checks import Comparison, Similarity

P = TypeVar("P")
T = TypeVar("T")
ASKED_AGAIN = 3
"""Workers that may die over a question before it is given up."""


class TaskReader(Protocol):
    """A listener of a task. It outlives the worker that runs the task."""

    @property
    def spec(self) -> TaskSpec:
        """The task as it stands: with the parameters that hold from the next token on."""

    @property
    def begun(self) -> bool:
        """Tell whether a worker has begun with the task: it has had a slot, or told something."""

    def report(self, report: Report) -> None:
        """Take what the engine tells; the last report is `Finished` or `Failed`."""

    def continue_on(self, client: TaskClient) -> TaskSpec | None:
        """Take the client of another worker, and return the task as it goes on there: with what was
        told so far. None if nobody waits for it any more.
        """


class TaskClient(Protocol):
    """What a turn needs of a worker."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""

    def submit(self, spec: TaskSpec, reader: TaskReader) -> None:
        """Queue a task, which reports to *reader*."""

    def cancel(self, task_id: int) -> None:
        """Stop a task before the next step; `Failed` with `Cancelled` follows."""

    def credit(self, task_id: int, events: int) -> None:
        """Let a push task tell *events* more."""

    def pull(self, task_id: int) -> None:
        """Ask a pull task for its next token."""

    def adjust(self, command: Adjust) -> None:
        """Let a task's parameters hold from its next token on."""

    def judge(self, verdict: Verdict) -> None:
        """Tell a task whether it ends with its last sentence."""


class WorkerClient(TaskClient, Protocol):
    """The client of a loaded model's worker. All calls are made on the daemon's event loop."""

    @property
    def adapters(self) -> Mapping[str, AdapterReport]:
        """The model's adapters, by their names."""

    async def tokenize(
        self, text: bytes, *, special: bool, bos: bool, turn: bool = False
    ) -> list[int]:
        """Return the token ids of *text*; the next step waits a moment for the task of a *turn*."""

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the text of token ids."""

    async def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        said: str = "",
        answer: str = "",
        rendering: Rendering = PLAIN_RENDERING,
        *,
        turn: bool = False,
    ) -> tuple[str, list[int], bool]:
        """Return the rendered text, its tokens, and whether these only add to *said*, which ends
        with *answer*; the next step waits a moment for the task of a *turn*.
        """

    async def lookup(
        self, owner: int, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        """Return how many of *tokens* need not be computed again for a session, as of now."""

    async def forget(self, owner: int, session: str) -> None:
        """Forget a session's KV states, in memory and on disk; returns when it is done."""

    async def reserve_embedding_memory(self) -> None:
        """Have memory for embeddings, which are made beside all else.

        :raises OutOfMemory: there is too little of it.
        """

    def keep(
        self, owner: int, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Have a session's KV state written to disk, some time soon."""


class Predecessor(Protocol):
    """A model that had a name before a swap."""

    async def ready(self) -> WorkerClient:
        """Return the client of its worker, to another one if it has died.

        :raises LoadFailed: it cannot be loaded any more.
        :raises WorkerCrashed: it has left for good.
        """


class ModelSource(Protocol):
    """A lease on a model, which may have to be loaded first."""

    @property
    def name(self) -> str:
        """The name that clients use."""

    @property
    def held(self) -> bool:
        """Whether turns are held back: the model leaves, and another one is to take its name."""

    async def released(self) -> None:
        """Wait until turns are held back no more."""

    @property
    def loaded(self) -> WorkerClient | None:
        """The client of the model's worker, if the model is loaded."""

    def predecessor(self, vocabulary: str) -> Predecessor | None:
        """Return a model that had the name before a swap, by its vocabulary's hash, while it is
        there.
        """

    async def ready(self) -> WorkerClient:
        """Return the client of the model's worker, loading it if it is not there.

        :raises LoadFailed: it cannot be loaded.
        """

    def compare(self, comparison: Comparison, tell: Callable[[Similarity], None]) -> None:
        """Have a sentence of a turn compared; *tell* hears what came out, soon and in any case."""


async def ask_again(ready: Callable[[], Awaitable[P]], question: Callable[[P], Awaitable[T]]) -> T:
    """Return the answer of the worker that *ready* gives, of another one where it dies meanwhile.

    :raises WorkerCrashed: the question ended the worker, or too many workers have died.
    """
    for _ in range(ASKED_AGAIN):
        try:
            return await question(await ready())
        except WorkerCrashed as exc:
            if exc.data.get("cause") == "input":
                raise
    return await question(await ready())
