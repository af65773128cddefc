"""The engine of a graph: computations in lanes, in a fair order.

A lane is a thread that computes; it is started when work first waits for it. Whenever a lane is
free, it takes the next computation in the order. If its caller has left or its time has passed, a
waiting computation is dropped, and a running one is cancelled. The record names the requests under
way, so that the daemon knows the inputs that may have crashed or hung the process.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...backends import Computation, GraphModel, InferdError, ModelSpec
from ...backends.errors import Timeout, UnsupportedOperation, error_of
from .. import messages as m
from ..call_thread import CallResult, CallThread
from ..owner import Requester
from ..policy.text_order import TextOrder
from ..reasoning import EndOutcome
from ..record import ActivityKind, Recorder

EXPECTED_GAIN = 1 / 8
"""Weight of the last computation in the expected time of the next one."""


@dataclass(slots=True)
class WaitingComputation:
    """A *request* whose inputs fit, with the time by which its *computation* must begin."""

    request: m.ComputeTensors
    computation: Computation
    begin_by: float
    charged_s: float = 0.0
    """The time that was charged to its owner when it began."""


class Lane:
    """A thread that computes in the lane *number* of a model, and the computation in it."""

    def __init__(self, number: int):
        self.thread = CallThread(f"lane-{number}")
        self.running: WaitingComputation | None = None
        self.began_at = 0.0
        """The time on the record's clock."""
        self._number = number

    def begin_call(self) -> None:
        """Compute `running`."""
        assert self.running is not None
        self.thread.queue_call(partial(self.running.computation.run, self._number))


class TensorEngine:
    """Computes the graph of *spec*. Like `Engine`, it shares nothing: commands come in, reports go
    out.

    *record* is the descriptor of the shared memory with the activity. *strict* is
    `priority_strict`.
    """

    def __init__(
        self,
        model: GraphModel,
        spec: ModelSpec,
        seconds: Callable[[], float] = time.monotonic,
        record: int = -1,
        *,
        strict: bool = False,
    ):
        self.quit = False
        self.recorder = Recorder(record)
        self._model, self._spec, self._seconds = model, spec, seconds
        self._waiting: TextOrder[WaitingComputation] = TextOrder(strict=strict)
        self._deadlines: dict[int, float] = {}
        """By request, the times by which waiting computations must begin, if they have any."""
        self._lanes: dict[int, Lane] = {}
        """By the descriptors of their threads, in the order of their numbers."""
        self._ended = select.epoll()
        """Readable once a computation has ended in one of them."""
        self._lanes_max = spec.lanes
        self._lanes_used_max = self._lanes_max
        """The lanes for which there are cores now."""
        self._runs, self._run_s, self._expected_s = 0, 0.0, 0.0

    def start(self) -> None:
        """Start the first lane.

        :raises BackendError: the system has no more threads.
        """
        self._start_lane()

    def fileno(self) -> int:
        """Return a descriptor that is readable once a computation has ended."""
        return self._ended.fileno()

    def advance(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Carry out *commands*, take results, begin computations; return the reports."""
        reports: list[m.Report] = []
        for command in commands:
            if isinstance(command, m.Quit):
                self.quit = True
            else:
                reports += self._handle_command(command)
        for number, _ in self._ended.poll(0):
            for result in self._lanes[number].thread.results():
                reports += self._take_result(self._lanes[number], result)
        reports += self._expire_waiting()
        reports += self._begin_waiting()
        self._record()
        return reports

    def wait_s_max(self) -> float | None:
        """Return how many seconds the next call may wait for commands; None: no limit."""
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - self._seconds())

    def close(self) -> None:
        """Cancel the computations under way and wait for their end; the model is freed next."""
        for lane in self._running:
            assert lane.running is not None
            lane.running.computation.cancel()
        for lane in self._lanes.values():
            lane.thread.close()
        self._ended.close()

    @property
    def _running(self) -> list[Lane]:
        """The lanes with a computation."""
        return [lane for lane in self._lanes.values() if lane.running is not None]

    # Commands.

    def _handle_command(self, command: m.Command) -> Sequence[m.Report]:
        match command:
            case m.ComputeTensors():
                return self._add_request(command)
            case m.DropInput(number):
                self._drop_request(number)
                return []
            case m.SetThreads(threads):
                lanes = threads // self._spec.lane_threads
                self._lanes_used_max = max(1, min(lanes, self._lanes_max))
                return []
            case m.Submit(spec):
                return [m.Failed(spec.id, _no_language("answer prompts").to_wire())]
            case m.Stats():
                return [m.CommandResult(command.id, self._statistics())]
            case m.RequestMessage():
                return [_answer(command)]
        return []  # of tasks, KV files and adapters, which a graph does not have

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
        for lane in self._running:
            if lane.running is not None and lane.running.request.id == number:
                lane.running.computation.cancel()

    def _statistics(self) -> dict[str, Any]:
        return {
            "computations": self._runs,
            "computing_s": round(self._run_s, 6),
            "waiting": len(self._waiting),
            "running": len(self._running),
            "lanes": self._lanes_used_max,
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

    def _begin_waiting(self) -> list[m.Report]:
        """Begin computations while lanes are free."""
        while not self.quit and (requester := self._waiting.next_requester()) is not None:
            running = self._running
            if len(running) >= self._lanes_used_max or not self._may_begin(requester, running):
                break
            try:
                lane = next((one for one in self._lanes.values() if one.running is None), None)
                lane = lane or self._start_lane()
            except InferdError as exc:
                self._lanes_max = self._lanes_used_max = len(self._lanes)
                return [_lane_failed(self._lanes_max, exc)]
            self._begin(lane, self._waiting.remove_first(requester))
        return []

    def _may_begin(self, requester: Requester, running: Sequence[Lane]) -> bool:
        """Return whether the first computation of *requester* may begin beside those that run."""
        requests = [lane.running.request for lane in running if lane.running is not None]
        requests.append(self._waiting.first_request(requester).request)
        return len(requests) == 1 or not any(request.alone for request in requests)

    def _start_lane(self) -> Lane:
        number = len(self._lanes)
        if number:
            self._model.add_lane()
        lane = Lane(number)
        lane.thread.start()
        self._ended.register(lane.thread.fileno(), select.EPOLLIN)
        self._lanes[lane.thread.fileno()] = lane
        return lane

    def _begin(self, lane: Lane, one: WaitingComputation) -> None:
        self._deadlines.pop(one.request.id, None)
        one.charged_s = self._expected_s
        self._waiting.count_work(one.request.requester.owner, one.charged_s)
        # The daemon measures from here whether the computation hangs.
        lane.running, lane.began_at = one, time.monotonic()
        self._record()
        lane.begin_call()

    def _record(self) -> None:
        """Record the requests under way, the oldest first. An idle record also says that the
        commands were read, which the daemon expects.
        """
        running = sorted(self._running, key=lambda lane: lane.began_at)
        ids = [lane.running.request.id for lane in running if lane.running is not None]
        if ids:
            at = running[0].began_at
            self.recorder.record_activity(ActivityKind.PROMPT, ids, oldest=1, at=at)
        else:
            self.recorder.record_activity(ActivityKind.IDLE)

    def _take_result(self, lane: Lane, result: CallResult) -> list[m.Report]:
        one, lane.running = lane.running, None
        assert one is not None, "only computations run in a lane"
        self._runs += 1
        self._run_s += result.seconds
        self._expected_s += EXPECTED_GAIN * (result.seconds - self._expected_s)
        self._waiting.count_work(one.request.requester.owner, result.seconds - one.charged_s)
        number, outcome = one.request.id, result.outcome
        if isinstance(outcome, BaseException):
            return [m.Refused(number, error_of(outcome, "computing tensors").to_wire())]
        return [m.CommandResult(number, m.ComputedTensors(outcome, result.seconds))]


def _lane_failed(lanes: int, error: InferdError) -> m.LogEvent:
    fields = {"lanes": lanes, "cause": error.message}
    return m.LogEvent("warning", "scheduler", "graph.lane_failed", fields)


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
