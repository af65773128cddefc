"""Embeddings of texts. Each text is a turn of a session of its own."""

from __future__ import annotations

from itertools import count

import anyio
import msgspec

from ...backends.errors import Busy, InferdError, InvalidArgument, TooLarge
from ...backends.params import read_options
from ...ipc import messages as w
from ...ipc.server.server_connection import Request
from ...scheduler.messages import Embedded
from ...sessions import Parameters, Session, SessionSettings, Turn, TurnOptions
from ..core import CallTable, Daemon, Graph
from .arguments import TIMEOUT_S_MIN, turn_options

TEXTS_AT_ONCE_MAX = 16
"""Concurrent turns of one call; the other texts do not count as waiting tasks."""
RESULT_BYTES_MAX = 6 << 20
"""Bytes of all vectors of a result, which must fit a frame."""


async def embed(daemon: Daemon, request: Request) -> w.EmbedResult:
    """Embed texts concurrently."""
    p: w.EmbedParams = request.params
    daemon.check_open()
    if not 0 < len(p.texts) <= w.EMBED_TEXTS_MAX:
        raise InvalidArgument(
            f"{len(p.texts)} texts; the range is 1 … {w.EMBED_TEXTS_MAX}", hint="make several calls"
        )
    daemon.ledger.check_tokens(request.connection.peer.uid)  # once for the call, not for each text
    work = _Texts(daemon, request, daemon.graph(request.connection, p.graph))
    await work.embed_all()
    return work.result()


class _Texts:
    """The texts of one call. Lives on the daemon's event loop."""

    def __init__(self, daemon: Daemon, request: Request, graph: Graph):
        p: w.EmbedParams = request.params
        own = {"embedding": True, "pooling": p.pooling, "embd-normalize": p.normalize}
        self._options = graph.options | read_options(own, strict=True).values
        self._turn_options = turn_options(p, TurnOptions(embeds=True, goes_on=True))
        self._daemon, self._graph, self._texts = daemon, graph, p.texts
        self._owner = request.connection.peer.uid
        self._began = daemon.ledger.seconds()
        self._turns: dict[int, Turn] = {}
        self._bytes = 0
        self._next = count()
        self._under_way = 0
        self._one_ended = anyio.Event()
        self._error: Exception | None = None

    async def embed_all(self) -> None:
        """Embed all texts; the first failure ends the others.

        :raises InferdError: a text has failed.
        """
        async with anyio.create_task_group() as group:
            for _ in range(min(TEXTS_AT_ONCE_MAX, len(self._texts))):
                group.start_soon(self._work, group.cancel_scope)
        if self._error is not None:
            raise self._error

    async def _work(self, scope: anyio.CancelScope) -> None:
        try:
            while (index := next(self._next)) < len(self._texts):
                self._daemon.check_open()
                await self._embed(index)
        except Exception as exc:  # the caller gets the first error, not a group
            self._error = self._error or exc
            scope.cancel()

    async def _embed(self, index: int) -> None:
        daemon = self._daemon
        settings = SessionSettings(Parameters(self._options))
        session = Session(
            daemon.new_handle(), self._owner, self._graph.lease, daemon.ledger, settings
        )
        daemon.one_turn_sessions.add(session)
        try:
            await session.input.set_input(self._texts[index].encode())
            turn = await self._start(session)
            try:
                await session.runner.finish_turn(turn)
            finally:
                self._end_one()
        finally:
            daemon.one_turn_sessions.discard(session)
        self._add_turn(index, turn)

    async def _start(self, session: Session) -> Turn:
        """Start the turn of a text; if the queue is full, retry after another text has ended."""
        while True:
            self._under_way += 1
            try:
                return await session.runner.start_turn(self._options_now())
            except Busy:
                self._under_way -= 1
                if not self._under_way:
                    raise
            except BaseException:
                self._end_one()
                raise
            await self._one_ended.wait()

    def _end_one(self) -> None:
        self._under_way -= 1
        ended, self._one_ended = self._one_ended, anyio.Event()
        ended.set()

    def _options_now(self) -> TurnOptions:
        options = self._turn_options
        if not options.timeout_s:
            return options
        passed_s = self._daemon.ledger.seconds() - self._began
        left_s = max(TIMEOUT_S_MIN, options.timeout_s - passed_s)
        return msgspec.structs.replace(options, timeout_s=left_s)

    def _add_turn(self, index: int, turn: Turn) -> None:
        self._turns[index] = turn
        self._bytes += len(_embedding(turn).vectors)
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
        first = _embedding(turns[0])
        return w.EmbedResult(
            embeddings=[_embedding(turn).vectors for turn in turns],
            size=first.size,
            pooling=first.pooling,
            tokens=[turn.stats.prompt_tokens for turn in turns if turn.stats is not None],
            model=self._graph.lease.name,
            fingerprint=turns[0].client.info.fingerprint,
        )


def _embedding(turn: Turn) -> Embedded:
    if turn.embedding is None:
        raise InferdError("a turn has ended without an embedding")
    return turn.embedding


CALLS: CallTable = {"embed": embed}
