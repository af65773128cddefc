"""New contexts, which go where the beginning of their first prompt was computed already.

A context is opened before its prompt is known. When the first prompt comes and another node has
computed more of its beginning, the context is opened there, under the client's handle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import anyio
import msgspec

from .....backends.errors import InferdError, InvalidArgument
from ...calls.frames import Fields, integer_in, raw_of, with_handle
from ...calls.prompts import is_setup, prompt_text, setup_text
from ...routing.choice import RouteRequest
from ...routing.prompts import prompt_blocks
from ..clients.client import ClientRequest, FleetClient
from ..clients.contexts import OpenContext, SuspendedContext
from .homes import RecentKey
from .leases import end_unused_lease, leased
from .opening import open_again

log = logging.getLogger(__name__)

GAIN_BYTES_MIN, SESSION_GAIN_BYTES_MIN = 512, 2048
"""The least part of a prompt for which a context is opened on another node; a session with an id
takes more calls.
"""
OPEN_S_MAX = 2.0
"""Time in which a node opens a context; past it, the context stays."""


class ContextMove:
    """The opening of a new context on another node, before its first prompt is sent there. Other
    requests on the context wait meanwhile.
    """

    def __init__(
        self, client: FleetClient, request: ClientRequest, suspended: SuspendedContext, target: str
    ):
        self._client, self._request = client, request
        self._suspended, self._target = suspended, target
        self._handle = suspended.handle
        self._old_handle = client.contexts.daemon_handle(suspended.handle)

    async def run(self) -> None:
        """Open it there, or leave it where it is if that fails.

        :raises InferdError: a session with an id can be opened on neither node.
        """
        client, context = self._client, self._suspended.context
        turns = client.fleet.nodes.turns_of(self._target)
        turns.note_opening(self._request, context.kind)
        try:
            with anyio.CancelScope(shield=True):
                if context.session_id:
                    await self._move_session()
                else:
                    await self._open_there()
        finally:
            turns.drop_opened(self._request)
            client.contexts.resume(self._suspended)

    async def _move_session(self) -> None:
        client, suspended = self._client, self._suspended
        try:
            await client.fleet.move_open(client, suspended, self._target)
        except InferdError as exc:
            log.info("a session stays on %s: %s", suspended.context.node, exc)
        if client.contexts.is_closed(suspended):
            await open_again(client, suspended)

    async def _open_there(self) -> None:
        context = self._suspended.context
        try:
            with anyio.fail_after(OPEN_S_MAX):
                await self._open_on(self._target)
        except (InferdError, TimeoutError) as exc:
            log.info("a context stays on %s: %s", context.node, exc)
        else:
            self._client.group.start_soon(_close, self._client, context.node, self._old_handle)
            end_unused_lease(self._client, context.graph, context.node)

    async def _open_on(self, target: str) -> None:
        client, context = self._client, self._suspended.context
        assert context.new is not None, "only new contexts are opened elsewhere"
        async with leased(client, context.graph, target) as graph:
            upstream = client.upstream(target)
            fields = with_handle(context.new.params, "graph", graph)
            raw = await upstream.call(context.new.call, fields)
            opened = msgspec.msgpack.decode(raw, type=_Opened).context
            try:
                for call, params in context.new.setup:
                    await upstream.call(call, with_handle(params, "context", opened))
                if context.graph not in client.graphs.values():
                    raise InvalidArgument("the graph was unloaded meanwhile")
            except BaseException:
                client.group.start_soon(_close, client, target, opened)
                raise
            handle = client.contexts.client_handle(upstream, opened)
            client.contexts.note_reopened(self._handle, handle, target)


class _Opened(msgspec.Struct):
    context: int


async def _close(client: FleetClient, node: str, context: int) -> None:
    with suppress(InferdError):  # it ends with the connection at the latest
        fields = {"context": raw_of(context)}
        await client.upstream(node).call("finalize_execution_context", fields)


class FirstPrompt(NamedTuple):
    """The request with the first prompt of a context, which is no longer a new one, and the bytes
    of the prompt that each node has computed. With a *move*, the context moves before the prompt is
    sent.
    """

    handle: int
    context: OpenContext
    covered_bytes: Mapping[str, int]
    move: ContextMove | None


def note_request(client: FleetClient, request: ClientRequest, params: Fields) -> FirstPrompt | None:
    """Note a request on a context, and return the first prompt of a new one, if it has that. If
    another node has computed more of it, the context is suspended for a move there.
    """
    context = client.contexts.find(params)
    if context is None or context.new is None:
        return None
    prepares = is_setup(request.call, params)
    if prepares and context.new.add_setup(request.call, params, setup_text(request.call, params)):
        return None
    client.contexts.note_used(params)
    text = b"" if prepares else prompt_text(request.call, params)
    if not text:
        return None
    fleet, model = client.fleet, context.kind.model
    blocks = prompt_blocks(f"{client.owner.user}\0{model}", context.new.head + text)
    covered = fleet.prompts.covered_bytes(blocks)
    handle, move = integer_in(params, "context"), None
    target = _choose(client, handle, context, covered)
    if target != context.node:
        with suppress(InferdError):  # requests on it are under way
            suspended = client.suspend_context(handle, context)
            move = ContextMove(client, request, suspended, target)
            request.context = handle
    node = context.node if move is None else target
    fleet.prompts.note_prompt(blocks, node)
    fleet.recent.put(RecentKey(client.owner, model), node)
    return FirstPrompt(handle, context, covered, move)


def _choose(
    client: FleetClient, handle: int, context: OpenContext, covered: Mapping[str, int]
) -> str:
    """Return the node for the first prompt of a context: its own, unless another one has computed
    much more of it and is not worse otherwise.
    """
    nodes, node = client.fleet.nodes, context.node
    gain_min = SESSION_GAIN_BYTES_MIN if context.session_id else GAIN_BYTES_MIN
    needed = covered.get(node, 0) + gain_min
    if max(covered.values(), default=0) < needed:
        return node
    nodes.turns_of(node).drop_opened((client, handle))  # it does not count itself
    route = RouteRequest(
        context.kind.model, context.kind.priority, recent=node, covered_bytes=covered
    )
    try:
        target = nodes.choose(route)
    except InferdError:
        return node
    return target if covered.get(target, 0) >= needed else node
