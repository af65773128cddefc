"""The frames of one client: its requests are sent on at once, or run as tasks of the entry."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from ....backends.errors import (
    BackendError,
    Busy,
    Cancelled,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    ShuttingDown,
    UnsupportedOperation,
)
from ....ipc.messages import ContextUse, Kind, Route
from ....wire.frames import check_shape
from ..frames import (
    UNREADABLE,
    Fields,
    OpenFrame,
    count_descriptors,
    integer_in,
    is_given,
    model_refused,
    names_buffers,
    open_message,
    part_refused,
    raw_of,
    request_of,
)
from ..routing.calls import row_of
from .buffers import call_on_buffers, compute_in_buffers
from .client import ClientConnection, ClientRequest, FleetClient, without_shutdown
from .draining import drain_node
from .jobs import call_on_jobs
from .metrics import read_metrics
from .model_copies import copy_model
from .new_contexts import ContextMove, FirstPrompt, WaitingTurn, begin_request
from .opening import (
    close_context,
    load_graph,
    load_passed,
    note_branches,
    open_context,
    reopen_context,
    work_on_graph,
)
from .several_nodes import (
    call_all,
    call_for_model,
    call_for_session,
    configure_backend,
    end_backend,
    swap_model,
    unload_graph,
)

log = logging.getLogger(__name__)

Work: TypeAlias = Callable[[FleetClient, ClientRequest, Fields], Awaitable[Mapping[str, Any]]]
TASKS: Mapping[Route, Work] = {
    Route.LOAD: load_graph,
    Route.OPEN: open_context,
    Route.GRAPH: work_on_graph,
    Route.LEASES: unload_graph,
    Route.SESSION: call_for_session,
    Route.MODEL: call_for_model,
    Route.SWAP: swap_model,
    Route.ALL: call_all,
    Route.DRAIN: call_all,
    Route.CONFIGURE: configure_backend,
    Route.END_BACKEND: end_backend,
    Route.ENTRY: read_metrics,
    Route.COPY: copy_model,
    Route.JOB: call_on_jobs,
}
"""Routes whose requests run as tasks; the others are sent on at once."""
TRUE = raw_of(True)


class Dispatcher:
    """Handles a client's frames after its hello. Lives on the entry's event loop."""

    def __init__(self, client: FleetClient, connection: ClientConnection, requests_max: int):
        self._client, self._connection = client, connection
        self._requests_max = requests_max
        self._waiting: deque[bytes] = deque()
        """Frames that were read after one whose contents are being sent; no more is read then."""
        self._sends_contents = False

    def handle_frame(self, body: bytes) -> None:
        """Handle a frame, after those before it.

        :raises ProtocolError: it cannot be read; the connection then ends.
        """
        if self._sends_contents:
            self._waiting.append(body)
            return
        message = open_message(body)
        if message.kind == Kind.REQUEST:
            self._begin(message)
        elif message.kind == Kind.CREDIT and len(message.items) > 2:
            request = self._client.requests.get(message.number)
            if request is not None:
                self._client.grant_credit(request, message.credit)
        else:
            raise ProtocolError(f"a frame of kind {message.kind}")

    def _begin(self, message: OpenFrame) -> None:
        number, requests = message.number, self._client.requests
        passed, descriptors = self._connection.descriptors, None
        if number in requests:
            raise ProtocolError(f"request id {number} is already in use")
        try:
            if len(requests) >= self._requests_max:
                raise Busy(
                    f"{self._requests_max} requests are in flight on this connection",
                    data={"requests_max": self._requests_max, "retry_after_s": 0.1},
                )
            check_shape(message.body)
            call, params = request_of(message)
            row = row_of(call, params)
            if self._client.fleet.stopping.is_set() and not (row and row.while_stopping):
                raise ShuttingDown("the fleet's entry stops, and accepts no new requests")
            if row is None:
                raise UnsupportedOperation(f"there is no call {call[:50]!r}")
            if row.route is Route.NONE:
                raise UnsupportedOperation(
                    f"the entry of a fleet has no call {call!r}",
                    hint="`free_tensors`, `open_channel` and calls between daemons are a node's"
                    " own: connect to its daemon",
                )
            needed = count_descriptors(message.items[3]) if row.has_descriptors else 0
            is_in_buffers = row.has_buffers and names_buffers(params)
            descriptors = passed.claim(needed)
            if descriptors and row.route not in (Route.CONTEXT, Route.LOAD, Route.BUFFER):
                passed.close_claimed(descriptors)
                raise part_refused() if row.route is Route.GRAPH else model_refused()
            request = requests[number] = ClientRequest(number, call, row)
            if descriptors and row.route is Route.LOAD:
                work = partial(load_passed, passed, descriptors)
                self._client.group.start_soon(self._run, work, request, params)
            elif row.route is Route.BUFFER:
                buffer_work = partial(call_on_buffers, passed, descriptors)
                self._client.group.start_soon(self._run, buffer_work, request, params)
            elif is_in_buffers:
                compute = partial(compute_in_buffers, passed, descriptors)
                self._client.group.start_soon(self._run, compute, request, params)
            elif descriptors:
                self._begin_contents(request, params, descriptors)
            else:
                self._dispatch(request, params)
        except ProtocolError:
            raise
        except InferdError as exc:
            if descriptors is None:  # it is not known which of them belong to the request
                passed.close()
            self._client.fail(number, exc)

    def _begin_contents(
        self, request: ClientRequest, params: Fields, descriptors: Sequence[int]
    ) -> None:
        """Send the contents of descriptors, and then their request, before any later frame."""
        self._sends_contents = True
        self._connection.pause_reading(self)
        self._client.group.start_soon(self._send_contents, request, params, descriptors)

    async def _send_contents(
        self, request: ClientRequest, params: Fields, descriptors: Sequence[int]
    ) -> None:
        client, passed = self._client, self._connection.descriptors
        try:
            handle = integer_in(params, "context")
            await reopen_context(client, handle)
            request.context = handle  # its session does not move meanwhile
            client.contexts.note_used(params)
            node = client.contexts.incarnation_of(params)[0].node
            upstream = client.upstream(node)
            async with upstream.contents_lock:
                await passed.send_contents(descriptors, upstream)
                upstream.check_connected()
                client.forward_to_context(request, params, has_contents=True)
        except InferdError as exc:
            client.fail(request.number, without_shutdown(exc))
        finally:
            passed.close_claimed(descriptors)
        self._sends_contents = False
        try:
            while self._waiting and not self._sends_contents:
                self.handle_frame(self._waiting.popleft())
        except InferdError as exc:
            self._connection.end(exc)
        if not self._sends_contents:
            self._connection.resume_reading(self)

    def _dispatch(self, request: ClientRequest, params: Fields) -> None:
        route = request.row.route
        assert route is not None, "the row is complete"
        if route is Route.DRAIN and params.get("stop") == TRUE:
            self._stop_entry(request)
        elif route is Route.DRAIN and (is_given(params, "node") or is_given(params, "undo")):
            client = self._client
            client.group.start_soon(self._run, drain_node, request, params)
        elif route is Route.CONTEXT or (route is Route.SESSION and is_given(params, "context")):
            self._forward_to_context(request, params)
        elif route is Route.CANCEL:
            self._cancel(request, params)
        else:
            self._client.group.start_soon(self._run, TASKS[route], request, params)

    def _stop_entry(self, request: ClientRequest) -> None:
        """Make the entry exit when its requests have ended. The nodes keep running."""
        if self._client.owner.user:
            raise PermissionDenied(
                "this user may not stop the fleet's entry",
                hint="its operators may: root, its own user, and `operators` in fleet.toml",
                data={"right": "drain"},
            )
        self._client.reply(request, {})
        self._client.fleet.stopping.set()

    def _forward_to_context(self, request: ClientRequest, params: Fields) -> None:
        client = self._client
        if integer_in(params, "context") in client.contexts.suspended:
            client.group.start_soon(self._forward_later, request, params)
            return
        first = begin_request(client, request, params)
        if first is not None and first.move is not None:
            client.group.start_soon(self._forward_after, first.move, first, params)
            return
        if "contexts" in request.row.handles_in_result:
            source = client.contexts.find(params)
            if source is not None:
                request.on_result = partial(note_branches, client, params, source)
        elif request.row.context is ContextUse.END:
            handle = integer_in(params, "context")
            request.on_result = lambda _: close_context(client, handle)
        client.forward_to_context(request, params)
        if first is not None and first.can_be_sent_again:
            client.group.start_soon(self._send_again, first, params)

    async def _forward_later(self, request: ClientRequest, params: Fields) -> None:
        """Forward a request on a context whose session moves, once it is open again."""
        try:
            with request.scope:
                await reopen_context(self._client, integer_in(params, "context"))
                self._forward_to_context(request, params)
            if request.scope.cancelled_caught:
                raise Cancelled("the request was cancelled")
        except InferdError as exc:
            self._client.fail(request.number, without_shutdown(exc))

    async def _send_again(self, first: FirstPrompt, params: Fields) -> None:
        """Send the first turn of a context elsewhere if it waits while another node is free."""
        turn = WaitingTurn(self._client, first, params)
        try:
            again = await turn.until_withdrawn()
            if again is not None:
                self._client.forward_to_context(first.request, again)
        except InferdError as exc:
            self._client.fail(first.request.number, without_shutdown(exc))

    async def _forward_after(self, move: ContextMove, first: FirstPrompt, params: Fields) -> None:
        """Forward a request with the first prompt of a context after the context's move."""
        request = first.request
        try:
            with request.scope:
                await move.run()
                if request.scope.cancel_called:
                    raise Cancelled("the request was cancelled")
                # No `await` since the move, so that later requests on the context come after this.
                self._forward_to_context(request, params)
                if first.can_be_sent_again:
                    self._client.group.start_soon(self._send_again, first, params)
        except InferdError as exc:
            self._client.fail(request.number, without_shutdown(exc))

    def _cancel(self, request: ClientRequest, params: Fields) -> None:
        """Cancel a request where it runs, or a context's turn."""
        client = self._client
        if not is_given(params, "request"):
            client.note_cancelled(integer_in(params, "context"))
            self._forward_to_context(request, params)
            return
        if is_given(params, "context"):
            raise InvalidArgument("`cancel` takes a request or a context, not both")
        number = integer_in(params, "request")
        target = client.requests.get(number)
        if target is None or target is request:
            client.reply(request, {"cancelled": False})
        elif target.upstream is not None:
            target.is_cancelled = True
            client.forward(request, target.upstream.node, params)
        else:
            target.scope.cancel()
            client.reply(request, {"cancelled": True})

    async def _run(self, work: Work, request: ClientRequest, params: Fields) -> None:
        client = self._client
        try:
            with request.scope:
                client.reply(request, await work(client, request, params))
            if request.scope.cancelled_caught:
                raise Cancelled("the request was cancelled")
        except InferdError as exc:
            client.fail(request.number, without_shutdown(exc))
        except UNREADABLE as exc:
            error = InvalidArgument(f"the params do not match the call: {exc}")
            client.fail(request.number, error)
        except Exception as exc:  # a bug of the entry: only this place catches everything
            log.exception("the call %s failed", request.call)
            client.fail(
                request.number, BackendError(f"{request.call} failed inside the entry: {exc!r}")
            )
