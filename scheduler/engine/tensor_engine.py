"""The engine of a graph: one computation at a time in a thread, in a fair order.

If its caller has left or its time has passed, a waiting computation is dropped, and a running one
is cancelled. The record names the request that is computed, so that the daemon knows the input of a
process that crashed or hung.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...backends import Computation, GraphModel, InferdError
from ...backends.errors import Timeout, UnsupportedOperation, error_of
from .. import messages as m
from ..call_thread import CallResult, CallThread
from ..policy.text_order import TextOrder
from ..reasoning import EndOutcome
from ..record import ActivityKind, Recorder


@dataclass(slots=True)
class WaitingComputation:
    """A *request* whose inputs fit, with the time by which its *computation* must begin."""

    request: m.ComputeTensors
    computation: Computation
    begin_by: float


class TensorEngine:
    """Computes a graph. Like `Engine`, it shares nothing: commands come in, reports go out.

    *record* is the descriptor of the shared memory with the activity. *strict* is
    `priority_strict`.
    """

    def __init__(
        self,
        model: GraphModel,
        seconds: Callable[[], float] = time.monotonic,
        record: int = -1,
        *,
        strict: bool = False,
    ):
        self.quit = False
        self.recorder = Recorder(record)
        self._model, self._seconds = model, seconds
        self._waiting: TextOrder[WaitingComputation] = TextOrder(strict=strict)
        self._deadlines: dict[int, float] = {}
        """By request, the times by which waiting computations must begin, if they have any."""
        self._running: WaitingComputation | None = None
        self._thread = CallThread("computing")
        self._runs, self._run_s = 0, 0.0

    def start(self) -> None:
        """Start the thread.

        :raises BackendError: the system has no more threads.
        """
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable once a computation has ended."""
        return self._thread.fileno()

    def advance(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Carry out *commands*, take results, begin the next computation; return the reports."""
        reports: list[m.Report] = []
        for command in commands:
            if isinstance(command, m.Quit):
                self.quit = True
            else:
                reports += self._handle_command(command)
        for result in self._thread.results():
            reports += self._take_result(result)
        reports += self._expire_waiting()
        self._begin_next()
        if self._running is None:  # it has read the commands, which the daemon expects
            self.recorder.record_activity(ActivityKind.IDLE)
        return reports

    def wait_s_max(self) -> float | None:
        """Return how many seconds the next call may wait for commands; None: no limit."""
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - self._seconds())

    def close(self) -> None:
        """Cancel the computation under way and wait for its end; the model is freed next."""
        if self._running is not None:
            self._running.computation.cancel()
        self._thread.close()

    # Commands.

    def _handle_command(self, command: m.Command) -> list[m.Report]:
        match command:
            case m.ComputeTensors():
                return self._add_request(command)
            case m.DropInput(number):
                self._drop_request(number)
                return []
            case m.Submit(spec):
                return [m.Failed(spec.id, _no_language("answer prompts").to_wire())]
            case m.Stats():
                return [m.CommandResult(command.id, self._statistics())]
            case m.RequestMessage():
                return [_answer(command)]
        return []  # of tasks, KV files, adapters and threads, which a graph does not have

    def _add_request(self, request: m.ComputeTensors) -> list[m.Report]:
        try:
            computation = self._model.new_computation(request.inputs)
        except InferdError as exc:
            return [m.Refused(request.id, exc.to_wire())]
        begin_by = self._seconds() + request.wait_s if request.wait_s else math.inf
        if request.wait_s:
            self._deadlines[request.id] = begin_by
        waiting = WaitingComputation(request, computation, begin_by)
        self._waiting.add_request(request.requester, waiting)
        return []

    def _drop_request(self, number: int) -> None:
        self._deadlines.pop(number, None)
        self._waiting.remove_requests(lambda one: one.request.id == number)
        if self._running is not None and self._running.request.id == number:
            self._running.computation.cancel()

    def _statistics(self) -> dict[str, Any]:
        return {
            "computations": self._runs,
            "computing_s": round(self._run_s, 6),
            "waiting": len(self._waiting),
            "running": int(self._running is not None),
        }

    # Computations.

    def _expire_waiting(self) -> list[m.Report]:
        """Refuse the computations that have waited for too long."""
        now = self._seconds()
        late: list[WaitingComputation] = []
        if any(begin_by < now for begin_by in self._deadlines.values()):

            def is_late(one: WaitingComputation) -> bool:
                if one.begin_by < now:
                    late.append(one)
                return one.begin_by < now

            self._waiting.remove_requests(is_late)
        for one in late:
            del self._deadlines[one.request.id]
        return [m.Refused(one.request.id, _timeout(one.request.wait_s).to_wire()) for one in late]

    def _begin_next(self) -> None:
        requester = None if self._running is not None else self._waiting.next_requester()
        if requester is not None and not self.quit:
            self._running = one = self._waiting.remove_first(requester)
            self._deadlines.pop(one.request.id, None)
            # The daemon measures from here whether the computation hangs.
            self.recorder.record_activity(ActivityKind.PROMPT, [one.request.id])
            self._thread.queue_call(one.computation.run)

    def _take_result(self, result: CallResult) -> list[m.Report]:
        one, self._running = self._running, None
        assert one is not None, "only computations run in the thread"
        self._runs += 1
        self._run_s += result.seconds
        self._waiting.count_work(one.request.requester.owner, result.seconds)
        number, outcome = one.request.id, result.outcome
        if isinstance(outcome, BaseException):
            return [m.Refused(number, error_of(outcome, "computing tensors").to_wire())]
        return [m.CommandResult(number, m.ComputedTensors(outcome, result.seconds))]


def _timeout(wait_s: float) -> Timeout:
    return Timeout(f"the queue timeout of {wait_s:g} s has passed", data={"timeout": "queue"})


def _no_language(work: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"the model is a graph, which computes tensors and does not {work}",
        hint="send it tensors, or use a language model",
    )


def _answer(command: m.RequestMessage) -> m.Report:
    """Return the answer to a command that concerns texts, tasks or KV states, of which a graph has
    none.
    """
    match command:
        case m.Queue():
            return m.CommandResult(command.id, [])
        case m.ExchangeServed():
            return m.CommandResult(command.id, {})
        case m.Park():
            return m.CommandResult(command.id, False)
        case m.EndReasoning():
            return m.CommandResult(command.id, EndOutcome.NOT_REASONING)
        case m.Lookup() | m.PersistState() | m.SaveNamedState() | m.SetLowMemory():
            return m.CommandResult(command.id, 0)
        case m.ExportState():
            return m.CommandResult(command.id, "")
        case m.DeleteSessionStates() | m.RemoveAdapter():
            return m.CommandResult(command.id, None)
        case m.AddAdapter():
            return m.Refused(command.id, _no_language("have adapters").to_wire())
    return m.Refused(command.id, _no_language("read texts").to_wire())
