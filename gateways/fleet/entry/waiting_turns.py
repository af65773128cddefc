"""First turns of new contexts that wait on their node although another one has a free slot.

The node was chosen by a report, and other programs may have taken its slots since then. The context
is opened on the other node, and the turn is then withdrawn from the first one and sent there.
"""

from __future__ import annotations

import logging
import time

import anyio
import msgspec

from ....backends.errors import BackendError, InferdError
from ..frames import Fields, is_given, raw_of, values_of
from ..link import REPORT_S
from ..routing.choice import RouteRequest
from .client import FleetClient, Withdrawal
from .new_contexts import FirstPrompt, open_elsewhere

log = logging.getLogger(__name__)

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
