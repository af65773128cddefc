"""Computations of graphs without a task.

Making a task, with its scopes, takes longer than many computations. A `compute` on named inputs
whose graph is loaded waits for nothing except the worker's answer, so that it goes on in callbacks:
of the answer, of its time limit, of its cancellation. In any other case, and whenever a check
fails, the call runs in a task (`contexts.compute`), which raises the errors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog
from structlog.contextvars import bound_contextvars

from ...backends.errors import Cancelled, InferdError, WorkerCrashed
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...ipc.server.server import Finish, NeedsTask
from ...scheduler.messages import ComputedTensors
from ...sessions import Session
from ..core import Daemon
from ..logs.setup import logs
from ..models.model import ManagedModel
from ..models.registry import Lease
from ..residency.residency import ResidencyRequest
from ..workers.deaths import GUILTY
from ..workers.process_client import ProcessClient
from .arguments import priority_of, seconds_of
from .running import keep_error, shorten_timeouts
from .tensors import (
    ENDED,
    GivenInputs,
    LostAttempt,
    check_names,
    collect_inputs,
    count_computation,
    named_outputs,
    requester_of,
    total_timeout,
)

log = structlog.get_logger(logger_name="ipc")


def begin_compute(daemon: Daemon, request: Request, end: Callable[[Finish], None]) -> bool:
    """Begin a `compute` on a graph without a task if it waits for nothing but the worker; return
    whether it has begun.
    """
    p: w.ComputeParams = request.params
    if p.inputs is None or request.descriptors or daemon.draining:
        return False
    charged, begun = request.charge.size, False
    try:
        session = daemon.session(request)
        client = _client_of(daemon, session)
        if client is None:
            return False
        daemon.connections.access.check_request(request)
        daemon.check_usage(request)
        daemon.kept_tensors.free_tensors(request.connection, p.free)
        inputs = collect_inputs(daemon, request, session, p.inputs)
        inputs.check_file(client.info.fingerprint)
        if p.keep or p.outputs:
            check_names(daemon, request, client.info.outputs)
        begun = _Computation(daemon, request, session, inputs, end).begin(client)
        return begun
    except InferdError:
        return False  # the task raises it again, and counts it
    finally:
        if not begun:  # the task counts the inputs again
            request.charge.shrink(request.charge.size - charged)


def _client_of(daemon: Daemon, session: Session) -> ProcessClient | None:
    """Return the client of the worker of a context's graph, if the context is free and the graph
    is loaded.
    """
    lease = session.model
    if not isinstance(lease, Lease) or lease.closed or not lease.is_graph:
        return None
    is_free = not session.active and session.tensors.computation is None
    if not is_free or session.state in ENDED or daemon.sessions.live.has_yielded(session):
        return None
    return None if lease.model.turns_held else lease.loaded


class _Computation:
    """A computation on a graph, from its request to the report of its end."""

    def __init__(
        self,
        daemon: Daemon,
        request: Request,
        session: Session,
        inputs: GivenInputs,
        end: Callable[[Finish], None],
    ):
        self._daemon, self._request, self._session = daemon, request, session
        self._inputs, self._report_end = inputs, end
        self._began_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, client: ProcessClient) -> bool:
        """Send the inputs to the worker, unless the model is not admitted at once; return whether
        they were sent.
        """
        daemon, session, p = self._daemon, self._session, self._request.params
        lease = session.model
        assert isinstance(lease, Lease)
        given = priority_of(p.priority)
        priority = session.settings.priority if given is None else given
        self._model: ManagedModel = lease.model
        self._admission = ResidencyRequest(
            min(priority, lease.ceilings.priority_max),
            daemon.registry.seconds(),
            user=session.owner.user,
            subject=session,
            is_turn=True,
        )
        self._timeout_s, wait_s = seconds_of(p.timeout_s), seconds_of(p.queue_timeout_s)
        if not daemon.registry.loader.admit_to_loaded(self._model, self._admission):
            return False
        try:
            requester = requester_of(daemon, session, p.priority)
            self._cancel_computation = client.begin_computation(
                requester, self._inputs.tensors, wait_s, self._inputs.use, self._receive
            )
        except BaseException:
            daemon.registry.loader.end_request(self._model, self._admission)
            raise
        # From here on nothing fails until the end.
        self._fingerprint = client.info.fingerprint
        session.calls_under_way += 1
        session.tensors.computation = asyncio.Event()
        if self._timeout_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._time_out)
        self._request.on_cancel = self._cancel
        return True

    def _receive(self, answer: ComputedTensors | InferdError) -> None:
        self._end(lambda: self._result(answer))
        self._daemon.flush_later(self._request.connection)  # with those of the same batch

    def _cancel(self) -> None:
        self._cancel_computation()
        request = self._request
        error = Cancelled(request.cancelled_why, data=request.cancelled_data)
        self._daemon.counters.count_error(self._model, error)
        self._end(lambda: _raise(error))
        request.connection.flush()

    def _time_out(self) -> None:
        self._cancel_computation()
        self._end(lambda: self._result(total_timeout(self._timeout_s)))
        self._request.connection.flush()

    def _end(self, finish: Finish) -> None:
        """Free the context and the model, and report the end."""
        session, daemon = self._session, self._daemon
        if self._timer is not None:
            self._timer.cancel()
        self._request.on_cancel = None
        ended, session.tensors.computation = session.tensors.computation, None
        if ended is not None:
            ended.set()
        daemon.registry.loader.end_request(self._model, self._admission)
        session.calls_under_way -= 1
        session.used_at = daemon.ledger.seconds()
        daemon.sessions.places.session_rested()
        self._report_end(finish)

    def _result(self, answer: ComputedTensors | InferdError) -> w.ComputeResult:
        """Return the result of the call, or raise its error."""
        daemon, request, session = self._daemon, self._request, self._session
        try:
            if isinstance(answer, WorkerCrashed) and answer.data.get("cause") != GUILTY:
                request.lost_attempt = LostAttempt(answer, self._inputs)
                shorten_timeouts(request, time.monotonic() - self._began_at)
                raise NeedsTask
            if isinstance(answer, InferdError):
                raise answer
            count_computation(daemon, session, answer.seconds)
            outputs = named_outputs(
                daemon, request, session, self._inputs, answer.outputs, self._fingerprint
            )
            result = w.ComputeResult(outputs=outputs)
        except InferdError as exc:
            daemon.counters.count_error(self._model, exc)
            keep_error(daemon, request, exc)
            with bound_contextvars(**_logged(request)):
                daemon.note_refusal(request, exc)
            raise
        finally:
            daemon.copies.send_changes(request.connection, request.number)
        if logs.is_logged("ipc", "debug"):
            self._log_done()
        return result

    def _log_done(self) -> None:
        seconds = round(time.monotonic() - self._began_at, 6)
        log.debug("call.done", call=self._request.call, seconds=seconds, **_logged(self._request))


def _logged(request: Request) -> dict[str, Any]:
    """Return the fields that log lines of a request have."""
    connection = request.connection.number
    return {"connection": connection, "request": f"{connection}.{request.number}"}


def _raise(error: InferdError) -> None:
    raise error
