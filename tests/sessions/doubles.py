"""A session manager on an in-process engine: real sessions, real engine, a clock of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import anyio

from inferd.backends import AdapterInfo, AdapterSpec, ModelInfo, Rendering
from inferd.backends.base import PLAIN_RENDERING
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.media import MarkedMedia, MediaContent, MediaItem, MediaTokens
from inferd.backends.tensors import NamedTensor
from inferd.scheduler import messages as m
from inferd.scheduler.engine.tokenizing import appended_text
from inferd.scheduler.owner import Owner, Requester
from inferd.scheduler.rank_text import RankTokens, rank_tokens
from inferd.sessions import AdmissionBounds, DormantLimits, Ledger, SessionManager
from inferd.sessions.turn.turn import Comparer, Turn, compare_nothing
from inferd.sessions.worker_client import (
    NO_CEILINGS,
    ChatTokens,
    Comparison,
    Predecessor,
    Similarity,
    TaskReader,
)
from tests.scheduler.doubles import Bench

IMAGE_SIZE = 6
"""The entries of each item that `InProcessClient` reads."""


def media_tokens(content: MediaContent, projector: str = "projector") -> MediaTokens:
    """Return a content as `InProcessClient` reads it: an item between < and >."""
    item = MediaItem.of_content(content, projector, "build", index=0, size=IMAGE_SIZE)
    return MediaTokens([ord("<"), *item.entries(), ord(">")], (item,))


def spliced(
    text: str, media: Sequence[MarkedMedia], tokenize: Callable[[str], list[int]]
) -> list[int]:
    """Return the tokens of a text, with those of *media* in place of their marks."""
    found: list[int] = []
    for one in media:
        before, mark, after = text.partition(one.mark)
        if mark:
            found += tokenize(before) + m.unpack_tokens(one.tokens)
            text = after
    return found + tokenize(text)


class InProcessClient:
    """A `sessions.WorkerClient` on an engine in this process, which is turned by `run`.

    `held` is the number of tokens that `count_cached_tokens` finds; `deleted` and `kept` record
    the calls.
    """

    def __init__(self, bench: Bench):
        self.bench = bench
        self.held = 0
        self.room: Exception | None = None
        """Why there is no memory for embeddings."""
        self.deleted: list[tuple[Owner, str]] = []
        self.kept: list[tuple[Owner, str, list[int]]] = []
        self.kept_with: list[tuple[str, ...]] = []
        self.commands: list[m.Command] = []
        self.readers: dict[int, TaskReader] = {}
        self.aside: dict[int, TaskReader] = {}
        """Turns whose sessions have no place."""
        self.reads: tuple[str, ...] = ("image", "audio")
        """The kinds of media that the model reads."""
        self.projector = "projector"
        self.contents_read: list[MediaContent] = []

    @property
    def info(self) -> ModelInfo:
        return self.bench.model.info

    @property
    def adapters(self) -> dict[str, m.AdapterReport]:
        info = AdapterInfo(id="upper", size_bytes=0)
        spec = AdapterSpec(name="loud", path="loud.txt")
        return {"loud": m.AdapterReport(spec=spec, info=info)}

    def submit(self, spec: m.TaskSpec, reader: TaskReader) -> None:
        self.readers[spec.id] = reader
        self.commands.append(m.Submit(spec))

    def send_command(self, command: m.Command) -> None:
        task_id = getattr(command, "task_id", -1)
        if isinstance(command, m.Credit | m.PullToken | m.Cancel) and task_id in self.aside:
            reader = self.aside.pop(task_id)
            spec = None if isinstance(command, m.Cancel) else reader.continue_on(self)
            if spec is not None:
                self.submit(spec, reader)
            return
        self.commands.append(command)

    def has_task(self, task_id: int, reader: TaskReader) -> bool:
        return (self.readers | self.aside).get(task_id) is reader

    def withdraw_task(self, task_id: int) -> None:
        if self.aside.pop(task_id, None) is None:
            del self.readers[task_id]
            self.commands.append(m.Cancel(task_id))

    def keep_turn(self, reader: TaskReader) -> None:
        self.aside[reader.spec.id] = reader

    def texts_of(self, requester: Requester) -> InProcessClient:
        return self

    async def read_media(self, contents: Sequence[MediaContent]) -> list[MediaTokens]:
        await anyio.lowlevel.checkpoint()
        for number, content in enumerate(contents):
            if content.kind not in self.reads:
                raise UnsupportedOperation(f"no {content.kind} here", data={"item": number})
        self.contents_read += contents
        return [media_tokens(content, self.projector) for content in contents]

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
        model = self.bench.model
        if not media:
            return model.tokenize(text, special=special, bos=bos)
        begin_and_end = model.tokenize(b"", special=special, bos=bos)
        half = len(begin_and_end) // 2
        tokens = spliced(
            text.decode(), media, lambda s: model.tokenize(s.encode(), special=False, bos=False)
        )
        return [*begin_and_end[:half], *tokens, *begin_and_end[half:]]

    async def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        tokenize = self.bench.model.tokenize
        parts = [tokenize(text.encode(), special=False, bos=False) for text in texts]
        return [tokenize(b"", special=False, bos=True)[:1], *parts]

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self.bench.model.piece, tokens))

    async def pieces_of(self, tokens: Sequence[int]) -> list[bytes]:
        return list(map(self.bench.model.piece, tokens))

    async def rank_prompt(self, query: bytes, document: bytes, tokens_max: int) -> RankTokens:
        model = self.bench.model
        assert model.info.embedding is not None
        tokenize = partial(model.tokenize, special=False, bos=False)
        parts = model.info.embedding.rank_parts
        return rank_tokens(parts, query, document, tokenize, tokens_max)

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
        model = self.bench.model
        text = model.render(list(messages), rendering)
        rest = appended_text(text, said, answer)
        tokens = await self.tokenize(
            (text if rest is None else rest).encode(), special=True, bos=rest is None, media=media
        )
        return ChatTokens(text, tokens, rest is not None)

    async def compute_tensors(
        self,
        requester: Requester,
        inputs: Sequence[NamedTensor],
        wait_s: float = 0.0,
        *,
        alone: bool = False,
        use: m.BufferUse = m.NO_BUFFERS,
    ) -> m.ComputedTensors:
        await anyio.lowlevel.checkpoint()
        return m.ComputedTensors(list(inputs), 0.0)

    async def count_cached_tokens(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        return min(self.held, len(tokens))

    async def reserve_embedding_memory(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.room is not None:
            raise self.room

    async def delete_session_states(self, owner: Owner, session: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.deleted.append((owner, session))

    def save_session(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        self.kept.append((owner, session, list(tokens)))
        self.kept_with.append(adapters)

    async def export_state(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> str:
        await anyio.lowlevel.checkpoint()
        return ""

    async def save_named_state(
        self, owner: Owner, name: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        await anyio.lowlevel.checkpoint()
        return 0

    def prepare_named_state(
        self, owner: Owner, name: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        pass

    def share_named_state(
        self,
        owner: Owner,
        name: str,
        adapters: tuple[str, ...],
        tokens: Sequence[int],
        for_user: int,
    ) -> None:
        pass

    def turn(self) -> bool:
        """Turn the engine once; return whether there may be more to do."""
        commands, self.commands = self.commands, []
        for report in self.bench.iterate(*commands):
            number = getattr(report, "task_id", -1)
            if number in self.readers:
                self.readers[number].report(report)
        return bool(self.commands) or self.bench.engine.wait_s_max() == 0

    def run(self) -> None:
        """Turn the engine until it has nothing to do."""
        while self.turn():
            pass


def dying(
    turn: Turn, port: InProcessClient, deaths: Sequence[int], worker: Callable[[], InProcessClient]
) -> InProcessClient:
    """Let a turn's worker die after so many of its turns, and each that takes its place; return the
    last one.
    """
    for turns in deaths:
        for _ in range(turns):
            port.turn()
        port = worker()
        again = turn.continue_on(port)
        if again is not None:
            port.submit(again, turn)
    return port


class Source:
    """A lease on the echo model. `comparer` compares sentences."""

    held = False
    ceilings = NO_CEILINGS

    def __init__(self, port: InProcessClient, name: str = "echo"):
        self.name, self.base, self.port = name, name, port
        self.loaded: InProcessClient | None = port
        self.comparer: Comparer = compare_nothing
        self.old: InProcessClient | None = None
        """The client of the model before a swap."""

    def predecessor(self, vocabulary: str) -> Predecessor | None:
        return None if self.old is None else Source(self.old)

    async def released(self) -> None:
        return

    async def ready(self) -> InProcessClient:
        return self.port

    def compare(self, comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        self.comparer(comparison, report)


class Harness:
    """A manager, a port and a clock."""

    def __init__(self, sessions_max: int = 3, waiting_max: int = 100):
        self.now = 0.0
        self.port = InProcessClient(Bench())
        self.source = Source(self.port)
        numbers = count(1)
        self.ledger = Ledger(AdmissionBounds(waiting_max, waiting_max), lambda: self.now)
        self.manager = SessionManager(
            self.ledger,
            lambda: next(numbers),
            sessions_max=sessions_max,
            idle_timeout_s=300.0,
            dormant_limits=DormantLimits(sessions_max=2),
        )
