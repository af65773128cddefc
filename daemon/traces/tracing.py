"""Tracing of requests from their call to their end, and of the turns that they start."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import structlog

from ...backends.errors import ContextFull, EndOfSequence, InferdError
from ...backends.library import install_command
from ...ipc.messages import CALLS, Starts
from ...ipc.server.connection import Request
from ...scheduler.messages import count_tokens
from ...sessions import ModelSource, Session, Turn
from ..metrics.daemon_counters import PRIVATE, label_of
from ..models.registry import Lease
from .spans import (
    CHAT,
    COMPLETION,
    EMBEDDINGS,
    RequestFacts,
    TracedRequest,
    TurnFacts,
    current_request,
    spans_of,
)

if TYPE_CHECKING:
    from ..core import Daemon
    from .export import Export

FLUSH_S_MAX = 3.0
"""The time that a shutdown waits for unsent spans."""

log = structlog.get_logger()


class Traces:
    """The optional component that exports the traces of *daemon*, if a target is configured. Opened
    and closed with the daemon. Lives on its event loop.
    """

    def __init__(self, daemon: Daemon):
        self._daemon, self._components = daemon, daemon.components
        self._loop = asyncio.get_running_loop()
        self._export: Export | None = None

    def open(self) -> None:
        """Trace requests from now on, or report why that fails."""
        target = self._daemon.config.traces
        if target.is_off:
            return
        try:
            from .export import Export

            note = partial(self._components.note, "traces")
            self._export = Export(target, partial(self._call_from_anywhere, note))
        except ImportError as exc:
            remedy = install_command("traces")
            self._components.note("traces", f"{exc.name} is not installed", remedy=remedy)
            return
        except Exception as exc:  # a failing extra must not keep the daemon from starting
            self._components.note("traces", f"{target}: {exc}")
            return
        RequestTracer(self._export_soon).attach(self._daemon)
        log.info("traces.opened", target=str(target))

    def _export_soon(self, request: RequestFacts, parent: str) -> None:
        """Export a request that has ended, after the current answer is sent."""
        export = self._export
        assert export is not None, "requests are traced only with an export"
        self._loop.call_soon(lambda: export.export_spans(spans_of(request), parent))

    def _call_from_anywhere(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    async def close(self) -> None:
        """Send the remaining spans within `FLUSH_S_MAX`."""
        if self._export is None:
            return
        await anyio.lowlevel.checkpoint()  # so that scheduled exports run
        sent = anyio.Event()
        close = partial(self._close, self._export, sent)
        # A daemon thread: a collector that does not answer must not keep the process alive.
        threading.Thread(target=close, name="traces-close", daemon=True).start()
        with anyio.move_on_after(FLUSH_S_MAX) as scope:
            await sent.wait()
        if scope.cancelled_caught:
            log.warning("traces.not_sent", waited_s=FLUSH_S_MAX)

    def _close(self, export: Export, sent: anyio.Event) -> None:
        try:
            export.close()
        finally:
            self._call_from_anywhere(sent.set)


class RequestTracer:
    """Calls *export* with each request that has ended, and the caller's `traceparent` or "".

    A request has ended when its call is answered and its turns have ended. A turn with tokens on
    demand continues over many calls, and belongs to the request that started it.
    """

    def __init__(self, export: Callable[[RequestFacts, str], None]):
        self._export = export
        self._by_turn: dict[Turn, TracedRequest] = {}
        """The requests of the turns that have not ended."""

    def attach(self, daemon: Daemon) -> None:
        """Trace the requests of *daemon* that start turns, from now on."""
        daemon.ledger.turn_listeners.append(self)
        daemon.calls = {
            name: call if CALLS[name].starts is None else partial(self._call, call)
            for name, call in daemon.calls.items()
        }
        daemon.calls_without_task = {}  # a request is found by the context of its task

    async def _call(self, call: Callable[..., Any], daemon: Daemon, request: Request) -> Any:
        session = _session_of(daemon, request)
        source = session.model if session is not None else _lease_of(daemon, request)
        traced = TracedRequest(request, "" if source is None else _name(source))
        token = current_request.set(traced)
        try:
            return await call(daemon, request)
        except BaseException as exc:
            if traced.turns or not _ends_earlier_turn(request, session, exc):
                traced.facts.error = _error_of(exc)
            raise
        finally:
            current_request.reset(token)
            traced.answered = True
            traced.facts.ended_at = time.monotonic()
            self._export_if_ended(traced)

    def turn_began(self, model: ModelSource, turn: Turn, *, chat: bool) -> None:
        """Record a turn, in the task of the request that started it."""
        traced = current_request.get()
        if traced is None:
            return
        traced.facts.model = _name(model)
        generated = CHAT if chat else COMPLETION
        traced.facts.operation = generated if turn.generates else EMBEDDINGS
        traced.turns[turn] = None
        self._by_turn[turn] = traced

    def turn_ended(self, _: ModelSource, turn: Turn) -> None:
        """Record that a turn has ended."""
        traced = self._by_turn.pop(turn, None)
        if traced is not None:
            traced.turns[turn] = _facts_of(turn, traced.facts.model)
            self._export_if_ended(traced)

    def _export_if_ended(self, traced: TracedRequest) -> None:
        """Export a request that has ended, unless it neither started a turn nor failed."""
        facts = traced.facts
        facts.turns = [turn for turn in traced.turns.values() if turn is not None]
        has_ended = traced.answered and len(facts.turns) == len(traced.turns)
        if not has_ended or not (facts.turns or facts.error):
            return
        needed = traced.model_request
        if needed is not None and needed.has_waited:
            until = facts.ended_at if needed.admitted_at is None else needed.admitted_at
            facts.loaded = (needed.since, until)
        self._export(facts, traced.parent)


def _facts_of(turn: Turn, model: str) -> TurnFacts:
    return TurnFacts(
        queued_at=turn.queued_at,
        ended_at=time.monotonic(),
        started_at=turn.started_at,
        first_token_at=turn.first_token_at,
        sampling=turn.spec.sampling,
        n_predict=turn.spec.n_predict,
        priority=turn.spec.priority,
        input_tokens=count_tokens(turn.spec.tokens),
        output_tokens=len(turn.tokens) if turn.stats is None else turn.stats.output_tokens,
        stats=turn.stats,
        error=None if turn.error is None else turn.error.name,
        embedding_size=0 if turn.embedding is None else turn.embedding.size,
        fingerprint="" if model == PRIVATE else turn.client.info.fingerprint,
    )


def _name(source: ModelSource) -> str:
    return label_of(source.model) if isinstance(source, Lease) else source.name


def _session_of(daemon: Daemon, request: Request) -> Session | None:
    if not hasattr(request.params, "context"):
        return None
    try:
        return daemon.session(request)
    except InferdError:
        return None  # the call reports the error


def _lease_of(daemon: Daemon, request: Request) -> ModelSource | None:
    graph = daemon.graphs.find_graph(request.connection, getattr(request.params, "graph", 0))
    return None if graph is None else graph.lease


def _ends_earlier_turn(request: Request, session: Session | None, exc: BaseException) -> bool:
    """Return whether *exc* only reports the end of a turn that an earlier call started."""
    if request.row.starts is not Starts.TOKEN:
        return False
    turn = None if session is None else session.turn
    known = isinstance(exc, EndOfSequence | ContextFull) or not isinstance(exc, InferdError)
    return known or (turn is not None and exc is turn.error)


def _error_of(exc: BaseException) -> str | None:
    if isinstance(exc, EndOfSequence):
        return None
    if isinstance(exc, InferdError):
        return exc.name
    cancelled = isinstance(exc, anyio.get_cancelled_exc_class())
    return "Cancelled" if cancelled else type(exc).__name__
