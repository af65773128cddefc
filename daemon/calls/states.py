"""Calls on named states: frozen histories with which sessions begin."""

from __future__ import annotations

from typing import Any

from ...ipc import messages as w
from ...ipc.server.request import Request
from ...scheduler.kv.origin import scoped
from ...sessions import NamedState
from ..core import Daemon


async def save_state(daemon: Daemon, request: Request) -> w.SaveStateResult:
    """Save a context's present state under a name; its KV state is computed before."""
    daemon.check_open()
    p: w.SaveStateParams = request.params
    state, stored = await daemon.states.save_state(
        daemon.session(request), p.name, replace=p.replace
    )
    return w.SaveStateResult(tokens=state.size, stored_tokens=stored)


async def list_states(daemon: Daemon, request: Request) -> w.ListStatesResult:
    """List the caller's named states, by their names."""
    own = [state for state in daemon.states if request.owner.includes(state.owner)]
    own.sort(key=lambda state: (state.name, state.owner))
    return w.ListStatesResult(states=[_describe_state(daemon, state) for state in own])


def _describe_state(daemon: Daemon, state: NamedState) -> dict[str, Any]:
    shared = daemon.config.kv_share == "all"
    files_of = scoped(state.owner.user, state.kv_name, shared=shared)
    return {
        "name": state.name,
        "label": state.owner.label,
        "model": state.facts.model,
        "fingerprint": state.facts.fingerprint,
        "tokens": state.size,
        "bytes": state.kept_bytes,
        "kv_disk_bytes": daemon.registry.kv_index.session_bytes(*files_of),
        "created_at": state.facts.created_at,
    }


async def delete_state(daemon: Daemon, request: Request) -> w.DeleteStateResult:
    """Delete a state and its KV state; return when they are deleted."""
    deleted = await daemon.states.delete_state(request.owner, request.params.name)
    return w.DeleteStateResult(deleted=deleted)


CALLS = (save_state, list_states, delete_state)
