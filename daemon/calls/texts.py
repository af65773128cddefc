"""Calls that need a model but no session: tokens, prompts and embeddings of texts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
import msgspec

from ...backends import Rendering
from ...backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    PromptTooLong,
    TooLarge,
    WorkerCrashed,
)
from ...backends.params import read_options
from ...ipc import messages as w
from ...ipc.chat_messages import checked_messages
from ...ipc.server.request import Request
from ...scheduler.embeddings.inputs import check_text
from ...scheduler.messages import Embedded
from ...scheduler.priority import Priority, Requester
from ...sessions import Parameters, Session, SessionSettings, Turn, TurnOptions
from ..core import Daemon
from ..graph_table import Graph
from .arguments import TIMEOUT_S_MIN, turn_options

TEXTS_AT_ONCE_MAX = 16
"""Concurrent turns of one `embed` call; its other texts do not count as waiting tasks."""
ERRORS_OF_TEXTS = (InvalidArgument, PromptTooLong, TooLarge, WorkerCrashed)
"""Errors that get the index of their text as `data.index`."""
RESULT_BYTES_MAX = 6 << 20
"""Bytes of all vectors of a result, which must fit a frame."""


async def tokenize(daemon: Daemon, request: Request) -> w.TokensResult:
    """Tokenize text."""
    p: w.TokenizeParams = request.params
    text = p.text.encode()
    lease = daemon.graph(request).lease
    requester = _requester(daemon, request)
    tokens = await lease.query(
        lambda c: c.texts_of(requester).tokenize(text, special=p.special, bos=p.bos)
    )
    return w.TokensResult(tokens=tokens)


async def detokenize(daemon: Daemon, request: Request) -> w.TextResult:
    """Detokenize token ids."""
    p: w.DetokenizeParams = request.params
    lease = daemon.graph(request).lease
    size = (await lease.ready()).info.vocab_size
    for token in (min(p.tokens, default=0), max(p.tokens, default=0)):
        if not 0 <= token < size:
            raise InvalidArgument(f"token {token} is not in the vocabulary of {size}")
    requester = _requester(daemon, request)
    text = await lease.query(lambda client: client.texts_of(requester).detokenize(p.tokens))
    return w.TextResult(text=text)


async def apply_template(daemon: Daemon, request: Request) -> w.TemplateResult:
    """Render messages by the chat template."""
    p: w.TemplateParams = request.params
    graph = daemon.graph(request)
    messages, rendering = checked_messages(p.messages), _rendering(graph, p)
    requester = _requester(daemon, request)
    prompt = await graph.lease.query(
        lambda client: client.texts_of(requester).chat_prompt(messages, rendering=rendering)
    )
    return w.TemplateResult(text=prompt.text.encode(), tokens=len(prompt.tokens))


def _requester(daemon: Daemon, request: Request) -> Requester:
    return daemon.ledger.requester(request.owner, Priority.NORMAL)


def _rendering(graph: Graph, p: w.TemplateParams) -> Rendering:
    """Return the template's inputs: those of the call, or else those of the graph."""
    given = read_options({"tools": p.tools, "chat-template-kwargs": p.arguments}).values
    return Rendering(
        tools=given["tools"] or graph.options.get("tools", []),
        arguments=given["chat-template-kwargs"] or graph.options.get("chat-template-kwargs", {}),
        add_generation_prompt=p.add_generation_prompt,
    )


async def embed(daemon: Daemon, request: Request) -> w.EmbedResult:
    """Embed texts concurrently, each by a turn of a session of its own."""
    p: w.EmbedParams = request.params
    daemon.check_open()
    if not 0 < len(p.texts) <= w.EMBED_TEXTS_MAX:
        raise InvalidArgument(
            f"{len(p.texts)} texts; the range is 1 … {w.EMBED_TEXTS_MAX}", hint="make several calls"
        )
    daemon.ledger.check_tokens(request.owner)  # once for the call, not for each text
    embeddings = _Embeddings(daemon, request)
    await embeddings.compute_all()
    return embeddings.result()


class _Embeddings:
    """The embeddings of one call's texts. Lives on the daemon's event loop."""

    def __init__(self, daemon: Daemon, request: Request):
        p: w.EmbedParams = request.params
        own = {"embedding": True, "pooling": p.pooling, "embd-normalize": p.normalize}
        self._daemon, self._graph, self._texts = daemon, daemon.graph(request), p.texts
        self._parameters = self._graph.options | read_options(own, strict=True).values
        self._turn_options = turn_options(p, TurnOptions(embeds=True, quota_checked=True))
        self._owner = request.owner
        self._began = daemon.ledger.seconds()
        self._sessions: list[Session] = []
        """A session for each text."""
        self._turns: dict[int, Turn] = {}
        """The turns that have ended, by the index of their text."""
        self._bytes = 0
        self._turns_under_way = 0
        self._one_ended = anyio.Event()
        self._error: Exception | None = None

    async def compute_all(self) -> None:
        """Check all texts, then embed them; the first failure ends the others.

        :raises InferdError: a text has failed; see `ERRORS_OF_TEXTS`.
        """
        daemon = self._daemon
        for _ in self._texts:
            settings, lease = SessionSettings(Parameters(self._parameters)), self._graph.lease
            self._sessions.append(
                Session(daemon.new_handle(), self._owner, lease, daemon.ledger, settings)
            )
        daemon.one_turn_sessions.update(self._sessions)
        try:
            await self._for_each_text(self._check_text)
            await self._for_each_text(self._embed_text)
        finally:
            daemon.one_turn_sessions.difference_update(self._sessions)

    async def _for_each_text(self, do: Callable[[int], Awaitable[None]]) -> None:
        """Call *do* with the index of each text."""
        indexes = iter(range(len(self._texts)))
        async with anyio.create_task_group() as group:
            for _ in range(min(TEXTS_AT_ONCE_MAX, len(self._texts))):
                group.start_soon(self._call_with_each, do, indexes, group.cancel_scope)
        if self._error is not None:
            raise self._error

    async def _call_with_each(
        self, do: Callable[[int], Awaitable[None]], indexes: Iterator[int], scope: anyio.CancelScope
    ) -> None:
        for index in indexes:
            try:
                self._daemon.check_open()
                await do(index)
            except Exception as exc:  # the caller gets the first error, not a group
                if isinstance(exc, ERRORS_OF_TEXTS):
                    exc.data["index"] = index
                self._error = self._error or exc
                scope.cancel()
                return

    async def _check_text(self, index: int) -> None:
        """Tokenize a text and check it."""
        session, p = self._sessions[index], self._parameters
        tokens = await session.input.set_input(self._texts[index].encode())
        info = (await session.link.client()).info
        check_text(tokens, p.get("pooling", ""), p.get("ctx-size", 0), info.embedding)

    async def _embed_text(self, index: int) -> None:
        session = self._sessions[index]
        turn = await self._start_turn(session)
        try:
            await session.runner.finish_turn(turn)
        finally:
            self._end_turn()
            self._daemon.one_turn_sessions.discard(session)
        self._add_turn(index, turn)

    async def _start_turn(self, session: Session) -> Turn:
        """Start the turn of a text; if the queue is full, retry when another turn has ended."""
        while True:
            self._turns_under_way += 1
            try:
                return await session.runner.start_turn(self._remaining_options())
            except Busy:
                self._turns_under_way -= 1
                if not self._turns_under_way:
                    raise
            except BaseException:
                self._end_turn()
                raise
            await self._one_ended.wait()

    def _end_turn(self) -> None:
        self._turns_under_way -= 1
        ended, self._one_ended = self._one_ended, anyio.Event()
        ended.set()

    def _remaining_options(self) -> TurnOptions:
        """Return the turn options, with the rest of the call's timeout."""
        options = self._turn_options
        if not options.timeout_s:
            return options
        rest_s = options.timeout_s - (self._daemon.ledger.seconds() - self._began)
        return msgspec.structs.replace(options, timeout_s=max(TIMEOUT_S_MIN, rest_s))

    def _add_turn(self, index: int, turn: Turn) -> None:
        self._turns[index] = turn
        self._bytes += len(_embedding_of(turn).vectors)
        if self._bytes > RESULT_BYTES_MAX:
            raise TooLarge(
                f"the vectors of {len(self._turns)} of {len(self._texts)} texts have"
                f" {self._bytes} bytes; a result holds {RESULT_BYTES_MAX}",
                hint="send fewer texts in a call",
                data={"bytes": self._bytes, "result_bytes_max": RESULT_BYTES_MAX},
            )

    def result(self) -> w.EmbedResult:
        """Return the result, in the order of the texts."""
        turns = [self._turns[index] for index in range(len(self._texts))]
        first = _embedding_of(turns[0])
        return w.EmbedResult(
            embeddings=[_embedding_of(turn).vectors for turn in turns],
            size=first.size,
            pooling=first.pooling,
            tokens=[turn.stats.prompt_tokens for turn in turns if turn.stats is not None],
            model=self._graph.lease.name,
            fingerprint=turns[0].client.info.fingerprint,
        )


def _embedding_of(turn: Turn) -> Embedded:
    if turn.embedding is None:
        raise InferdError("a turn has ended without an embedding")
    return turn.embedding


CALLS = (tokenize, detokenize, apply_template, embed)
