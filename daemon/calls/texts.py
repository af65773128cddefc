"""Calls that need a model but no session: tokens, prompts and embeddings of texts, and the ranks of
documents.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import anyio
import msgspec

from ...backends import EmbedInfo, Rendering
from ...backends.embedder import check_pooling
from ...backends.errors import (
    BackendError,
    Busy,
    InferdError,
    InvalidArgument,
    PromptTooLong,
    TooLarge,
    WorkerCrashed,
)
from ...backends.params import read_options
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...scheduler.embeddings import check_text, text_tokens_max, truncated_tokens
from ...scheduler.messages import Embedded
from ...scheduler.owner import Priority, Requester
from ...scheduler.rank_text import RankTokens
from ...sessions import Parameters, Session, SessionSettings, Turn, TurnOptions
from ...sessions.answers.calls import NO_TOOLS
from ...sessions.conversation.state import Conversation
from ...sessions.history.history import History
from ...sessions.history.media import with_media
from ...sessions.memory import SESSION_BYTES, TOKEN_BYTES
from ...sessions.turn.options import rendering_of, with_system_prompt
from ...sessions.worker_client import ChatTokens, WorkerClient
from ..core import Daemon
from ..graph_table import Graph
from .arguments import TIMEOUT_S_MIN, turn_options
from .media import shown_prompt, stored_messages

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
    if not p.sizes:
        text = await lease.query(lambda client: client.texts_of(requester).detokenize(p.tokens))
        return w.TextResult(text=text)
    pieces = await lease.query(lambda client: client.texts_of(requester).pieces_of(p.tokens))
    return w.TextResult(text=b"".join(pieces), sizes=list(map(len, pieces)))


async def apply_template(daemon: Daemon, request: Request) -> w.TemplateResult:
    """Render messages by the chat template."""
    p: w.TemplateParams = request.params
    graph = daemon.graph(request)
    rendering, requester = _rendering(graph, p), _requester(daemon, request)
    marks: list[str] = []

    async def render(client: WorkerClient) -> ChatTokens:
        texts = client.texts_of(requester)
        marked, media = await with_media(texts, messages)
        marks[:] = [one.mark for one in media]
        own_rendering = rendering_of(client, graph.lease.name, rendering)
        return await texts.chat_prompt(marked, rendering=own_rendering, media=media)

    async def render_continued(client: WorkerClient) -> ChatTokens:
        history, use = History(), msgspec.structs.replace(NO_TOOLS, form=client.info.answer_form)
        texts = client.texts_of(requester)
        await history.add_messages(texts, messages, rendering, use, continues=True)
        return ChatTokens(history.prompt_text, history.prompt, appended=False)

    tokens_max = partial(_tokens_max, graph)
    own = with_system_prompt(graph.options.get("system-prompt", ""), p.messages)
    async with stored_messages(daemon, request, own, tokens_max) as messages:
        prompt = await graph.lease.query(render_continued if p.continue_final_message else render)
    text = shown_prompt(prompt.text, marks)
    return w.TemplateResult(text=text.encode(), tokens=len(prompt.tokens))


def _tokens_max(graph: Graph) -> int:
    """Return the bound of a graph on the tokens of an image; 0 is the model's own."""
    return int(graph.options.get("image-tokens-max", 0))


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


async def rerank(daemon: Daemon, request: Request) -> w.RerankResult:
    """Score documents concurrently, each by a turn of a session of its own."""
    p: w.RerankParams = request.params
    daemon.check_open()
    if not 0 < len(p.documents) <= w.RERANK_DOCUMENTS_MAX:
        raise InvalidArgument(
            f"{len(p.documents)} documents; the range is 1 … {w.RERANK_DOCUMENTS_MAX}",
            hint="make several calls",
        )
    if p.top_n < 0:
        raise InvalidArgument(f"top_n is {p.top_n}", hint="0 returns all documents")
    daemon.ledger.check_tokens(request.owner)  # once for the call, not for each document
    ranks = _Ranks(daemon, request)
    await ranks.compute_all()
    return ranks.ranking()


class _Embedding(NamedTuple):
    """The embedding of one text, with the numbers of its tokens and of those that were not
    computed, and the model's fingerprint and whether its scores are probabilities.
    """

    embedded: Embedded
    tokens: int
    cached_tokens: int
    fingerprint: str
    is_probability: bool


class _TextTurns:
    """A turn for each of a call's *texts*. Lives on the daemon's event loop.

    A text has a session only during its turn. The first texts keep the session of their check; all
    others are tokenized again, because the token ids of all texts would need ten times the memory
    of the request.
    """

    def __init__(
        self,
        daemon: Daemon,
        request: Request,
        params: w.EmbedParams | w.RerankParams,
        texts: list[str],
        own: Mapping[str, Any],
    ):
        self._daemon, self._graph, self._texts = daemon, daemon.graph(request), texts
        self._parameters = self._graph.options | read_options(own, strict=True).values
        self._turn_options = turn_options(params, TurnOptions(embeds=True, quota_checked=True))
        self._truncate = params.truncate
        self._truncated = set[int]()
        """The indexes of truncated texts."""
        self._owner, self._charge = request.owner, request.charge
        self._key = request.connection.key
        self._requester = _requester(daemon, request)
        self._began = daemon.ledger.seconds()
        self._sessions: dict[int, Session] = {}
        """Sessions with input, by the index of their text."""
        self._sizes = [0] * len(texts)
        """The memory of each text's session and vectors, once the text was checked."""
        self._embeddings: dict[int, _Embedding] = {}
        """The results, by the index of their text."""
        self._bytes = 0
        self._turns_under_way = 0
        self._one_ended = anyio.Event()
        self._error: Exception | None = None

    async def compute_all(self) -> None:
        """Check all texts, then embed them; the first failure ends the others.

        :raises InferdError: a text has failed; see `ERRORS_OF_TEXTS`.
        """
        try:
            await self._for_each_text(self._check_text)
            await self._for_each_text(self._embed_text)
        finally:
            for index in tuple(self._sessions):
                self._remove_session(index)
            self._texts = []  # a reference cycle may keep this object until a collection

    async def _for_each_text(self, do: Callable[[int], Awaitable[None]]) -> None:
        """Call *do* with the index of each text."""
        indexes = iter(range(len(self._sizes)))
        async with anyio.create_task_group() as group:
            for _ in range(min(TEXTS_AT_ONCE_MAX, len(self._sizes))):
                group.start_soon(self._call_with_each, do, indexes, group.cancel_scope)
        error, self._error = self._error, None  # its traceback refers to this object
        if error is not None:
            raise error

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

    def _add_session(self, index: int) -> Session:
        daemon = self._daemon
        settings = SessionSettings(Parameters(self._parameters), key=self._key)
        session = Session(
            *(daemon.new_handle(), self._owner, self._graph.lease, daemon.ledger, settings)
        )
        self._sessions[index] = session
        daemon.one_turn_sessions.add(session)
        return session

    def _remove_session(self, index: int) -> None:
        session = self._sessions.pop(index)
        self._daemon.one_turn_sessions.discard(session)
        if not session.active:
            session.conversation = Conversation()  # its cycles stay until a collection

    async def _check_text(self, index: int) -> None:
        """Tokenize a text and check it. Keep its session if the text is among those to embed first,
        and there is memory for it.
        """
        is_first, p = index < TEXTS_AT_ONCE_MAX, self._parameters
        if is_first:
            tokens = await self._set_input(index, self._add_session(index))
        else:
            tokens = await self._count_tokens(index)
        info = (await self._graph.lease.ready()).info
        self._check_size(tokens, info.embedding)
        assert info.embedding is not None, "the text was checked"
        vectors = tokens if check_pooling(info.embedding, p.get("pooling", "")) == "none" else 1
        size = SESSION_BYTES + TOKEN_BYTES * tokens + 4 * info.embedding.size * vectors
        self._sizes[index] = size
        if is_first and not self._try_charge(size):
            self._remove_session(index)

    def _check_size(self, tokens: int, info: EmbedInfo | None) -> None:
        """Check that the model can embed a text of *tokens* tokens; see `check_text`."""
        p = self._parameters
        check_text(tokens, p.get("pooling", ""), p.get("ctx-size", 0), info)

    async def _set_input(self, index: int, session: Session) -> int:
        """Set a text as the input of its session; return the number of its tokens."""
        return await session.set_input(self._texts[index].encode())

    async def _fitting_text(self, index: int) -> tuple[bytes, int]:
        """Return a text, and the number of tokens to which it is truncated; 0 if it is not. If it
        is, the end that no context holds is left out already.
        """
        text = self._texts[index].encode()
        if not self._truncate:
            return text, 0
        model = (await self._graph.lease.ready()).info
        if model.embedding is None:
            return text, 0
        bytes_max = model.ctx_size * model.token_bytes_max
        if len(text) > bytes_max:
            text = text[:bytes_max].decode(errors="ignore").encode()  # whole characters
            self._truncated.add(index)
        return text, text_tokens_max(int(self._parameters.get("ctx-size", 0)), model.embedding)

    async def _count_tokens(self, index: int) -> int:
        """Return the number of a text's tokens; of a text too long for any context, the least."""
        text = self._texts[index].encode()
        try:
            tokens = await self._graph.lease.query(
                lambda c: c.texts_of(self._requester).tokenize(text, special=True, bos=True)
            )
        except PromptTooLong as exc:
            return int(exc.data["prompt_tokens"])
        return len(tokens)

    def _try_charge(self, size: int) -> bool:
        try:
            self._charge.grow(size)
        except Busy:
            return False
        return True

    async def _embed_text(self, index: int) -> None:
        turn = await self._start_turn(index)
        session = self._sessions[index]
        try:
            await session.finish_turn(turn)
        finally:
            self._end_turn()
            self._remove_session(index)
        self._add_turn(index, turn)

    async def _start_turn(self, index: int) -> Turn:
        """Start the turn of a text. If there is too little memory for another text, or the queue is
        full, retry when another turn has ended.
        """
        while True:
            self._turns_under_way += 1
            try:
                session = self._sessions.get(index) or await self._session_with_input(index)
                return await session.start_turn(self._options_of(index))
            except Busy:
                self._turns_under_way -= 1
                if not self._turns_under_way:
                    raise
            except BaseException:
                self._end_turn()
                raise
            await self._one_ended.wait()

    async def _session_with_input(self, index: int) -> Session:
        self._charge.grow(self._sizes[index])
        session = self._add_session(index)
        await self._set_input(index, session)
        return session

    def _end_turn(self) -> None:
        self._turns_under_way -= 1
        ended, self._one_ended = self._one_ended, anyio.Event()
        ended.set()

    def _options_of(self, _index: int) -> TurnOptions:
        """Return the options of a text's turn, with the rest of the call's timeout."""
        options = self._turn_options
        if not options.timeout_s:
            return options
        rest_s = options.timeout_s - (self._daemon.ledger.seconds() - self._began)
        return msgspec.structs.replace(options, timeout_s=max(TIMEOUT_S_MIN, rest_s))

    def _add_turn(self, index: int, turn: Turn) -> None:
        """Add the result of a text, whose other memory is free."""
        embedded, stats, info = _embedding_of(turn), turn.stats, turn.client.info
        self._embeddings[index] = _Embedding(
            embedded,
            0 if stats is None else stats.prompt_tokens,
            0 if stats is None else stats.cached_tokens,
            info.fingerprint,
            info.embedding is not None and info.embedding.rank_is_probability,
        )
        self._charge.shrink(max(0, self._sizes[index] - len(embedded.vectors)))
        self._bytes += len(embedded.vectors)
        if self._bytes > RESULT_BYTES_MAX:
            raise TooLarge(
                f"the vectors of {len(self._embeddings)} of {len(self._sizes)} texts have"
                f" {self._bytes} bytes; a result holds {RESULT_BYTES_MAX}",
                hint="send fewer texts in a call",
                data={"bytes": self._bytes, "result_bytes_max": RESULT_BYTES_MAX},
            )

    def _in_order(self) -> list[_Embedding]:
        return [self._embeddings[index] for index in range(len(self._sizes))]


class _Embeddings(_TextTurns):
    """The embeddings of one call's texts."""

    def __init__(self, daemon: Daemon, request: Request):
        p: w.EmbedParams = request.params
        own = {"embedding": True, "pooling": p.pooling, "embd-normalize": p.normalize}
        super().__init__(daemon, request, p, p.texts, own)

    async def _set_input(self, index: int, session: Session) -> int:
        if not self._truncate:
            return await super()._set_input(index, session)
        tokens = await self._fitting_tokens(index)
        if tokens:  # else the text is refused by its size
            await session.add_tokens(tokens)
        return len(tokens)

    async def _count_tokens(self, index: int) -> int:
        if not self._truncate:
            return await super()._count_tokens(index)
        return len(await self._fitting_tokens(index))

    async def _fitting_tokens(self, index: int) -> list[int]:
        """Return the tokens of a text, without those at its end that do not fit. The tokens that
        the model adds behind the text stay.
        """
        text, tokens_max = await self._fitting_text(index)

        async def tokenize(client: WorkerClient) -> list[int]:
            texts = client.texts_of(self._requester)
            tokens = await texts.tokenize(text, special=True, bos=True)
            if not 0 < tokens_max < len(tokens):
                return tokens
            self._truncated.add(index)
            around = await texts.tokenize(b"", special=True, bos=True)
            return truncated_tokens(tokens, around, tokens_max)

        return await self._graph.lease.query(tokenize)

    def result(self) -> w.EmbedResult:
        """Return the result, in the order of the texts."""
        found = self._in_order()
        first = found[0].embedded
        return w.EmbedResult(
            embeddings=[one.embedded.vectors for one in found],
            size=first.size,
            pooling=first.pooling,
            tokens=[one.tokens for one in found],
            truncated=sorted(self._truncated),
            model=self._graph.lease.name,
            fingerprint=found[0].fingerprint,
        )


class _Ranks(_TextTurns):
    """The scores of one call's documents."""

    def __init__(self, daemon: Daemon, request: Request):
        p: w.RerankParams = request.params
        own = {"embedding": True, "pooling": "rank"}
        super().__init__(daemon, request, p, p.documents, own)
        self._query, self._top_n = p.query.encode(), p.top_n
        self._shared: dict[int, int] = {}
        """The tokens that depend on the query alone, by the index of a document with input."""

    async def _rank_tokens(self, index: int) -> RankTokens:
        document, tokens_max = await self._fitting_text(index)
        found = await self._graph.lease.query(
            lambda c: c.texts_of(self._requester).rank_prompt(self._query, document, tokens_max)
        )
        if found.truncated:
            self._truncated.add(index)
        return found

    async def _set_input(self, index: int, session: Session) -> int:
        """Set the tokens of the query and a document as input; return their number."""
        found = await self._rank_tokens(index)
        self._shared[index] = found.shared
        await session.add_tokens(found.tokens)
        return len(found.tokens)

    async def _count_tokens(self, index: int) -> int:
        return len((await self._rank_tokens(index)).tokens)

    def _check_size(self, tokens: int, info: EmbedInfo | None) -> None:
        try:
            super()._check_size(tokens, info)
        except PromptTooLong as exc:
            raise PromptTooLong(
                f"the query and the document have {tokens} tokens; the model reads at most"
                f" {exc.data['ctx_size']} of them at once",
                hint="truncate documents, split them, or raise the model's ctx-size and batch-size",
                data=exc.data,
            ) from None

    def _options_of(self, index: int) -> TurnOptions:
        options = super()._options_of(index)
        return msgspec.structs.replace(options, shared_tokens=self._shared[index])

    def ranking(self) -> w.RerankResult:
        """Return the documents by descending score.

        :raises Busy: the model was swapped, and scores of two models cannot be compared.
        :raises BackendError: a score is not a number.
        """
        found = self._in_order()
        if len({one.fingerprint for one in found}) > 1:
            raise Busy(
                "the model was swapped while it ranked the documents", hint="repeat the call"
            )
        raw = [_raw_score(index, one.embedded.vectors) for index, one in enumerate(found)]
        best = sorted(range(len(raw)), key=lambda index: -raw[index])[: self._top_n or None]
        return w.RerankResult(
            indexes=best,
            scores=[raw[i] if found[i].is_probability else sigmoid(raw[i]) for i in best],
            raw_scores=[raw[i] for i in best],
            truncated=sorted(self._truncated),
            tokens=sum(one.tokens for one in found),
            cached_tokens=sum(one.cached_tokens for one in found),
            model=self._graph.lease.name,
            fingerprint=found[0].fingerprint,
        )


def _raw_score(index: int, embedding: bytes) -> float:
    """Return the score of a document, the first number of its embedding."""
    [score] = struct.unpack_from("<f", embedding)
    if not math.isfinite(score):
        raise BackendError(
            f"the model's score of document {index} is {score}", hint="use another model"
        )
    return float(score)


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x), without an overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _embedding_of(turn: Turn) -> Embedded:
    if turn.embedding is None:
        raise InferdError("a turn has ended without an embedding")
    return turn.embedding
