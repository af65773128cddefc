"""Follows requests from their call to their end, and the turns that begin in them.

Lives on the daemon's event loop. A request is over when its call is answered and its turns have
ended: one that is pulled goes on over many calls, and is followed by the one that began it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ...backends.errors import ContextFull, EndOfSequence, InferdError
from ...ipc.server.server_connection import Request
from ...scheduler.messages import count_tokens
from ...sessions import ModelSource, Session, Turn
from ..metrics.daemon_counters import PRIVATE, label_of
from ..models.lease import Lease
from .current_request import OPERATIONS, PULLED_CALL, FollowedRequest, current_request
from .spans import CHAT, COMPLETION, EMBEDDINGS, RequestFacts, TurnFacts

if TYPE_CHECKING:
    from ..core import CallTable, Daemon


class Follower:
    """Gives *export* each request that is over, with the caller's `traceparent`, if it gave one."""

    def __init__(self, export: Callable[[RequestFacts, str], None]):
        self._export = export
        self._by_turn: dict[Turn, FollowedRequest] = {}
        """The requests of the turns that are under way."""

    def attach(self, daemon: Daemon) -> None:
        """Follow the requests of *daemon* from now on."""
        daemon.ledger.turn_listeners.append(self)
        daemon.calls = self.following(daemon.calls)

    def following(self, calls: CallTable) -> CallTable:
        """Return *calls*, of which those that begin turns are followed."""
        followed = OPERATIONS.keys() & calls.keys()
        return calls | {name: partial(self._call, calls[name]) for name in followed}

    async def _call(self, call: Callable[..., Any], daemon: Daemon, request: Request) -> Any:
        session = _session_of(daemon, request)
        source = session.model if session is not None else _lease_of(daemon, request)
        followed = FollowedRequest(request, "" if source is None else _name(source))
        token = current_request.set(followed)
        try:
            return await call(daemon, request)
        except BaseException as exc:
            if followed.begun or not _goes_on(request, session, exc):
                followed.facts.error = _error_of(exc)
            raise
        finally:
            current_request.reset(token)
            followed.answered = True
            followed.facts.ended_at = time.monotonic()
            self._export_if_over(followed)

    def turn_began(self, model: ModelSource, turn: Turn, *, chat: bool) -> None:
        """Note a turn, in the task of the request that it is for."""
        followed = current_request.get()
        if followed is None:
            return
        followed.facts.model = _name(model)
        if not turn.says:
            followed.facts.operation = EMBEDDINGS
        else:
            followed.facts.operation = CHAT if chat else COMPLETION
        followed.turns[turn] = followed.begun
        followed.begun += 1
        self._by_turn[turn] = followed

    def turn_ended(self, _: ModelSource, turn: Turn) -> None:
        """Note that a turn has ended."""
        followed = self._by_turn.pop(turn, None)
        if followed is not None:
            followed.ended[followed.turns.pop(turn)] = _facts_of(turn, followed.facts.model)
            self._export_if_over(followed)

    def _export_if_over(self, followed: FollowedRequest) -> None:
        """Export a request if it is over, unless nothing began or failed in it."""
        facts = followed.facts
        if not followed.answered or followed.turns or not (followed.begun or facts.error):
            return
        facts.turns = [followed.ended[place] for place in range(followed.begun)]
        needed = followed.model_request
        if needed is not None and needed.has_waited:
            until = facts.ended_at if needed.admitted_at is None else needed.admitted_at
            facts.loaded = (needed.since, until)
        self._export(facts, followed.parent)


def _facts_of(turn: Turn, model: str) -> TurnFacts:
    queued_at, admitted_at, first_token_at = turn.moments
    made = turn.embedding
    return TurnFacts(
        queued_at=queued_at,
        ended_at=time.monotonic(),
        admitted_at=admitted_at,
        first_token_at=first_token_at,
        sampling=turn.spec.sampling,
        n_predict=turn.spec.n_predict,
        priority=turn.spec.priority,
        input_tokens=count_tokens(turn.spec.tokens),
        output_tokens=len(turn.tokens) if turn.stats is None else turn.stats.output_tokens,
        stats=turn.stats,
        error=None if turn.error is None else turn.error.name,
        embedding_size=0 if made is None else made.size,
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
        return None  # the call says so


def _lease_of(daemon: Daemon, request: Request) -> ModelSource | None:
    graph = daemon.graphs.get(getattr(request.params, "graph", 0))
    return None if graph is None or graph.connection is not request.connection else graph.lease


def _goes_on(request: Request, session: Session | None, exc: BaseException) -> bool:
    """Return whether *exc* only reports the end of a turn that an earlier call has begun."""
    if request.call != PULLED_CALL:
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
