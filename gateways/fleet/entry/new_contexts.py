"""Moves of new contexts to nodes that have computed the beginning of their first prompt, or that
have a free slot for their first turn.

A context is opened before its prompt is known. When the first prompt comes and another node has
computed more of its beginning, the context is opened there, under the client's handle. A first turn
may then wait although another node has a free slot: the node was chosen by a report, and other
programs may have taken its slots since then. The context is opened on the other node, and the turn
is withdrawn from the first one and sent there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

import anyio
import msgspec

from ....backends.errors import BackendError, InferdError, InvalidArgument, SessionBusy
from ....ipc.messages import Starts
from ..frames import Fields, integer_in, is_given, raw_of, values_of, with_handle
from ..link import REPORT_S
from ..routing.choice import RouteRequest
from ..routing.homes import (
    Block,
    RecentKey,
    SessionKey,
    is_setup,
    prompt_blocks,
    prompt_text,
    setup_text,
)
from .client import ClientRequest, FleetClient, Withdrawal
from .contexts import OpenContext, SuspendedContext
from .draining import move_open
from .opening import class_of, end_unused_lease, leased, open_again

log = logging.getLogger(__name__)

GAIN_BYTES_MIN, SESSION_GAIN_BYTES_MIN = 512, 2048
"""The least gain in computed bytes of the prompt for which a context is opened on another node. It
is larger for a session with an id, whose move takes more calls.
"""
OPEN_S_MAX = 2.0
"""Maximum time to open a context, or to copy a session, on another node; after that it stays."""
SENT_AGAIN_BYTES_MAX = 1 << 20


class _Opened(msgspec.Struct):
    context: int


class ContextElsewhere:
    """A copy of a new context on another node; it replaces the original, or is closed."""

    def __init__(self, client: FleetClient, context: OpenContext, node: str, handle: int):
        self._client, self._context, self._node, self._handle = client, context, node, handle

    def close(self) -> None:
        self._client.group.start_soon(_close, self._client, self._node, self._handle)

    def replace(self, handle: int) -> None:
        """Replace the context with the client's *handle* by the copy, and close the original. If
        that fails, the copy is closed.

        :raises InferdError: the client has ended the context or its graph, or a node was lost.
        :raises OSError: the entry's state cannot be written.
        """
        client, context = self._client, self._context
        try:
            old_handle = client.contexts.daemon_handle(handle)
            if context.graph not in client.graphs.values():
                raise InvalidArgument("the graph was unloaded meanwhile")
            if client.contexts.has_ended(handle):
                raise InvalidArgument("the context was closed meanwhile")
            opened = client.contexts.client_handle(client.upstream(self._node), self._handle)
        except (InferdError, OSError):
            self.close()
            raise
        client.contexts.move(handle, context, opened, self._node)
        client.group.start_soon(_close, client, context.node, old_handle)
        end_unused_lease(client, context.graph, context.node)


async def open_elsewhere(client: FleetClient, context: OpenContext, node: str) -> ContextElsewhere:
    """Open a copy of a new context on another node.

    :raises InferdError: the node cannot do that.
    :raises TimeoutError: it does not answer in time.
    """
    assert context.new is not None, "only new contexts are opened elsewhere"
    with anyio.fail_after(OPEN_S_MAX):
        async with leased(client, context.graph, node) as graph:
            upstream = client.upstream(node)
            fields = with_handle(context.new.params, "graph", graph)
            raw = await upstream.call(context.new.call, fields)
            handle = msgspec.msgpack.decode(raw, type=_Opened).context
            found = ContextElsewhere(client, context, node, handle)
            try:
                for call, params in context.new.setup:
                    await upstream.call(call, with_handle(params, "context", handle))
            except BaseException:
                found.close()
                raise
            return found


async def _close(client: FleetClient, node: str, context: int) -> None:
    with suppress(InferdError):  # it ends with the connection at the latest
        fields = {"context": raw_of(context)}
        await client.upstream(node).call("finalize_execution_context", fields)


class FirstPrompt:
    """A request with the first prompt of a context. `covered_bytes` has, by node, the bytes of the
    prompt's beginning that the node has computed.
    """

    def __init__(
        self,
        client: FleetClient,
        request: ClientRequest,
        params: Fields,
        context: OpenContext,
        blocks: Sequence[Block],
    ):
        self.request, self.context = request, context
        self.handle = integer_in(params, "context")
        self.covered_bytes = client.fleet.prompts.covered_bytes(blocks)
        self.priority = context.kind.priority
        with suppress(InferdError):  # the node refuses an invalid class
            self.priority = class_of(params) if is_given(params, "priority") else self.priority
        self.move: ContextMove | None = None
        """The move of the context before the prompt is sent."""
        size = sum(len(raw) for raw in params.values())
        self._is_whole_turn = request.row.starts is Starts.TURN and size <= SENT_AGAIN_BYTES_MAX
        self._client, self._blocks = client, blocks

    @property
    def can_be_sent_again(self) -> bool:
        """Whether the call is a whole turn, not too large, and the context has no session id."""
        return self._is_whole_turn and not self.context.session_id

    def note_node(self, node: str) -> None:
        """Note the node that computes the prompt."""
        fleet = self._client.fleet
        fleet.prompts.note_prompt(self._blocks, node)
        fleet.recent.put(RecentKey(self._client.owner, self.context.kind.model), node)


class ContextMove:
    """The opening of a new context on another node, before its first prompt is sent there. Other
    requests on the context wait meanwhile.
    """

    def __init__(
        self, client: FleetClient, first: FirstPrompt, suspended: SuspendedContext, target: str
    ):
        self._client, self._first = client, first
        self._suspended, self._target = suspended, target
        self._turns = client.fleet.nodes.turns_of(target)
        self._turns.note_opening(first.request, first.context.kind)

    async def run(self) -> None:
        """Open it there, or leave it where it is if that fails.

        :raises InferdError: a session with an id can be opened on neither node.
        """
        client, context, first = self._client, self._suspended.context, self._first
        try:
            with anyio.CancelScope(shield=True):
                if context.session_id:
                    await self._move_session()
                else:
                    await self._move_context()
        finally:
            self._turns.drop_opened(first.request)
            client.contexts.resume(self._suspended)
            found = client.contexts.find({"context": raw_of(first.handle)})
            first.note_node(context.node if found is None else found.node)

    async def _move_context(self) -> None:
        context = self._suspended.context
        try:
            found = await open_elsewhere(self._client, context, self._target)
            found.replace(self._first.handle)
        except (InferdError, TimeoutError, OSError) as exc:
            log.info("a context stays on %s: %s", context.node, exc)

    async def _move_session(self) -> None:
        client, suspended = self._client, self._suspended
        key = SessionKey(client.owner, suspended.context.session_id)
        try:
            if not client.fleet.moves.is_settled(key):
                raise SessionBusy("the session moves already")
            await move_open(client, suspended, self._target, OPEN_S_MAX)
        except InferdError as exc:
            log.info("a session stays on %s: %s", suspended.context.node, exc)
        if client.contexts.is_closed(suspended):
            await open_again(client, suspended)


def begin_request(
    client: FleetClient, request: ClientRequest, params: Fields
) -> FirstPrompt | None:
    """Note a request on a context. If it has the first prompt of a new context, return that prompt.
    If another node has computed more of the prompt, suspend the context for a move there.
    """
    context = client.contexts.find(params)
    if context is None or context.new is None:
        return None
    prepares = is_setup(request.row, params)
    if prepares and context.new.add_setup(request.call, params, setup_text(params)):
        return None
    client.contexts.note_used(params)
    text = b"" if prepares else prompt_text(request.row, params)
    if not text:
        return None
    scope = f"{client.owner.user}\0{context.kind.model}"
    blocks = prompt_blocks(scope, context.new.head + text)
    first = FirstPrompt(client, request, params, context, blocks)
    target = _choose(client, first)
    if target != context.node:
        with suppress(InferdError):  # requests on it are under way
            suspended = client.suspend_context(first.handle, context)
            first.move = ContextMove(client, first, suspended, target)
            request.context = first.handle
    if first.move is None:
        first.note_node(context.node)
    return first


def _choose(client: FleetClient, first: FirstPrompt) -> str:
    """Return the node for the first prompt of a context: its own, unless another one has computed
    much more of it and is not worse otherwise.
    """
    nodes, context, covered = client.fleet.nodes, first.context, first.covered_bytes
    node, model = context.node, context.kind.model
    gain_min = SESSION_GAIN_BYTES_MIN if context.session_id else GAIN_BYTES_MIN
    needed = covered.get(node, 0) + gain_min
    if max(covered.values(), default=0) < needed:
        return node
    nodes.turns_of(node).drop_opened((client, first.handle))  # not to count against itself
    route = RouteRequest(model, first.priority, recent=node, covered_bytes=covered)
    try:
        target = nodes.choose(route)
    except InferdError:
        return node
    return target if covered.get(target, 0) >= needed and nodes.has_loaded(target, model) else node


TIME_LEFT_S_MIN = 0.01
TIMEOUTS = ("timeout_s", "queue_timeout_s")


class WaitingTurn:
    """A turn under way with the first prompt of a context without an id."""

    def __init__(self, client: FleetClient, first: FirstPrompt, params: Fields):
        self._client, self._first, self._params = client, first, params
        self._request, self._nodes = first.request, client.fleet.nodes
        now = client.contexts.find(params) or first.context
        self._context = now._replace(new=first.context.new)
        self._began_at = time.monotonic()

    @property
    def _may_wait(self) -> bool:
        request = self._request
        under_way = self._client.requests.get(request.number) is request
        return under_way and request.upstream is not None and not request.has_tokens

    async def until_withdrawn(self) -> Fields | None:
        """Withdraw the turn once it waits and another node is free, and return the params for
        sending it to the context there. None: the turn has begun or ended.

        :raises InferdError: it was withdrawn, but the context has ended meanwhile.
        """
        while True:
            await anyio.sleep(REPORT_S)
            if not self._may_wait:
                return None
            target = self._free_node()
            if target is None:
                continue
            turns = self._nodes.turns_of(target)
            turns.note_opening(self._request, self._context.kind)  # reserve the slot for this turn
            try:
                return await self._move(target)
            finally:
                turns.drop_opened(self._request)

    def _free_node(self) -> str | None:
        """Return a node on which the turn starts at once, if turns wait on its own."""
        node, model, priority = self._context.node, self._context.kind.model, self._first.priority
        load = self._nodes.loads().get(node)
        here = None if load is None else load.models.get(model)
        if here is None or not sum(here.waiting):
            return None
        if not self._nodes.some_start_at_once(model, priority):
            return None
        route = RouteRequest(
            model, priority, excluded={node}, covered_bytes=self._first.covered_bytes
        )
        try:
            target = self._nodes.choose(route)
        except InferdError:
            return None
        return target if self._nodes.starts_at_once(target, model, priority) else None

    async def _move(self, target: str) -> Fields | None:
        """Move the turn to *target*, unless it begins meanwhile."""
        client, context = self._client, self._context
        try:
            if not await self._is_waiting():
                return None
            elsewhere = await open_elsewhere(client, context, target)
        except (InferdError, TimeoutError) as exc:
            log.info("a turn stays on %s: %s", context.node, exc)
            return None
        is_withdrawn = False
        try:
            is_withdrawn = self._may_wait and await self._withdraw()
        finally:
            if not is_withdrawn:
                elsewhere.close()
        if not is_withdrawn:
            return None
        try:
            elsewhere.replace(self._first.handle)
        except OSError as exc:
            raise BackendError(f"the entry's state cannot be written: {exc}") from None
        self._first.note_node(target)
        return self._params_with_time_left()

    async def _is_waiting(self) -> bool:
        """Return whether the node lists the turn as waiting, with nothing computed.

        :raises InferdError: the node was lost.
        """
        client = self._client
        own = client.contexts.daemon_handle(self._first.handle)
        tasks = values_of(await client.upstream(self._context.node).call("queue", {}))["tasks"]
        return any(
            task["context"] == own and task["state"] == "waiting" and not task["computed_tokens"]
            for task in tasks
        )

    async def _withdraw(self) -> bool:
        """Cancel the turn on its node; return False if it has begun or ended meanwhile, or if the
        client has cancelled it.
        """
        client, request = self._client, self._request
        withdrawal = request.withdrawal = Withdrawal()
        fields = {"request": raw_of(request.number)}
        try:
            try:
                await client.upstream(self._context.node).call("cancel", fields)
            except InferdError as exc:
                log.info("a turn is not withdrawn from %s: %s", self._context.node, exc)
            was_cancelled = await withdrawal.was_cancelled()
        except BaseException:
            client.note_withdrawn(request)  # the client has left
            raise
        if was_cancelled and not request.is_cancelled:
            client.note_withdrawn(request)
            return True
        client.pass_held(request)
        return False

    def _params_with_time_left(self) -> Fields:
        """Return the params, with the timeouts that are left."""
        params, waited_s = dict(self._params), time.monotonic() - self._began_at
        for name in TIMEOUTS:
            if is_given(params, name):
                limit_s = msgspec.msgpack.decode(params[name], type=float)
                if limit_s:
                    params[name] = raw_of(max(TIME_LEFT_S_MIN, limit_s - waited_s))
        return params
