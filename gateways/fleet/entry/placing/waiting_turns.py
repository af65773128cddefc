"""First turns of new contexts that wait on their node although another one has a free slot.

The node was chosen by a report, and other programs may have taken its slots since then. Such a turn
is withdrawn, and sent to the other node.
"""

from __future__ import annotations

import logging

import anyio

from .....backends.errors import Cancelled, InferdError, error_from_wire
from .....ipc.messages import Kind
from ...calls.frames import Fields, OpenFrame, is_given, raw_of, values_of
from ...link import REPORT_S
from ...routing.choice import RouteRequest
from ..clients.client import ClientRequest, FleetClient
from .new_contexts import ContextMove, FirstPrompt
from .opening import class_of

log = logging.getLogger(__name__)

SENT_AGAIN = frozenset(("chat", "stream", "prompt_compute", "run_inference", "compute"))
"""The calls with a whole turn: one prompt, and one answer."""


class Withdrawal:
    """The withdrawal of a request from its node, whose messages are held back meanwhile."""

    def __init__(self) -> None:
        self.held: list[OpenFrame] = []
        self._ended = anyio.Event()

    def hold(self, message: OpenFrame) -> None:
        """Hold back an event or the answer."""
        self.held.append(message)
        if message.kind != Kind.EVENT:
            self._ended.set()

    async def was_cancelled(self) -> bool:
        """Wait for the answer, and return whether it says that the turn was cancelled."""
        await self._ended.wait()
        answer = self.held[-1]
        if answer.kind != Kind.ERROR:
            return False
        return isinstance(error_from_wire(values_of(answer.items[2])), Cancelled)


class FirstTurn:
    """A turn under way with the first prompt of a context."""

    def __init__(
        self, client: FleetClient, request: ClientRequest, params: Fields, first: FirstPrompt
    ):
        self._client, self._request, self._nodes = client, request, client.fleet.nodes
        self._handle, self._covered_bytes = first.handle, first.covered_bytes
        self._context = (client.contexts.find(params) or first.context)._replace(
            new=first.context.new
        )
        self._priority = first.context.kind.priority
        if is_given(params, "priority"):
            self._priority = class_of(params)

    @property
    def can_be_sent_again(self) -> bool:
        """Whether the request has all of the turn, and its session is not stored yet."""
        return self._request.call in SENT_AGAIN and not self._context.session_id

    @property
    def _may_wait(self) -> bool:
        request = self._request
        under_way = self._client.requests.get(request.number) is request
        return under_way and request.upstream is not None and not request.has_tokens

    async def until_withdrawn(self) -> ContextMove | None:
        """Withdraw the turn once it waits and another node is free; return the move there. None:
        it has begun or ended.
        """
        while True:
            await anyio.sleep(REPORT_S)
            if not self._may_wait:
                return None
            target = self._free_node()
            if target is None:
                continue
            turns = self._nodes.turns_of(target)
            turns.note_opening(self._request, self._context.kind)  # the slot is not free for others
            try:
                if not await self._is_waiting():
                    return None
                if self._may_wait:
                    return await self._withdraw(target)
            except InferdError as exc:
                log.info("a turn stays on %s: %s", self._context.node, exc)
                return None
            finally:
                turns.drop_opened(self._request)

    def _free_node(self) -> str | None:
        """Return a node on which the turn starts at once, if turns wait on its own."""
        node, model = self._context.node, self._context.kind.model
        load = self._nodes.loads().get(node)
        here = None if load is None else load.models.get(model)
        if here is None or not sum(here.waiting):
            return None
        route = RouteRequest(
            model, self._priority, excluded={node}, covered_bytes=self._covered_bytes
        )
        try:
            target = self._nodes.choose(route)
        except InferdError:
            return None
        return target if self._nodes.starts_at_once(target, model, self._priority) else None

    async def _is_waiting(self) -> bool:
        """Return whether the node says that the turn waits and has computed nothing.

        :raises InferdError: the node was lost.
        """
        client = self._client
        own = client.contexts.daemon_handle(self._handle)
        tasks = values_of(await client.upstream(self._context.node).call("queue", {}))["tasks"]
        return any(
            task["context"] == own and task["state"] == "waiting" and not task["computed_tokens"]
            for task in tasks
        )

    async def _withdraw(self, target: str) -> ContextMove | None:
        """Cancel the turn on its node. If it has begun meanwhile, it stays there.

        :raises InferdError: other requests on the context are under way.
        """
        client, request = self._client, self._request
        request.context = None  # it is withdrawn itself
        try:
            suspended = client.suspend_context(self._handle, self._context)
        finally:
            request.context = self._handle
        withdrawal = request.withdrawal = Withdrawal()
        fields = {"request": raw_of(request.number)}
        try:
            await client.upstream(self._context.node).call("cancel", fields)
        except InferdError as exc:
            log.info("a turn cannot be withdrawn from %s: %s", self._context.node, exc)
        is_withdrawn = await withdrawal.was_cancelled()
        if is_withdrawn and not request.is_cancelled:
            client.end_turn(request)
            return ContextMove(client, request, suspended, target)
        client.contexts.resume(suspended)
        client.pass_held(request)
        return None
