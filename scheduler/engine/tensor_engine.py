"""The engine of a graph: computations in lanes, in a fair order, joined where that pays.

A lane is a thread that computes; it is started when work first waits for it. Whenever a lane is
free, it takes the next request in the order, and joins those behind it whose tensors have the same
shapes, if the graph allows it and rows then take less time (`JoinCost`). If its caller has left or
its time has passed, a waiting request is dropped, and the computation of a running one is
cancelled, unless it is also that of others. A lane takes its result and begins the next computation
in its own thread, if no other thread uses the engine (`take_turn`); in between it may read
commands. So each method runs in the thread that has the turn.

While nothing else waits, the engine's own thread makes a computation that is known to be short, or
during which nothing is expected to arrive, since nothing did during the last ones; see `Standby`.
If a joined computation fails, its requests are computed one by one. The record names the requests
under way, so that the daemon knows the inputs that may have crashed or hung the process.
"""

from __future__ import annotations

import math
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ...backends import Computation, GraphModel, InferdError, ModelSpec
from ...backends.errors import BackendError, Timeout, UnsupportedOperation, error_of
from ...backends.joining import JoinedComputation, JoinKey, key_of, rows_of
from ...backends.recent_dict import RecentDict
from ...backends.tensors import NamedTensor
from .. import messages as m
from ..call_thread import CallResult, CallThread
from ..owner import Priority, Requester
from ..policy.join_cost import JoinCost
from ..policy.order import TextOrder
from ..reasoning import EndOutcome
from ..record import (
    PAGE_COUNTERS,
    PAGE_GAUGES,
    TENSOR_COUNTS,
    TENSOR_GAUGES,
    ActivityKind,
    MetricsPage,
    Recorder,
)
from .affinity import Affinity
from .mapped_buffers import MappedBuffers, place_outputs
from .standby import Standby

SHORT_S = 3e-4
"""The engine's own thread makes computations that take less: CPU time, where it is known. To hand
one over, to a thread on a core with other data in its caches, takes about half as long, and the way
through the daemon longer.
"""
SINGLE_RUNS_MIN = 8
"""If nothing arrived during so many computations, the engine's thread also makes long ones, except
for the class `low`. A request that arrives during one waits for up to twice `standby.CHECK_S`.
"""
SHORT_RUNS_MIN, SHORT_RUNS_MAX = 8, 16
"""So many computations of the same shapes have to be short before, and the most that count."""
LONG_RUN_WEIGHT = 4
"""As many short computations a long one cancels."""
SHAPES_MAX = 64
"""The shapes whose short computations are counted."""
EXPECTED_GAIN = 1 / 8
"""Weight of the last computation in the expected time of the next one."""
FULL_ROWS = 8
"""Where joining pays, rows are not divided among lanes into smaller computations: from about this
number on, the computation of the rows takes longer than reading the weights.
"""
LOW_NICE = 5
"""The niceness of threads that compute requests of the class `low`: of a core that another thread
needs too, such as that of another graph for an urgent request, they get a quarter.
"""
HELD_S_MAX = 0.005
"""Fewer rows wait for a joined computation that is expected to take no longer than this, and no
longer than this after its begin.
"""
JOINED_BYTES_MAX = 16 << 20
"""The most bytes of the inputs of a joined computation, which are copied."""


Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The dimensions of each input."""


@dataclass(slots=True, eq=False)
class TensorWork:
    """A *request* whose inputs fit, with the time by which its *computation* must begin. It can be
    joined with others of the same *key*; without one it cannot.
    """

    request: m.ComputeTensors
    computation: Computation
    arrived_at: float
    begin_by: float
    key: JoinKey | None = None
    rows: int = 1
    places: Mapping[str, memoryview] = field(default_factory=dict)
    """The parts of buffers into which outputs are written, by their names."""
    charged_s: float = 0.0
    """The time that was charged to its owner when it began."""
    is_dropped: bool = False

    @property
    def size_bytes(self) -> int:
        """The bytes of its inputs."""
        return sum(len(tensor.data) for _, tensor in self.computation.inputs)

    def place_outputs(self, outputs: list[NamedTensor]) -> list[NamedTensor] | InferdError:
        """Write outputs into their places, and return all, or the error of one that does not fit;
        others that were computed with it are not concerned.
        """
        try:
            return place_outputs(outputs, self.places) if self.places else outputs
        except InferdError as exc:
            return exc


@dataclass(slots=True, eq=False)
class Run:
    """The computation of one or more requests, which began at a time on the record's clock."""

    works: Sequence[TensorWork]
    joined: JoinedComputation | None
    began_at: float
    rows: int
    """The rows of all requests."""
    cpu_s: float = 0.0
    """The CPU time of its thread."""
    step_s: float = 0.0
    """The CPU time of the lane's thread since the computation before, in which it took the result
    and began this one; 0 in another thread.
    """

    @property
    def is_low(self) -> bool:
        """Whether all requests are of the class `low`."""
        return all(work.request.requester.priority == Priority.LOW for work in self.works)

    @property
    def is_alone(self) -> bool:
        """Whether no other one may run beside it."""
        return self.works[0].request.alone

    def compute(self, lane: int) -> list[list[NamedTensor] | InferdError]:
        """Return the outputs of each request, or its error."""
        before_s = time.thread_time()
        try:
            if self.joined is not None:
                found = self.joined.run(lane)
            else:
                found = [self.works[0].computation.run(lane)]
        finally:
            self.cpu_s = time.thread_time() - before_s
        return [work.place_outputs(one) for work, one in zip(self.works, found, strict=True)]

    @property
    def is_dropped(self) -> bool:
        """Whether all its requests were dropped."""
        return all(work.is_dropped for work in self.works)

    def cancel(self) -> None:
        """Cancel the computation."""
        (self.joined or self.works[0].computation).cancel()


class Lane:
    """The threads that compute in the lane *number* of a model, and the computation in it.

    One of the *threads* is for requests of the class `low`, and has a niceness; at most one of them
    computes.
    """

    def __init__(
        self,
        number: int,
        end_run: Callable[[Lane, CallResult], bool],
        seconds: Callable[[], float],
    ):
        take = partial(end_run, self)
        self.threads = (
            CallThread(f"lane-{number}", seconds, take_result=take),
            CallThread(f"low-lane-{number}", seconds, LOW_NICE, take_result=take),
        )
        self.run: Run | None = None
        self._number = number
        self._ended_at_s: list[float | None] = [None, None]
        """The CPU time of each thread when its last computation had ended."""

    def begin(self, *, is_low: bool) -> None:
        """Begin the computation in its thread."""
        if is_low:
            with suppress(BackendError):  # no more threads now: the other one computes
                self.threads[1].queue_call(partial(self._compute_in_thread, 1))
                return
        self.threads[0].queue_call(partial(self._compute_in_thread, 0))

    def _compute_in_thread(self, thread: int) -> list[list[NamedTensor] | InferdError]:
        before_s = self._ended_at_s[thread]
        if before_s is not None and self.run is not None:
            self.run.step_s = time.thread_time() - before_s
        try:
            return self.compute()
        finally:
            self._ended_at_s[thread] = time.thread_time()

    def compute(self) -> list[list[NamedTensor] | InferdError]:
        """Return the outputs of each request of the computation, or its error."""
        assert self.run is not None, "it has a computation"
        return self.run.compute(self._number)


class TensorEngine:
    """Computes the graph of *spec*. Like `Engine`, it shares nothing: commands come in, reports go
    out. With *joins*, computations may be joined, up to `spec.batch_max` rows.

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
        joins: bool = False,
    ):
        self.quit = False
        self.recorder = Recorder(record)
        self._model, self._spec, self._seconds = model, spec, seconds
        self.standby: Standby | None = None
        """Lets the engine's thread make computations."""
        self.take_turn: Callable[[Lane, CallResult], bool] | None = None
        """Takes a result in the thread of its lane, and begins the next computation; returns False
        if another thread keeps the turn.
        """
        self.has_arrived: Callable[[], bool] = lambda: False
        """Returns whether there are commands to read."""
        self._single_runs = 0
        """The computations since the last one during which a request arrived."""
        self.failure: BaseException | None = None
        """The error by which a step in the thread of a lane has failed."""
        self._short_runs: RecentDict[Shapes, int] = RecentDict(SHAPES_MAX)
        """The short computations of an input, less the long ones, by the shapes of its tensors."""
        self._is_recorded = False
        """Whether the record has the present activity."""
        self._joins = joins and spec.batch_max > 1
        self._waiting: TextOrder[TensorWork] = TextOrder(strict=strict)
        self._again: deque[TensorWork] = deque()
        """Requests of a joined computation that has failed, which come next, one by one."""
        self._buffers = MappedBuffers()
        self._affinity = Affinity()
        self._cost = JoinCost()
        self._rows_waiting: defaultdict[JoinKey, int] = defaultdict(int)
        self._held_until: float | None = None
        """When the next request begins at the latest, if it waits for others to join."""
        self._deadlines: dict[int, float] = {}
        """By request, the times by which waiting computations must begin, if they have any."""
        self._first_deadline = math.inf
        """The first of these times, or an earlier one."""
        self._running: list[Run] = []
        """The computations under way, in the order of their begin."""
        self._lanes: list[Lane] = []
        self._lane_threads: dict[int, tuple[Lane, CallThread]] = {}
        """By their descriptors."""
        # The threads of an engine have their own niceness.
        self._yields_cores = spec.lane_threads == 1 and model.computes_in_caller
        self._ended = select.epoll()
        """Readable once a computation has ended in one of them."""
        self._lanes_max = spec.lanes
        self._lanes_used_max, self._threads = self._lanes_max, spec.threads
        """The lanes for which there are cores now."""
        self._page = MetricsPage(record)
        self._counts = dict.fromkeys(TENSOR_COUNTS, 0)
        self._batches: dict[int, list[int]] = {}
        """Of computations of so many inputs, their number and microseconds; failed ones do not
        count.
        """
        self._queue_us = 0
        """The time for which inputs have waited until their computation began."""
        self._computed_at = 0.0
        """The date of the last computation, in seconds since 1970; 0 without one."""
        self._changes = 0
        """The changes of counters and gauges."""
        self._expected_s = 0.0

    def start(self) -> None:
        """Start the first lane.

        :raises BackendError: the system has no more threads.
        """
        self._start_lane()
        self._publish()

    def fileno(self) -> int:
        """Return a descriptor that is readable once a computation has ended."""
        return self._ended.fileno()

    @property
    def is_computing(self) -> bool:
        """Whether a computation is under way."""
        return bool(self._running)

    @property
    def is_full(self) -> bool:
        """Whether all lanes compute, while as many requests wait for them."""
        if len(self._running) < self._lanes_used_max:
            return False
        computed = sum([len(run.works) for run in self._running])
        return len(self._waiting) + len(self._again) >= computed

    def advance(self, commands: Iterable[m.Command], own: Lane | None = None) -> list[m.Report]:
        """Carry out *commands*, take results, begin computations; return the reports. The lane
        *own*, in whose thread this runs, is the first one that computes.
        """
        reports: list[m.Report] = []
        self._is_recorded = False
        dropped: set[int] = set()
        for command in commands:
            if isinstance(command, m.Quit):
                self.quit = True
            elif isinstance(command, m.DropInput):
                dropped.add(command.request)
            else:
                reports += self._handle_command(command)
        if dropped:
            self._drop_requests(dropped)
        for number, _ in self._ended.poll(0) if self._running else ():
            lane, thread = self._lane_threads[number]
            for result in thread.results():
                reports += self.take_result(lane, result)
        reports += self._expire_waiting()
        reports += self._begin_waiting(own)
        if not self._is_recorded:
            self._record()
        self._publish()
        return reports

    def _end_run(self, lane: Lane, result: CallResult) -> bool:
        return self.take_turn is not None and self.take_turn(lane, result)

    def wait_s_max(self) -> float | None:
        """Return how many seconds the next call may wait for commands; None: no limit."""
        now = self._seconds()
        ends = [self._first_deadline - now] if self._deadlines else []
        if self._held_until is not None:
            ends.append(self._held_until - now)
        if (due_s := self._page.due_in(now, self._changes)) is not None:
            ends.append(due_s)
        return max(0.0, min(ends)) if ends else None

    def close(self) -> None:
        """Cancel the computations under way and wait for their end; the model is freed next."""
        self.cancel_running()
        if self.standby is not None:
            self.standby.close()
        for _, thread in self._lane_threads.values():
            thread.close()
        self._ended.close()

    def cancel_running(self) -> None:
        """Cancel the computations under way."""
        for run in self._running:
            run.cancel()

    # Commands.

    def _handle_command(self, command: m.Command) -> Sequence[m.Report]:
        match command:
            case m.ComputeTensors():
                return self._add_request(command)
            case m.MapBuffer():
                self._buffers.map_buffer(command)
                return []
            case m.UnmapBuffer(buffer):
                self._buffers.unmap_buffer(buffer)
                return []
            case m.SetThreads(threads, first):
                self._use_threads(threads, first)
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
            inputs, buffers = request.inputs, self._buffers
            if request.parts:
                inputs = buffers.with_inputs(inputs, request.parts)
            places = {part.name: buffers.part_of(part) for part in request.places}
            computation = self._model.new_computation(inputs)
        except InferdError as exc:
            return [m.Refused(request.id, exc.to_wire())]
        if self._running:
            self._single_runs = 0
        begin_by = self._seconds() + request.wait_s if request.wait_s else math.inf
        if request.wait_s:
            self._deadlines[request.id] = begin_by
            self._first_deadline = min(self._first_deadline, begin_by)
        work = TensorWork(request, computation, self._seconds(), begin_by, places=places)
        self._changes += 1
        if self._joins and (rows := rows_of(computation.inputs)):
            work.rows = rows
            if not request.alone:
                work.key = key_of(computation.inputs)
                self._rows_waiting[work.key] += rows
        self._waiting.add_request(request.requester, work)
        return []

    def _drop_requests(self, numbers: set[int]) -> None:
        self._remove_waiting(lambda work: work.request.id in numbers)
        self._again = deque(work for work in self._again if work.request.id not in numbers)
        for run in self._running:
            for work in run.works:
                if work.request.id in numbers:
                    work.is_dropped = True
                    if run.is_dropped:
                        run.cancel()

    def _use_threads(self, threads: int, first: int) -> None:
        """Compute in as many lanes, or on as many cores if a lane has more threads."""
        lane_threads = self._spec.lane_threads
        self._lanes_used_max = max(1, min(threads // lane_threads, self._lanes_max))
        self._threads = min(threads, self._spec.threads)
        if lane_threads > 1:
            self._affinity.use_cores(threads if threads < lane_threads else None, first)

    def _statistics(self) -> dict[str, Any]:
        return {
            **self._counts,
            **self._gauges(),
            "lanes": self._lanes_max,
            "threads": self._threads,
            "queue_us": self._queue_us,
            "batches": [[inputs, *counts] for inputs, counts in sorted(self._batches.items())],
            "computed_at": self._computed_at,
        }

    def _gauges(self) -> dict[str, int]:
        waiting = len(self._waiting) + len(self._again)
        running = sum(len(run.works) for run in self._running)
        return dict(zip(TENSOR_GAUGES, (waiting, running), strict=True))

    def _publish(self) -> None:
        """Write the metrics if they have changed and are due."""
        now = self._seconds()
        due_s = self._page.due_in(now, self._changes)
        if due_s is not None and due_s <= 0:
            values = dict.fromkeys((*PAGE_COUNTERS, *PAGE_GAUGES), 0) | self._counts
            self._page.write_page(now, self._changes, values | self._gauges())

    # Computations.

    def _expire_waiting(self) -> list[m.Report]:
        """Refuse the requests that have waited for too long."""
        if not self._deadlines or (now := self._seconds()) <= self._first_deadline:
            return []
        late = self._remove_waiting(lambda work: work.begin_by < now)
        self._first_deadline = min(self._deadlines.values(), default=math.inf)
        return [m.Refused(w.request.id, _timeout(w.request.wait_s).to_wire()) for w in late]

    def _remove_waiting(self, is_removed: Callable[[TensorWork], bool]) -> list[TensorWork]:
        """Remove and return the waiting requests for which *is_removed* is true."""
        removed: list[TensorWork] = []

        def remove(work: TensorWork) -> bool:
            if not is_removed(work):
                return False
            removed.append(work)
            return True

        self._waiting.remove_requests(remove)
        for work in removed:
            self._note_removed(work)
        return removed

    def _note_removed(self, work: TensorWork) -> None:
        self._changes += 1
        self._deadlines.pop(work.request.id, None)
        if work.key is not None:
            self._rows_waiting[work.key] -= work.rows
            if not self._rows_waiting[work.key]:
                del self._rows_waiting[work.key]

    def _begin_waiting(self, own: Lane | None = None) -> list[m.Report]:
        """Begin computations while lanes are free; return the reports of those that have ended.
        The lane *own*, in whose thread this runs, is the first one.
        """
        reports: list[m.Report] = []
        self._held_until = None
        running = self._running
        while not self.quit:
            requester = None if self._again else self._waiting.next_requester()
            if requester is not None:
                first = self._waiting.first_request(requester)
            elif self._again:
                first = self._again[0]
            else:
                break
            if len(running) >= self._lanes_used_max or (
                running and (first.request.alone or any(run.is_alone for run in running))
            ):
                break
            held_until = self._hold(first, running)
            if held_until is not None and held_until > self._seconds():
                self._held_until = held_until
                break
            try:
                lane = own if own is not None and own.run is None else self._free_lane()
            except InferdError as exc:
                self._lanes_max = self._lanes_used_max = len(self._lanes)
                return [*reports, _lane_failed(self._lanes_max, exc)]
            works = self._take_works(requester, self._lanes_used_max - len(running))
            may_compute = self.standby is not None and own is None and not running
            self._begin_run(lane, works)
            assert lane.run is not None, "it has begun"
            is_low = self._yields_cores and lane.run.is_low
            if may_compute and self._is_inline(works, is_low=is_low):
                assert self.standby is not None
                reports += self.take_result(lane, self.standby.make_call(lane.compute))
                if self.has_arrived():
                    self._single_runs = 0
                self._is_recorded = False
            else:
                lane.begin(is_low=is_low)
        return reports

    def _hold(self, first: TensorWork, running: Sequence[Run]) -> float | None:
        """Return until when the next request waits for others to join, though a lane is free, or
        None: fewer rows wait than are computed at once already, and those soon leave their lane.
        Two small computations take more time of the cores than one of both.
        """
        if first.key is None or self._again or not running:
            return None
        joined = [run for run in running if run.joined and run.works[0].key == first.key]
        largest = max(joined, key=lambda run: run.rows, default=None)
        if largest is None or self._rows_waiting[first.key] >= min(largest.rows, FULL_ROWS):
            return None
        expected_s = self._cost.expected_s(first.key, largest.rows)
        is_short = expected_s is not None and expected_s <= HELD_S_MAX
        return largest.began_at + HELD_S_MAX if is_short else None

    def _is_inline(self, works: Sequence[TensorWork], *, is_low: bool) -> bool:
        """Return whether the engine's thread computes *works*: one input while nothing else waits,
        that is expected to take a short time, or during which nothing is expected to arrive.
        """
        if len(works) > 1 or works[0].request.alone or len(self._waiting) or self._again:
            return False
        if self._single_runs >= SINGLE_RUNS_MIN and not is_low:
            return True
        return (self._short_runs.get(_shapes_of(works[0])) or 0) >= SHORT_RUNS_MIN

    def _take_works(self, requester: Requester | None, lanes_free: int) -> list[TensorWork]:
        """Remove and return the first request of *requester*, and those to join with it: of the
        rows that wait, those that the other free lanes leave, but not fewer than `FULL_ROWS`.
        Without a *requester*, return the next one of a joined computation that has failed.
        """
        if requester is None:
            return [self._again.popleft()]
        first = self._waiting.first_request(requester)
        if first.key is None:
            return [self._take_first(requester)]
        waiting = self._rows_waiting[first.key]
        share = max(-(-waiting // lanes_free), min(waiting, FULL_ROWS))
        available = max(first.rows, min(share, self._spec.batch_max))
        rows_left = 0
        if available > first.rows:
            rows_left = self._cost.rows_to_join(first.key, first.rows, available) - first.rows
        self._take_first(requester)
        if not rows_left:
            return [first]
        works, bytes_left = [first], JOINED_BYTES_MAX - first.size_bytes
        while rows_left > 0:
            fits = partial(self._fits, first.key, rows_left, bytes_left)
            found = self._waiting.next_requester(fits)
            if found is None:
                break
            works.append(work := self._take_first(found))
            rows_left, bytes_left = rows_left - work.rows, bytes_left - work.size_bytes
        return works

    def _fits(self, key: JoinKey, rows_max: int, bytes_max: int, requester: Requester) -> bool:
        """Return whether the first request of *requester* can be joined with others of *key*."""
        work = self._waiting.first_request(requester)
        return work.key == key and work.rows <= rows_max and work.size_bytes <= bytes_max

    def _take_first(self, requester: Requester) -> TensorWork:
        """Remove the first request of *requester*, and charge the time that it is expected to take,
        so that other users precede the next one.
        """
        work = self._waiting.remove_first(requester)
        self._note_removed(work)
        work.charged_s = self._expected_s
        self._waiting.count_work(requester.owner, work.charged_s)
        return work

    def _free_lane(self) -> Lane:
        lane = next((one for one in self._lanes if one.run is None), None)
        return lane or self._start_lane()

    def _start_lane(self) -> Lane:
        number = len(self._lanes)
        if number:
            self._model.add_lane()
        lane = Lane(number, self._end_run, self._seconds)
        lane.threads[0].start()
        for thread in lane.threads:
            self._ended.register(thread.fileno(), select.EPOLLIN)
            self._lane_threads[thread.fileno()] = lane, thread
        self._lanes.append(lane)
        return lane

    def _begin_run(self, lane: Lane, works: Sequence[TensorWork]) -> None:
        joined = None
        if len(works) > 1:
            joined = JoinedComputation(self._model, [work.computation for work in works])
        # The daemon measures from here whether the computation hangs.
        rows = sum([work.rows for work in works])
        lane.run = Run(works, joined, time.monotonic(), rows)
        self._running.append(lane.run)
        now = self._seconds()
        waits_s = [now - work.arrived_at for work in works]
        self._queue_us += round(1e6 * sum(waits_s))
        self._page.count_run(waits_s)
        self._record()

    def _record(self) -> None:
        """Record the requests under way, those of the oldest computation first. An idle record also
        says that the commands were read, which the daemon expects.
        """
        self._is_recorded = True
        running = self._running
        if running:
            ids = [work.request.id for run in running for work in run.works]
            oldest, at = len(running[0].works), running[0].began_at
            self.recorder.record_activity(ActivityKind.PROMPT, ids, oldest=oldest, at=at)
        else:
            self.recorder.record_activity(ActivityKind.IDLE)

    def take_result(self, lane: Lane, result: CallResult) -> list[m.Report]:
        """Take the *result* of the computation in a lane, and return its reports."""
        run, lane.run = lane.run, None
        assert run is not None, "only computations run in a lane"
        self._running.remove(run)
        works, outcome = run.works, result.outcome
        failed = isinstance(outcome, BaseException)
        self._changes += 1
        self._single_runs += 1
        self._counts["compute_runs"] += 1
        self._counts["compute_us"] += round(1e6 * result.seconds)
        # Beside busy processes, the time of one computation says little about the next one's.
        in_thread = self._spec.lane_threads == 1 and self._model.computes_in_caller
        cost_s = run.cpu_s if in_thread else result.seconds
        key = works[0].key
        if key is not None and (not failed or (run.joined is not None and not run.is_dropped)):
            # Steps take longer than short computations, and joined ones have fewer of them.
            self._cost.note_run(key, run.rows, math.inf if failed else cost_s + run.step_s)
        if len(works) == 1:
            shapes, is_short = _shapes_of(works[0]), not failed and cost_s < SHORT_S
            count = (self._short_runs.get(shapes) or 0) + (1 if is_short else -LONG_RUN_WEIGHT)
            self._short_runs[shapes] = max(0, min(count, SHORT_RUNS_MAX))
        for work in works:
            seconds = result.seconds * work.rows / run.rows
            gain = max(EXPECTED_GAIN, 1 / self._counts["compute_runs"])
            self._expected_s += gain * (seconds - self._expected_s)
            owner = work.request.requester.owner
            self._waiting.count_work(owner, seconds - work.charged_s)
            work.charged_s = 0.0
        if not failed:
            misplaced = sum(isinstance(outputs, InferdError) for outputs in outcome)
            self._counts["compute_failed"] += misplaced
            self._counts["computed"] += len(works) - misplaced
            counts = self._batches.setdefault(len(works), [0, 0])
            counts[0] += 1
            counts[1] += round(1e6 * result.seconds)
            self._computed_at = time.time()
            return [
                _answer_of(work, outputs, result.seconds * work.rows / run.rows)
                for work, outputs in zip(works, outcome, strict=True)
                if not work.is_dropped
            ]
        if self.quit or self.failure is not None:
            return []  # the process has cancelled it: the daemon lets another one compute it
        if run.joined is not None:
            self._again += (work for work in works if not work.is_dropped)
            return []
        self._counts["compute_failed"] += not works[0].is_dropped
        error = error_of(outcome, "computing tensors")
        return [m.Refused(works[0].request.id, error.to_wire())]


def _shapes_of(work: TensorWork) -> Shapes:
    return tuple([tensor.dimensions for _, tensor in work.computation.inputs])


def _answer_of(
    work: TensorWork, outputs: list[NamedTensor] | InferdError, seconds: float
) -> m.Report:
    if isinstance(outputs, InferdError):
        return m.Refused(work.request.id, outputs.to_wire())
    return m.CommandResult(work.request.id, m.ComputedTensors(outputs, seconds))


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
