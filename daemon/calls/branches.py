"""Branches of a session, going back in it, and forgetting it."""

from __future__ import annotations

from typing import Any

from ...backends.errors import InvalidArgument
from ...ipc import messages as w
from ...ipc.server.server import Request
from ...sessions import Session
from ..core import CallTable, Daemon

__all__ = ("CALLS",)


async def fork_session(daemon: Daemon, request: Request) -> w.ForkResult:
    """Make branches of a session's present state, all or none."""
    daemon.check_open()
    p: w.ForkParams = request.params
    branches = daemon.sessions.fork(request.connection, daemon.session(request), p.n, p.session_ids)
    try:
        for branch in branches:
            await branch.settled()
        kept = await _kept(branches[0])
    except BaseException:  # the caller is gone, and never learns their handles
        for branch in branches:
            daemon.sessions.discard(branch)
        raise
    return w.ForkResult(contexts=[branch.handle for branch in branches], **kept)


async def rewind(daemon: Daemon, request: Request) -> w.RewindResult:
    """Go back in a session's history."""
    p: w.RewindParams = request.params
    if (p.turns is None) == (p.tokens is None):
        raise InvalidArgument("rewind takes turns or tokens, and not both")
    session = daemon.session(request)
    await session.rewind(p.turns, p.tokens)
    return w.RewindResult(turns=session.turns_back, **await _kept(session))


async def _kept(session: Session) -> dict[str, Any]:
    """Return what of a session's history need not be computed again.

    The last token of an answer may not have been computed at all: without it all are kept.
    """
    tokens, kept = len(session.history()), await session.tokens_kept()
    kv = "kept" if kept >= tokens - 1 else "computed_again"
    return {"tokens": tokens, "kept_tokens": kept, "kv": kv}


async def forget(daemon: Daemon, request: Request) -> w.ForgetResult:
    """Delete a session, its history and its KV state, before the answer."""
    p: w.ForgetParams = request.params
    if (p.context is None) == (p.session_id is None):
        raise InvalidArgument("forget takes a context or a session id, and not both")
    if p.session_id is not None:
        uid = request.connection.peer.uid
        return w.ForgetResult(forgotten=await daemon.sessions.forget_id(uid, p.session_id))
    await daemon.sessions.forget(daemon.session(request))
    return w.ForgetResult(forgotten=True)


CALLS: CallTable = {"fork_session": fork_session, "rewind": rewind, "forget": forget}
