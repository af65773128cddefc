"""Calls on named states: frozen histories with which sessions begin."""

from __future__ import annotations

from collections.abc import Mapping

from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...scheduler.kv.origin import scoped
from ...scheduler.owner import Owner
from ...sessions import NamedState
from ..core import Daemon


async def save_state(daemon: Daemon, request: Request) -> w.SaveStateResult:
    """Save a context's present state under a name, after its KV state was computed."""
    daemon.check_open()
    p: w.SaveStateParams = request.params
    state, stored = await daemon.states.save_state(
        daemon.session(request), p.name, replace=p.replace
    )
    return w.SaveStateResult(tokens=state.size, stored_tokens=stored)


def find_state(daemon: Daemon, request: Request, name: str) -> NamedState:
    """Return a state with which the caller may begin a session: one of the caller's own, or one
    that an access rule shares.

    :raises NotFound: the caller may begin with no state of this name.
    """
    states: dict[str, tuple[Owner, str]] = {}
    for shared in daemon.connections.access.shared_states(request.connection):
        key = Owner(shared.user, shared.label), shared.state
        states[shared.name] = states[shared.numbered_name] = key
    return daemon.states.find_state(request.owner, name, states)


async def list_states(daemon: Daemon, request: Request) -> w.ListStatesResult:
    """List the caller's named states, sorted by name, then the shared states of other users."""
    own = [state for state in daemon.states if request.owner.includes(state.owner)]
    own.sort(key=lambda state: (state.name, state.owner))
    sizes = daemon.registry.kv_index.state_bytes()
    listed = [_describe_state(daemon, state, sizes) for state in own]
    for shared in sorted(daemon.connections.access.shared_states(request.connection)):
        state = daemon.states.get((Owner(shared.user, shared.label), shared.state))
        if state is not None and not request.owner.includes(state.owner):
            info = _describe_state(daemon, state, sizes)
            info.name, info.shared_by = shared.name, shared.user
            listed.append(info)
    return w.ListStatesResult(states=listed)


def _describe_state(
    daemon: Daemon, state: NamedState, sizes: Mapping[tuple[int, str], int]
) -> w.StateInfo:
    shared = daemon.config.kv_share == "all"
    files_of = scoped(state.owner.user, state.kv_name, shared=shared)
    return w.StateInfo(
        name=state.name,
        label=state.owner.label,
        model=state.facts.model,
        fingerprint=state.facts.fingerprint,
        tokens=state.size,
        bytes=state.kept_bytes,
        kv_disk_bytes=sizes.get(files_of, 0),
        created_at=state.facts.created_at,
        shared_by=None,
    )


async def delete_state(daemon: Daemon, request: Request) -> w.DeleteStateResult:
    """Delete a state and its KV state; return when they are deleted."""
    deleted = await daemon.states.delete_state(request.owner, request.params.name)
    return w.DeleteStateResult(deleted=deleted)
