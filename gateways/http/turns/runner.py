"""Turns of requests: sessions on pooled connections, and the answers of their turns."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import anyio

from ....backends.errors import (
    Cancelled,
    InferdError,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    SessionExpired,
    Timeout,
    TooLarge,
)
from ....backends.media import media_parts
from ....ipc.client import Answer as ClientAnswer
from ....ipc.client import (
    AsyncClient,
    AsyncSession,
    AsyncStream,
    Embeddings,
    EndReasoningResult,
    Graph,
    HistoryResult,
    Piece,
    QueueEvent,
    Ranking,
    Rendered,
    Reply,
    Tensor,
)
from ....ipc.client.large_tensors import Inputs, Place
from ....ipc.names import Priority
from ....ipc.superseding import SUPERSEDED, NewestRequests
from ..callers import Caller, Quotas
from ..limits import MEDIA_BYTES_MAX, Limits
from ..media import in_sealed_memory
from ..shared_memory import SharedRegions
from .answers import Answer, TurnProgress, TurnReader, TurnRequest, finish_reason_of
from .inferences import InferenceCounts
from .live import LiveTurn, SessionReservations, turn_cancelled
from .pool import ConnectionPool, DaemonHealth, Snapshots
from .precheck import TurnPrecheck

log = logging.getLogger(__name__)
SEED_MAX = (1 << 32) - 1
RANDOM_SEED = -1


class Embedded(NamedTuple):
    """The vectors of texts, and the time until the model was loaded."""

    vectors: Embeddings
    load_s: float


class _AnswerStream(NamedTuple):
    """The stream of an answer: its *number* among those of its request, and its number as an
    *answer* of the reader.
    """

    stream: AsyncStream
    number: int
    answer: int
    progress: _ReportedProgress | None


class TurnRunner:
    """The turns of all callers.

    A session with an id has one request at a time, which is the daemon's rule too. It becomes
    dormant before the end of its answer is written, so that the next request can open it.
    """

    def __init__(self, pool: ConnectionPool, limits: Limits, *, shared_memory: bool = False):
        self.pool, self._limits = pool, limits
        self.quotas = Quotas(limits.requests_max, limits.streams_max)
        self.reservations = SessionReservations()
        self._answering: dict[tuple[str, str, str], dict[int, AsyncClient]] = {}
        """By caller and id, the contexts of answers under way that have an id, with the clients of
        their connections.
        """
        self.snapshots = Snapshots(pool)
        self.health = DaemonHealth(pool)
        self._newest = NewestRequests()
        """Requests that supersede others, by caller and key. The daemon knows a request only once
        its session is open.
        """
        self.precheck = TurnPrecheck(pool)
        self.inferences = InferenceCounts()
        self.regions = SharedRegions(enabled=shared_memory)
        self.stopping = False
        """Whether the server stops accepting requests; streams without an end of their own then
        end.
        """

    async def collect(self, caller: Caller, request: TurnRequest) -> list[Answer]:
        """Return the whole answers of a turn.

        :raises InferdError: the turn was refused, or one of its answers failed.
        """
        began = time.monotonic()
        deadline = began + self._limits.turn_s_max
        async with self._open(caller, request, requests=1) as (session, request):
            load_s = time.monotonic() - began
            keywords = self._turn_keywords(request, deadline)
            if request.answers == 1:
                replies = [await session.chat(request.prompt, **keywords)]
            else:
                note = partial(self._note_contexts, caller, request)
                replies = [
                    *await session.answers(
                        request.prompt, request.answers, on_contexts=note, **keywords
                    )
                ]
            answers = [_whole_answer(reply, load_s) for reply in replies]
            for number, answer in enumerate(answers):
                self._charge(caller, answer, number)  # a client's disconnect does not save tokens
            await self._store_note(session, request, answers[0])
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return answers

    async def stream(
        self, caller: Caller, request: TurnRequest, reader: TurnReader, first: int = 0
    ) -> None:
        """Write the answers to *reader*, numbered from *first* on, as they arise.

        :raises InferdError: the session could not be opened. If the turn fails later, the error is
            written with the end of the answer.
        """
        began = time.monotonic()
        deadline = began + self._limits.turn_s_max
        end_of_session: Answer | None = None
        several = request.answers > 1
        async with (
            self._open(caller, request, requests=request.answers) as (session, request),
            in_sealed_memory(request.prompt) if several else nullcontext(request.prompt) as prompt,
        ):
            load_s = time.monotonic() - began
            reader.note_opened(first)
            live = await self._begin_live(caller, request, session)
            branches = await session.fork(request.answers - 1) if several else []
            self._note_contexts(caller, request, [branch.context for branch in branches])
            streams = []
            for number, each in enumerate([session, *branches]):
                answer = first + number
                progress = _ReportedProgress(reader, answer) if request.progress else None
                stream = each.stream(
                    prompt,
                    on_queue=_place_sink(reader, answer, live),
                    on_start=partial(reader.note_accepted, answer),
                    on_prompt=None if progress is None else progress.note_prompt,
                    **self._turn_keywords(request, deadline, number),
                )
                streams.append(_AnswerStream(stream, number, answer, progress))
            if len(streams) == 1:
                end = await self._read_stream(caller, request, streams[0], reader, load_s, live)
                await self._store_note(session, request, end)
                if request.session_id is None:
                    await reader.write_end(first, end)
                else:
                    end_of_session = end  # written once the session is dormant
            else:
                async with anyio.create_task_group() as group:
                    for one in streams:
                        group.start_soon(self._read_to_end, caller, request, one, reader, load_s)
        if end_of_session is not None:
            await reader.write_end(first, end_of_session)

    async def _read_to_end(
        self,
        caller: Caller,
        request: TurnRequest,
        one: _AnswerStream,
        reader: TurnReader,
        load_s: float,
    ) -> None:
        end = await self._read_stream(caller, request, one, reader, load_s)
        await reader.write_end(one.answer, end)

    async def _read_stream(
        self,
        caller: Caller,
        request: TurnRequest,
        one: _AnswerStream,
        reader: TurnReader,
        load_s: float,
        live: LiveTurn | None = None,
    ) -> Answer:
        """Write the pieces of a stream to *reader* and to *live*, and return its end."""
        stream, number, answer, progress = one
        written = 0
        scored = False
        error: InferdError | None = None

        def note_prompt() -> None:
            nonlocal scored
            if not scored and stream.prompt_logprobs and request.on_prompt is not None:
                request.on_prompt(number, stream.prompt_logprobs)
            scored = True

        def take(pieces: Iterator[Piece]) -> bool:
            nonlocal written
            for piece in pieces:
                note_prompt()
                probabilities = stream.probabilities[written:]
                written += len(probabilities)
                if progress is not None:
                    progress.note_tokens(len(stream.tokens))
                if live is not None:
                    live.add_piece(piece)
                reader.add_piece(answer, piece, probabilities)
            return reader.write_now()

        try:
            async with stream:
                while await stream.pass_pieces(take):
                    await reader.write_added()
        except InferdError as exc:
            error = exc
        finally:
            note_prompt()
            end = Answer(
                metadata=stream.metadata,
                finish_reason=finish_reason_of(stream.metadata, bool(stream.tool_calls)),
                probabilities=stream.probabilities[written:],
                error=error,
                load_s=load_s,
            )
            self._charge(caller, end, number)  # a client's disconnect does not save tokens
        if live is not None:
            live.note_end(end)
        return end

    async def _begin_live(
        self, caller: Caller, request: TurnRequest, session: AsyncSession
    ) -> LiveTurn | None:
        """Begin the turn that others can read, if the request has one."""
        if request.on_turn is None or request.session_id is None:
            return None
        reservation = self.reservations.find(caller, request.session_id)
        assert reservation is not None and reservation.live is not None, "`_open` reserves it"
        async with self.pool.lease(caller) as client:
            entries = await client.sessions(session_id=request.session_id)
        # A caller without a label is told of the sessions of all labels with this id.
        turn = 1 + next(e["turns"] for e in entries if e["context"] == session.context)
        request.on_turn(turn)
        reservation.live.begin(turn, session.model)
        return reservation.live

    async def _store_note(
        self, session: AsyncSession, request: TurnRequest, answer: Answer
    ) -> None:
        """Store the note of a request with its session. The answer does not depend on it."""
        if request.note is None or request.session_id is None or answer.error is not None:
            return
        try:
            await session.set_options(note=request.note(answer))
        except InferdError as exc:
            log.warning("note.not_stored session=%s cause=%s", request.session_id, exc)

    def _charge(self, caller: Caller, answer: Answer, number: int) -> None:
        """Deduct the tokens of an answer; a prompt's tokens count once, without cached ones."""
        tokens = answer.output_tokens
        if not number:
            tokens += answer.input_tokens - answer.cached_tokens
        self.quotas.charge_tokens(caller, tokens, time.monotonic())

    async def embed(
        self,
        caller: Caller,
        model: str,
        texts: Sequence[str],
        priority: Priority,
        *,
        truncate: bool = False,
    ) -> Embedded:
        """Return the embeddings of texts.

        :raises InferdError: the request was refused or failed.
        """
        caller.check_priority(priority)
        began = time.monotonic()
        async with self.lease_graph(caller, model) as (client, graph):
            load_s = time.monotonic() - began
            found = await client.embed(
                graph,
                texts,
                truncate=truncate,
                priority=priority,
                queue_timeout=self._limits.queue_s_max,
                timeout=max(self._limits.turn_s_max - load_s, 0.1),
            )
        self.quotas.charge_tokens(caller, sum(found.tokens), time.monotonic())
        return Embedded(found, load_s)

    async def rerank(
        self,
        caller: Caller,
        model: str,
        query: str,
        documents: Sequence[str],
        priority: Priority,
        *,
        top_n: int | None,
        truncate: bool,
    ) -> Ranking:
        """Return documents by their scores for a query.

        :raises InferdError: the request was refused or failed.
        """
        caller.check_priority(priority)
        began = time.monotonic()
        async with self.lease_graph(caller, model) as (client, graph):
            load_s = time.monotonic() - began
            found = await client.rerank(
                graph,
                query,
                documents,
                top_n=top_n,
                truncate=truncate,
                priority=priority,
                queue_timeout=self._limits.queue_s_max,
                timeout=max(self._limits.turn_s_max - load_s, 0.1),
            )
        computed = found.tokens - found.cached_tokens
        self.quotas.charge_tokens(caller, computed, time.monotonic())
        return found

    async def compute_tensors(
        self,
        caller: Caller,
        model: str,
        inputs: Sequence[tuple[str, Tensor]],
        priority: Priority,
        timeout_s: float,
        take_memory: Callable[[int], Awaitable[None]],
    ) -> list[tuple[str, Tensor]]:
        """Return the outputs of a graph, and count a failure. Within *timeout_s* the model is
        loaded, too. For outputs that no reply takes, *take_memory* takes memory.

        :raises InferdError: the request was refused or failed.
        """
        model, began = caller.check_model(model), time.monotonic()
        timeout_s = min(timeout_s, self._limits.turn_s_max)
        compute = partial(self._compute_in_context, caller, model, inputs, priority, take_memory)
        try:
            with anyio.move_on_after(timeout_s) as scope:
                try:
                    outputs = await compute()
                except SessionExpired:  # the context was kept for too long
                    outputs = await compute(is_new=True)
            if scope.cancelled_caught:
                text = f"the request did not end within {timeout_s:g} s"
                raise Timeout(text, hint="allow more time", data={"timeout": "total"})
        except InferdError as exc:
            if not isinstance(exc, ModelNotFound):
                self.inferences.count_failure(model, time.monotonic() - began)
            raise
        return outputs

    async def _compute_in_context(
        self,
        caller: Caller,
        model: str,
        inputs: Sequence[tuple[str, Tensor]],
        priority: Priority,
        take_memory: Callable[[int], Awaitable[None]],
        *,
        is_new: bool = False,
    ) -> list[tuple[str, Tensor]]:
        queue_s = self._limits.queue_s_max
        lease = self.pool.lease_context(
            caller, model, priority=priority, queue_timeout=queue_s, is_new=is_new
        )
        async with lease as (client, context, large):

            async def compute(inputs: Inputs, places: Sequence[Place]) -> dict[str, Tensor]:
                result = await client.compute(
                    context, inputs, places=places, priority=priority, queue_timeout=queue_s
                )
                return dict(result.outputs)

            async def outputs() -> list[str]:
                shown = await client.show(model)
                declared = (shown["info"] or {}).get("outputs") or shown["outputs"] or ()
                return [one["name"] for one in declared]

            found = await large.compute([*inputs], compute, outputs, take_memory)
        return [*found.items()]

    async def render_prompt(
        self,
        caller: Caller,
        model: str,
        messages: Sequence[dict[str, Any]],
        options: dict[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """Return the prompt that the model's template makes of *messages* with the tools and
        arguments in *options*.

        :raises InferdError: the request was refused or failed.
        """
        async with self.lease_graph(caller, model) as (client, graph):
            return await client.apply_template(
                graph,
                messages,
                tools=options.get("tools", ()),
                arguments=options.get("chat-template-kwargs", {}),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=bool(options.get("continue-final-message")),
                timeout=self._limits.turn_s_max,
            )

    async def detokenize(
        self, caller: Caller, model: str, prompts: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return the texts of prompts in token ids. One deadline is for all.

        :raises InferdError: the request was refused or failed.
        """
        deadline = time.monotonic() + self._limits.turn_s_max
        async with self.lease_graph(caller, model) as (client, graph):
            return [
                (await client.detokenize(graph, tokens, timeout=self.remaining_s(deadline))).decode(
                    errors="replace"
                )
                for tokens in prompts
            ]

    @asynccontextmanager
    async def lease_graph(
        self, caller: Caller, model: str
    ) -> AsyncIterator[tuple[AsyncClient, Graph]]:
        """Load a model, and keep it loaded meanwhile.

        :raises InferdError: the caller may not use the model, or it cannot be loaded.
        """
        model, timeout = caller.check_model(model), self._limits.turn_s_max
        async with self.pool.lease_graph(caller, model, timeout=timeout) as leased:
            yield leased

    @asynccontextmanager
    async def _open(
        self, caller: Caller, request: TurnRequest, requests: int
    ) -> AsyncIterator[tuple[AsyncSession, TurnRequest]]:
        """Open the session of a request, on a connection for its caller. Return with it the request
        as it is served.

        :raises InferdError: the session cannot be opened.
        """
        if not request.supersede:
            async with self._open_turn(caller, request, requests) as found:
                yield found
            return
        key, scope = (*caller.user.owner, request.supersede), anyio.CancelScope()
        async with self._newest.supersede(key, scope.cancel):
            with scope:
                async with self._open_turn(caller, request, requests) as found:
                    yield found
            if scope.cancelled_caught:
                raise superseded()

    @asynccontextmanager
    async def _open_turn(
        self, caller: Caller, request: TurnRequest, requests: int
    ) -> AsyncIterator[tuple[AsyncSession, TurnRequest]]:
        """Open the session of a request; see `_open`."""
        request = replace(request, model=caller.check_model(request.model))
        caller.check_priority(request.priority)
        if request.session_id is None:  # without a reservation, which takes memory
            async with self._lease_session(caller, request, requests) as (client, session):
                with self._answers_by_id(caller, request, client, session):
                    yield session, request
            return
        live = None if request.on_turn is None else LiveTurn()
        with self.reservations.reserve(caller, request.session_id, live) as reservation:
            with reservation.scope:
                if request.branch_of is not None:
                    await self._branch(caller, request)
                elif request.keeps_priority:
                    request = await self._with_own_priority(caller, request)
                async with self._lease_session(caller, request, requests) as (client, session):
                    with self._answers_by_id(caller, request, client, session):
                        yield session, request
            if reservation.scope.cancelled_caught:
                raise turn_cancelled()

    @contextmanager
    def _answers_by_id(
        self, caller: Caller, request: TurnRequest, client: AsyncClient, session: AsyncSession
    ) -> Iterator[None]:
        """Let the caller control the answers of a request in the context, if it has an id."""
        if not request.answer_id:
            yield
            return
        key = (*caller.user.owner, request.answer_id)
        self._answering[key] = {session.context: client}
        try:
            yield
        finally:
            del self._answering[key]

    def _note_contexts(self, caller: Caller, request: TurnRequest, contexts: Sequence[int]) -> None:
        """Let the caller control the answers in *contexts*, too, which are branches of one whose
        answers have an id.
        """
        found = self._answering.get((*caller.user.owner, request.answer_id))
        if found is not None:
            client = next(iter(found.values()))
            found.update(dict.fromkeys(contexts, client))

    async def end_reasoning(self, caller: Caller, answer_id: str) -> list[EndReasoningResult]:
        """End the reasoning of the caller's answers with this id; return a result for each one
        that is under way.
        """
        found = self._answering.get((*caller.user.owner, answer_id), {})
        return [await client.end_reasoning(context) for context, client in [*found.items()]]

    async def _with_own_priority(self, caller: Caller, request: TurnRequest) -> TurnRequest:
        """Return a request with the class of its session, lowered to the caller's highest."""
        async with self.pool.lease(caller) as client:
            entries = await client.sessions(dormant=True, session_id=request.session_id)
        own = next((e["priority"] for e in entries if e["label"] == caller.user.label), None)
        return request if own is None else replace(request, priority=caller.class_of(None, own))

    @asynccontextmanager
    async def _lease_session(
        self, caller: Caller, request: TurnRequest, requests: int
    ) -> AsyncIterator[tuple[AsyncClient, AsyncSession]]:
        async with (
            self.pool.lease_graph(caller, request.model, requests=requests) as (client, graph),
            client.session(
                request.model,
                graph=graph,
                session_id=request.session_id,
                raw=request.raw,
                priority=request.priority,
                queue_timeout=self._limits.queue_s_max,
            ) as session,
        ):
            yield client, session

    async def _branch(self, caller: Caller, request: TurnRequest) -> None:
        """Create the request's session as a branch of another one, which stays as it is.

        :raises InvalidArgument: the other session does not exist.
        """
        assert request.branch_of is not None and request.session_id is not None
        with self.reservations.reserve(caller, request.branch_of):
            async with (
                self.pool.lease(caller) as client,
                client.session(
                    request.model,
                    session_id=request.branch_of,
                    priority=request.priority,
                    queue_timeout=self._limits.queue_s_max,
                ) as trunk,
            ):
                if not trunk.attached:  # it did not exist, and opening has created it
                    await trunk.delete()
                    raise no_previous(request.branch_of)
                [branch] = (
                    await client.fork_session(trunk.context, session_ids=[request.session_id])
                ).contexts
                await client.finalize_execution_context(branch, keep=True)

    async def history(self, caller: Caller, session_id: str) -> HistoryResult | None:
        """Return the history of a session of a caller, or None if it has no such session, or may
        not use its model.
        """
        async with self.pool.lease(caller) as client:
            try:
                found = await client.history(session_id=session_id)
            except NotFound:
                return None
        return found if caller.may_use(found.session["model"]) else None

    async def fill_media(
        self,
        caller: Caller,
        session_id: str,
        messages: list[dict[str, Any]],
        take_memory: Callable[[int], Awaitable[None]],
    ) -> None:
        """Give the images and sounds in a history's *messages*, which it names by their hashes,
        their data, once *take_memory* has taken memory for their bytes.

        :raises TooLarge: they are more than a request may have.
        :raises Busy: there is no memory for them.
        """
        parts = list(media_parts(messages))
        size = sum(part["bytes"] for part in parts)
        if size > MEDIA_BYTES_MAX:
            raise TooLarge(
                f"the history has images and sounds of {size} bytes; {MEDIA_BYTES_MAX} are counted",
                hint="send the messages themselves",
                data={"bytes": size, "bytes_max": MEDIA_BYTES_MAX},
            )
        if parts:
            await take_memory(size)
            async with self.pool.lease(caller) as client:
                for part in parts:
                    found = await client.session_media(part["sha256"], session_id=session_id)
                    part["data"] = found.data

    async def delete_session(self, caller: Caller, session_id: str) -> bool:
        """Delete a session of a caller; return whether there was one."""
        async with self.pool.lease(caller) as client:
            return await client.delete_session(session_id=session_id)

    def _turn_keywords(
        self, request: TurnRequest, deadline: float, number: int = 0
    ) -> dict[str, Any]:
        """Return the keywords of a turn; each answer has its own seed.

        :raises Timeout: the deadline has passed.
        """
        options = request.options
        seed = options.get("seed")
        if number and isinstance(seed, int) and seed != RANDOM_SEED:
            options = {**options, "seed": (seed + number) & SEED_MAX}
        remaining_s = self.remaining_s(deadline)
        return {
            "options": options,
            "priority": request.priority,
            "queue_timeout": min(self._limits.queue_s_max, remaining_s),
            "timeout": remaining_s,
            # The answers of one request must not supersede each other; `_open` cancels them all.
            "supersede": request.supersede if request.answers == 1 else "",
        }

    def remaining_s(self, deadline: float) -> float:
        """Return the seconds until the deadline of a request.

        :raises Timeout: it has passed.
        """
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise Timeout(
                f"the request did not end within {self._limits.turn_s_max:g} s",
                hint="start the gateway with a larger --timeout",
                data={"timeout": "total"},
            )
        return remaining_s


def superseded() -> Cancelled:
    """Return the error of a request whose key a newer one has."""
    return Cancelled(
        SUPERSEDED,
        hint="use the answer to the newer request",
        data={"by": "supersede"},
    )


def no_previous(response_id: str) -> InvalidArgument:
    """Return the error for the id of a response that cannot be continued."""
    return InvalidArgument(
        f"there is no response {response_id!r}, or it was deleted",
        hint="send the whole history as input",
        data={"param": "previous_response_id"},
    )


def _place_sink(
    reader: TurnReader, answer: int, live: LiveTurn | None
) -> Callable[[QueueEvent], None]:
    """Return a function that passes the places of an answer's turn in the queue on."""
    if live is None:
        return partial(reader.note_place, answer)

    def note_place(place: QueueEvent) -> None:
        live.note_place(place)
        reader.note_place(answer, place)

    return note_place


class _ReportedProgress(TurnProgress):
    """The progress of an *answer*, whose *reader* gets that of its prompt."""

    def __init__(self, reader: TurnReader, answer: int):
        super().__init__()
        self._reader, self._answer = reader, answer

    def note_prompt(self, progress: Mapping[str, Any]) -> None:
        """Note the progress of the prompt, and pass it on."""
        super().note_prompt(progress)
        self._reader.add_progress(self._answer, self)


def _whole_answer(reply: Reply, load_s: float) -> Answer:
    return Answer(
        metadata=reply.metadata,
        finish_reason=finish_reason_of(reply.metadata, bool(reply.tool_calls)),
        text=str(reply),
        reasoning=reply.reasoning,
        tool_calls=reply.tool_calls,
        probabilities=reply.metadata.get("completion_probabilities", []),
        error=reply.error if isinstance(reply, ClientAnswer) else None,
        load_s=load_s,
    )
