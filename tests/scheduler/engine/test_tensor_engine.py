"""The engine of a graph: order, time limits, cancelled computations, and the record."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest

from inferd.backends import GraphModel, ModelSpec, load_model
from inferd.backends.errors import OutOfMemory
from inferd.backends.tensors import TENSOR_TYPES, NamedTensor, Tensor
from inferd.scheduler import messages as m
from inferd.scheduler import worker
from inferd.scheduler.engine import tensor_engine
from inferd.scheduler.engine.standby import Standby
from inferd.scheduler.engine.tensor_engine import (
    FULL_ROWS,
    HELD_S_MAX,
    LOW_NICE,
    Lane,
    TensorEngine,
)
from inferd.scheduler.owner import Owner, Priority, Requester
from inferd.scheduler.policy.order import AGEING_S
from inferd.scheduler.record import (
    PAGE_COUNTERS,
    TENSOR_COUNTS,
    TENSOR_GAUGES,
    WRITTEN_S,
    ActivityKind,
    MetricsPage,
    create_record,
    histograms_of,
)
from inferd.scheduler.worker import SocketLink
from inferd.wire.frames import ANY_LENGTH, FrameReader, pack_frame
from tests.onnx_graphs import lookup, loop, loop_over_rows

FOREVER = 1 << 62


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """An engine with its reports."""

    def __init__(self, engine: TensorEngine):
        self.engine = engine
        self.engine.start()
        self.reports: list[m.Report] = []

    def send(self, *commands: m.Command) -> None:
        self.reports += self.engine.advance(commands)

    def wait_reports(self, count: int) -> list[m.Report]:
        while len(self.reports) < count:
            select.select([self.engine.fileno()], [], [])
            self.send()
        return self.reports

    def under_way(self) -> tuple[int, ...]:
        return self.engine.recorder.read_activity().ids

    def wait_other(self, *ids: int) -> tuple[int, ...]:
        """Wait until other requests than *ids* are under way."""
        while self.under_way() == ids:
            select.select([self.engine.fileno()], [], [])
            self.send()
        return self.under_way()

    def runs(self) -> int:
        self.send(m.Stats(0))
        report = self.reports.pop()
        assert isinstance(report, m.CommandResult)
        return int(report.value["compute_runs"])


class Bench(Driver):
    """An engine with a graph that copies its input as often as a request says."""

    def __init__(self, folder: Path, lanes: int = 1):
        (folder / "loop.onnx").write_bytes(loop())
        path = str(folder / "loop.onnx")
        spec = ModelSpec(name="loop", backend="onnx", path=path, threads=lanes, lanes=lanes)
        self.clock = Clock()
        self.model = cast(GraphModel, load_model(spec, lambda _: True))
        super().__init__(TensorEngine(self.model, spec, self.clock))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.engine.close()


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, 2)
    yield made
    made.engine.close()


def inputs(times: int, value: float = 1.0) -> list[NamedTensor]:
    return [
        ("x", Tensor(struct.pack("f", value), (1,), TENSOR_TYPES["fp32"])),
        ("times", Tensor(struct.pack("q", times), (), TENSOR_TYPES["i64"])),
    ]


def request(
    number: int,
    times: int = 1,
    user: int = 1,
    wait_s: float = 0.0,
    priority: int = 1,
    *,
    alone: bool = False,
) -> m.ComputeTensors:
    requester = Requester(Owner(user), Priority(priority))
    return m.ComputeTensors(number, inputs(times, number), requester, wait_s, alone)


def error_of(report: m.Report) -> str:
    assert isinstance(report, m.Refused)
    return report.error["name"]


def output_of(report: m.Report) -> tuple[int, float]:
    assert isinstance(report, m.CommandResult)
    [(name, tensor)] = report.value.outputs
    assert name == "y"
    return report.id, struct.unpack("f", tensor.data)[0]


def test_outputs_are_reported_and_the_record_is_idle_afterwards(bench: Bench) -> None:
    bench.send(request(7, 3))
    [report] = bench.wait_reports(1)
    assert output_of(report) == (7, 7.0)
    assert bench.engine.recorder.read_activity().kind is ActivityKind.IDLE


def test_the_record_names_the_request_that_is_computed(bench: Bench) -> None:
    bench.send(request(7, FOREVER), request(8))
    activity = bench.engine.recorder.read_activity()
    assert (activity.kind, activity.ids) == (ActivityKind.PROMPT, (7,))
    assert not activity.beside_text
    bench.send(m.Queue(9))
    assert bench.engine.recorder.read_activity() == activity, "the run began then"


def test_a_dropped_computation_is_cancelled_or_never_begins(bench: Bench) -> None:
    bench.send(request(1, FOREVER), request(2, FOREVER), request(3))
    bench.send(m.DropInput(2), m.DropInput(1))
    one, three = bench.wait_reports(2)
    assert error_of(one) == "Cancelled"
    assert output_of(three) == (3, 3.0)


def test_a_computation_that_waits_too_long_is_refused_while_another_one_runs(bench: Bench) -> None:
    assert bench.engine.wait_s_max() is None
    bench.send(request(1, FOREVER), request(2, wait_s=5.0), request(3, wait_s=9.0))
    assert bench.engine.wait_s_max() == WRITTEN_S, "the metrics are written then"
    bench.clock.now = 1.0
    bench.send()
    assert bench.engine.wait_s_max() == 4.0
    bench.clock.now = 5.5
    bench.send()
    [late] = bench.reports
    assert isinstance(late, m.Refused) and late.id == 2
    assert (late.error["name"], late.error["data"]) == ("Timeout", {"timeout": "queue"})
    assert bench.engine.wait_s_max() == 3.5
    bench.clock.now = 6.0
    bench.send(m.DropInput(3))
    assert bench.engine.wait_s_max() is None


def test_users_take_turns_and_classes_order_those_of_one_user(bench: Bench) -> None:
    bench.send(request(1, FOREVER, user=1))
    bench.send(*(request(n, 2000, user=1) for n in (2, 3, 4)), request(5, 2000, user=2))
    bench.engine._waiting.count_work(Owner(1), AGEING_S / 2)  # the other user has none
    bench.send(request(6, user=2, priority=Priority.HIGH), m.DropInput(1))
    reports = bench.wait_reports(6)
    order = [report.id for report in reports if isinstance(report, m.CommandResult)]
    assert order[:2] == [6, 5] and order[2:] == [2, 3, 4]


def test_inputs_that_do_not_fit_are_refused_without_waiting(bench: Bench) -> None:
    bench.send(request(1, FOREVER), m.ComputeTensors(2, inputs(1)[:1]))
    [refused] = bench.reports
    assert error_of(refused) == "InvalidArgument"


def test_commands_on_texts_are_refused_and_those_on_sessions_have_empty_answers(
    bench: Bench,
) -> None:
    bench.send(
        m.Tokenize(1, b"hi", special=False, bos=False),
        m.ChatPrompt(2, [], ""),
        m.Queue(3),
        m.DeleteSessionStates(4, 0, "s"),
        m.ExportState(5, 0, "s", (), b""),
        m.Cancel(6),
        m.SetThreads(7),
    )
    assert [error_of(report) for report in bench.reports[:2]] == ["UnsupportedOperation"] * 2
    assert bench.reports[2:] == [
        m.CommandResult(3, []),
        m.CommandResult(4, None),
        m.CommandResult(5, ""),
    ]


def test_the_statistics_count_computations(bench: Bench) -> None:
    bench.send(request(1), request(2, FOREVER), request(3))
    bench.wait_reports(1)
    bench.send(m.Stats(4))
    report = bench.reports[1]
    assert isinstance(report, m.CommandResult)
    assert report.value.pop("computed_at") > 1e9
    assert report.value.pop("batches") == [[1, 1, 0]], "the clock stands still"
    assert report.value == {
        **{"computed": 1, "compute_failed": 0, "compute_runs": 1, "compute_us": 0, "queue_us": 0},
        **{"computations_waiting": 1, "computations_running": 1, "lanes": 1, "threads": 1},
    }


def test_metrics_are_written_when_they_are_due(tmp_path: Path) -> None:
    record = create_record()
    rows = Rows(tmp_path, record=record)
    page = MetricsPage(record)
    os.close(record)
    rows.occupy(2)
    rows.send(row_request(3), row_request(4))
    while page.read_gauges()["computations_waiting"] != 2:  # another sample is not due yet
        select.select([], [], [], rows.engine.wait_s_max())
        rows.send()
    rows.send(m.DropInput(2))
    rows.wait_reports(3)
    while (wait_s := rows.engine.wait_s_max()) is not None:
        select.select([], [], [], wait_s)
        rows.send()
    counts = dict(zip(PAGE_COUNTERS, page.read_counters(), strict=False))
    assert [counts[name] for name in TENSOR_COUNTS[:3]] == [3, 0, 3]
    assert counts["compute_us"] > 0
    assert [page.read_gauges()[name] for name in TENSOR_GAUGES] == [0, 0]
    found = histograms_of(page.read_counters())
    assert found["inputs_per_run"].counts[:3] == [2, 1, 0]
    assert sum(found["queue_s"].counts) == 4
    rows.engine.close()


def test_lanes_compute_at_once_and_one_of_them_can_be_cancelled(lanes: Bench) -> None:
    lanes.send(request(1, FOREVER), request(2, FOREVER), request(3, FOREVER), request(4))
    assert lanes.under_way() == (1, 2)
    lanes.send(m.DropInput(2))
    [two] = lanes.wait_reports(1)
    assert error_of(two) == "Cancelled"
    assert lanes.under_way() == (1, 3)
    lanes.send(m.DropInput(1))
    one, four = lanes.wait_reports(3)[1:]
    assert error_of(one) == "Cancelled"
    assert output_of(four) == (4, 4.0)
    assert lanes.under_way() == (3,)


def test_the_record_shows_for_how_long_the_oldest_computation_has_run(lanes: Bench) -> None:
    lanes.send(request(1, FOREVER))
    began_at = lanes.engine.recorder.read_activity().at
    for number in (2, 3):
        lanes.send(request(number, FOREVER))
        activity = lanes.engine.recorder.read_activity()
        assert (activity.ids, activity.oldest, activity.at) == ((1, 2), 1, began_at)
    lanes.send(m.DropInput(1))
    lanes.wait_reports(1)
    activity = lanes.engine.recorder.read_activity()
    assert (activity.ids, activity.oldest) == ((2, 3), 1)
    assert activity.at > began_at


def test_no_more_computations_begin_than_there_are_cores(lanes: Bench) -> None:
    lanes.send(m.SetThreads(1), request(1, FOREVER), request(2, FOREVER), request(3))
    assert lanes.under_way() == (1,)
    lanes.send(m.SetThreads(9))
    assert lanes.under_way() == (1, 2)
    lanes.send(m.SetThreads(1), m.DropInput(1))
    lanes.wait_reports(1)
    assert lanes.under_way() == (2,), "the third waits for the only core"
    lanes.send(m.DropInput(2))
    assert output_of(lanes.wait_reports(3)[2]) == (3, 3.0)


def test_a_suspect_is_computed_beside_no_other_input(lanes: Bench) -> None:
    lanes.send(request(1, FOREVER), request(2, FOREVER, alone=True), request(3))
    assert lanes.under_way() == (1,)
    lanes.send(m.DropInput(1))
    lanes.wait_reports(1)
    assert lanes.under_way() == (2,), "the third waits for the suspect"
    lanes.send(m.DropInput(2))
    assert output_of(lanes.wait_reports(3)[2]) == (3, 3.0)


def test_users_share_the_lanes_by_the_time_that_their_computations_are_expected_to_take(
    lanes: Bench,
) -> None:
    lanes.send(request(1, user=1))
    lanes.wait_reports(1)
    lanes.engine._expected_s = 0.5  # as of longer ones
    lanes.send(request(2, FOREVER, user=3), request(3, FOREVER, user=3))
    lanes.send(*(request(n, FOREVER, user=4) for n in (4, 5)), request(6, FOREVER, user=5))
    lanes.send(m.DropInput(2), m.DropInput(3))
    lanes.wait_reports(3)
    assert lanes.under_way() == (4, 6), "the first computation of a user precedes the second one"


@pytest.fixture
def niceness(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], int]:
    """The niceness of the threads that compute, by their requests, above that of this process."""
    found: dict[tuple[int, ...], int] = {}
    compute = Lane.compute

    def note_and_compute(lane: Lane) -> object:
        assert lane.run is not None
        ids = tuple(work.request.id for work in lane.run.works)
        own, first = threading.get_native_id(), os.getpid()
        found[ids] = os.getpriority(os.PRIO_PROCESS, own) - os.getpriority(os.PRIO_PROCESS, first)
        return compute(lane)

    monkeypatch.setattr(Lane, "compute", note_and_compute)
    return found


def test_requests_of_the_class_low_are_computed_in_threads_that_yield_their_cores(
    lanes: Bench, niceness: dict[tuple[int, ...], int]
) -> None:
    for number, priority in enumerate(Priority):
        lanes.send(request(number, priority=priority))
        lanes.wait_reports(number + 1)
    assert niceness == {(0,): LOW_NICE, (1,): 0, (2,): 0, (3,): 0}


def test_without_another_thread_requests_of_the_class_low_are_computed_in_that_of_the_others(
    lanes: Bench, niceness: dict[tuple[int, ...], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith("low-lane"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    lanes.send(request(1, priority=Priority.LOW))
    assert output_of(lanes.wait_reports(1)[0]) == (1, 1.0)
    assert niceness == {(1,): 0}


class FewThreads:
    """A model that has no further lane."""

    def __init__(self, model: GraphModel):
        self.new_computation = model.new_computation
        self.computes_in_caller = model.computes_in_caller

    def add_lane(self) -> None:
        raise OutOfMemory("there is too little memory for a lane")


class Rows(Driver):
    """An engine that joins requests, and has computed one. Its graph copies each row of `x` as
    often as the greatest of `times` says.
    """

    def __init__(self, folder: Path, batch_max: int = 32, lanes: int = 1, record: int = -1):
        (folder / "rows.onnx").write_bytes(loop_over_rows(1))
        path = str(folder / "rows.onnx")
        spec = ModelSpec(
            name="rows", backend="onnx", path=path, threads=lanes, lanes=lanes, batch_max=batch_max
        )
        super().__init__(joining_engine(spec, record))
        self.send(row_request(1))
        self.wait_reports(1)  # the time of a single row is known
        self.reports.clear()

    def occupy(self, number: int = 1) -> None:
        """Begin a computation without an end, so that later requests wait."""
        self.send(row_request(number, FOREVER))


def joining_engine(spec: ModelSpec, record: int = -1) -> TensorEngine:
    model = cast(GraphModel, load_model(spec, lambda _: True))
    return TensorEngine(model, spec, record=record, joins=True)


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    made = Rows(tmp_path)
    yield made
    made.engine.close()


def row_inputs(times: int, *values: float) -> list[NamedTensor]:
    count = len(values)
    x = Tensor(struct.pack(f"{count}f", *values), (count, 1), TENSOR_TYPES["fp32"])
    number = Tensor(struct.pack("q", times) * count, (count,), TENSOR_TYPES["i64"])
    return [("x", x), ("times", number)]


def row_request(
    number: int,
    times: int = 1,
    *values: float,
    user: int = 1,
    alone: bool = False,
    priority: Priority = Priority.NORMAL,
) -> m.ComputeTensors:
    values = values or (number,)
    requester = Requester(Owner(user), priority)
    return m.ComputeTensors(number, row_inputs(times, *values), requester, 0.0, alone)


def rows_of_report(report: m.Report) -> tuple[int, list[float]]:
    assert isinstance(report, m.CommandResult), report
    [(_, tensor)] = report.value.outputs
    values = struct.unpack(f"{len(tensor.data) // 4}f", tensor.data)
    assert tensor.dimensions == (len(values), 1)
    return report.id, list(values)


def test_waiting_requests_are_computed_together_and_each_gets_its_rows(rows: Rows) -> None:
    rows.occupy()
    rows.send(row_request(2), row_request(3, 1, 7, 8), row_request(4))
    assert rows.under_way() == (1,)
    before = rows.runs()
    rows.send(m.DropInput(1))
    reports = rows.wait_reports(4)
    assert [rows_of_report(report) for report in reports[1:]] == [
        (2, [2.0]),
        (3, [7.0, 8.0]),
        (4, [4.0]),
    ]
    assert rows.runs() == before + 2
    seconds = [
        report.value.seconds for report in reports[1:] if isinstance(report, m.CommandResult)
    ]
    assert seconds[0] == seconds[2] == pytest.approx(seconds[1] / 2)


@pytest.mark.parametrize(
    ("second", "order", "nice"),
    [(Priority.LOW, (2, 3), LOW_NICE), (Priority.NORMAL, (3, 2), 0)],
)
def test_a_joined_computation_yields_its_core_if_all_its_requests_are_of_the_class_low(
    rows: Rows,
    niceness: dict[tuple[int, ...], int],
    second: Priority,
    order: tuple[int, ...],
    nice: int,
) -> None:
    rows.occupy()
    rows.send(row_request(2, priority=Priority.LOW), row_request(3, priority=second))
    rows.send(m.DropInput(1))
    rows.wait_reports(3)
    assert niceness == {(1,): 0, order: nice}


def test_the_record_names_all_requests_of_a_joined_computation(rows: Rows) -> None:
    rows.occupy()
    rows.send(row_request(2, FOREVER), row_request(3))
    rows.send(m.DropInput(1))
    rows.wait_reports(1)
    activity = rows.engine.recorder.read_activity()
    assert (activity.ids, activity.oldest) == ((2, 3), 2)
    rows.send(m.DropInput(2))
    assert rows.under_way() == (2, 3), "the other one needs the computation"
    rows.send(m.DropInput(3), row_request(4))
    assert rows_of_report(rows.wait_reports(2)[1]) == (4, [4.0]), "it was cancelled, not repeated"


def test_a_joined_computation_has_no_more_rows_than_batch_max(tmp_path: Path) -> None:
    rows = Rows(tmp_path, batch_max=3)
    rows.occupy()
    rows.send(*(row_request(n, FOREVER) for n in range(2, 8)))
    rows.send(m.DropInput(1))
    rows.wait_reports(1)
    assert rows.under_way() == (2, 3, 4)
    rows.engine.close()


def test_a_joined_computation_has_no_more_bytes_than_its_bound(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_engine, "JOINED_BYTES_MAX", 2 * 12)  # a row has 12 bytes
    rows.occupy()
    rows.send(*(row_request(n, FOREVER) for n in range(2, 8)))
    rows.send(m.DropInput(1))
    rows.wait_reports(1)
    assert rows.under_way() == (2, 3)


def test_other_shapes_and_suspects_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(loop_over_rows("m"))
    path = str(tmp_path / "g.onnx")
    rows = Driver(joining_engine(ModelSpec(name="g", backend="onnx", path=path, batch_max=8)))
    for width in (1, 2):  # the times of both shapes are known
        rows.send(wide_request(width, width, 1))
        assert rows.wait_other(width) == ()
    rows.send(*(wide_request(n, width, FOREVER) for n, width in ((3, 1), (4, 2), (5, 1), (6, 2))))
    rows.send(wide_request(7, 2, FOREVER, alone=True), wide_request(8, 2, FOREVER))
    rows.send(m.DropInput(3))
    assert rows.wait_other(3) == (4,), "the next one in line has another shape"
    rows.send(m.DropInput(5), m.DropInput(4))
    assert rows.wait_other(4) == (6,), "the next one is a suspect"
    rows.engine.close()


def wide_request(number: int, width: int, times: int, *, alone: bool = False) -> m.ComputeTensors:
    x = Tensor(bytes(4 * width), (1, width), TENSOR_TYPES["fp32"])
    count = Tensor(struct.pack("q", times), (1,), TENSOR_TYPES["i64"])
    return m.ComputeTensors(number, [("x", x), ("times", count)], Requester(Owner(1)), 0.0, alone)


def test_rows_that_wait_are_divided_among_the_free_lanes(tmp_path: Path) -> None:
    rows = Rows(tmp_path, lanes=2)
    for number in (1, 2):  # each in a lane
        rows.send(row_request(number, FOREVER))
    rows.send(*(row_request(n, FOREVER) for n in range(3, 3 + 2 * FULL_ROWS)))
    rows.engine._lanes_used_max = 0  # both lanes become free before the next begins
    rows.send(m.DropInput(1), m.DropInput(2))
    rows.wait_reports(2)
    rows.send(m.SetThreads(2))
    assert [len(run.works) for run in rows.engine._running] == [FULL_ROWS, FULL_ROWS]
    rows.engine.close()


def test_few_rows_that_wait_are_not_divided(tmp_path: Path) -> None:
    rows = Rows(tmp_path, lanes=2)
    for number in (1, 2):  # each in a lane
        rows.send(row_request(number, FOREVER))
    rows.send(*(row_request(n, FOREVER) for n in (3, 4, 5, 6)))
    rows.engine._lanes_used_max = 0
    rows.send(m.DropInput(1), m.DropInput(2))
    rows.wait_reports(2)
    rows.send(m.SetThreads(2))
    assert [len(run.works) for run in rows.engine._running] == [4]
    rows.engine.close()


def test_fewer_rows_wait_for_the_end_of_a_short_joined_computation(tmp_path: Path) -> None:
    rows, clock = Rows(tmp_path, lanes=2), Clock()
    rows.engine._seconds = clock
    rows.engine._cost.note_run(((1,), ()), 3, 0.0)  # it is expected to be short
    rows.engine._lanes_used_max = 0
    rows.send(*(row_request(n, FOREVER) for n in (1, 2, 3)))
    rows.send(m.SetThreads(2))
    [run] = rows.engine._running
    clock.now = run.began_at
    rows.send(row_request(4, FOREVER), row_request(5, FOREVER))
    assert rows.under_way() == (1, 2, 3), "two rows wait for others, or for a lane"
    wait_s = rows.engine.wait_s_max()
    assert wait_s is not None and 0.0 < wait_s <= 1.01 * HELD_S_MAX
    rows.send(row_request(6, FOREVER))
    assert [len(run.works) for run in rows.engine._running] == [3, 3]
    rows.send(*(m.DropInput(n) for n in (4, 5, 6)))
    assert rows.wait_other(1, 2, 3, 4, 5, 6) == (1, 2, 3)
    rows.send(row_request(7, FOREVER))
    clock.now += 1.01 * HELD_S_MAX
    assert rows.under_way() == (1, 2, 3) and rows.engine.wait_s_max() == 0.0
    rows.send()
    assert [len(run.works) for run in rows.engine._running] == [3, 1], "it takes longer"
    rows.engine.close()


def test_the_rows_of_several_users_are_joined_by_their_order(tmp_path: Path) -> None:
    rows = Rows(tmp_path, batch_max=4)
    rows.occupy()
    rows.send(*(row_request(n, FOREVER, user=1) for n in range(2, 9)))
    rows.send(row_request(9, FOREVER, user=2), row_request(10, FOREVER, user=3))
    rows.send(m.DropInput(1))
    rows.wait_reports(1)
    assert {9, 10} < set(rows.under_way())
    rows.engine.close()


def test_of_a_joined_computation_that_fails_only_the_bad_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(lookup())
    path = str(tmp_path / "g.onnx")
    rows = Driver(joining_engine(ModelSpec(name="g", backend="onnx", path=path, batch_max=8)))
    rows.send(index_request(1, 0))
    rows.wait_reports(1)
    rows.send(*(index_request(n, at) for n, at in ((2, 0), (3, 2), (4, 9), (5, 1), (6, 0))))
    assert rows.under_way() == (2, 3, 4, 5, 6)
    reports = rows.wait_reports(6)
    found = {report.id: report for report in reports if isinstance(report, m.RequestMessage)}
    assert error_of(found[4]) == "InvalidArgument"
    for number, value in ((2, 0.0), (3, 20.0), (5, 10.0), (6, 0.0)):
        assert rows_of_report(found[number]) == (number, [value])
    assert rows.runs() == 1 + 1 + 5, "the joined one, and each by itself"
    rows.engine.close()


def index_request(number: int, index: int) -> m.ComputeTensors:
    tensor = Tensor(struct.pack("q", index), (1, 1), TENSOR_TYPES["i64"])
    return m.ComputeTensors(number, [("i", tensor)], Requester(Owner(1)))


def test_an_engine_works_on_with_the_lanes_that_could_be_started(lanes: Bench) -> None:
    lanes.engine._model = cast(GraphModel, FewThreads(lanes.model))
    lanes.send(request(1, FOREVER), request(2))
    [event] = lanes.reports
    assert isinstance(event, m.LogEvent)
    assert event.event == "graph.lane_failed"
    assert event.fields["lanes"] == 1
    lanes.send(m.SetThreads(2), m.DropInput(1))
    assert output_of(lanes.wait_reports(3)[2]) == (2, 2.0)
    assert len(lanes.reports) == 3, "no further lane was tried"


def test_a_quitting_engine_cancels_its_computations(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 2)
    bench.send(request(1, FOREVER), request(2, FOREVER), request(3, FOREVER))
    bench.send(m.Quit())
    assert bench.engine.quit
    bench.engine.close()


class Linked(Bench):
    """An engine with a standby, whose link's other end is `daemon`. It has made so many short
    computations that it makes the next ones by itself.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, 2)
        self.ours, self.daemon = socket.socketpair()
        self.link = SocketLink(self.ours)
        self.link.wake_on(self.engine.fileno())
        self.standby = self.engine.standby = Standby(
            partial(worker.drive_graph, self.link, self.engine)
        )
        self.standby.start()
        self.engine.has_arrived = self.link.has_arrived
        for number in range(tensor_engine.SHORT_RUNS_MIN):
            self.send(request(1000 + number))
            self.wait_reports(number + 1)
        self.reports.clear()

    def send_from_daemon(self, *commands: m.Command) -> None:
        self.daemon.sendall(pack_frame(commands))

    def receive(self) -> list[m.Report]:
        """Return the reports of the next frame that the standby has sent."""
        frames = FrameReader(ANY_LENGTH)
        while True:
            for frame in frames.read_frames(self.daemon.recv(1 << 16)):
                return msgspec.msgpack.decode(frame, type=list[m.Report])


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Linked]:
    monkeypatch.setattr(tensor_engine, "SHORT_S", 60.0)
    made = Linked(tmp_path)
    yield made
    made.engine.close()
    made.ours.close()
    made.daemon.close()


def test_short_computations_are_made_without_a_lane(linked: Linked) -> None:
    for number in (1, 2):
        linked.send(request(number))
        assert [output_of(report) for report in linked.reports] == [(number, number)]
        assert linked.under_way() == ()
        linked.reports.clear()


def test_several_inputs_and_those_that_may_crash_are_computed_in_lanes(linked: Linked) -> None:
    linked.send(request(1), request(2))
    linked.wait_reports(2)
    linked.send(request(3, alone=True))
    assert len(linked.reports) == 2
    linked.wait_reports(3)


def test_a_shape_is_no_longer_short_after_a_long_computation(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_engine, "SHORT_S", 0.0)
    linked.engine.has_arrived = lambda: True
    linked.send(request(1))
    assert len(linked.reports) == 1
    linked.send(request(2))
    assert len(linked.reports) == 1, "a lane computes it"
    linked.wait_reports(2)


def test_long_computations_are_made_without_a_lane_while_nothing_arrives_during_them(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_engine, "SHORT_S", 0.0)
    for number, has_arrived in enumerate((False, False, True)):
        monkeypatch.setattr(linked.engine, "has_arrived", partial(bool, has_arrived))
        linked.send(request(number))
        assert len(linked.reports) == number + 1
    for number in range(3, 3 + tensor_engine.SINGLE_RUNS_MIN):
        linked.send(request(number))
        assert len(linked.reports) == number, "a lane computes it"
        linked.wait_reports(number + 1)
    linked.send(request(0))
    assert len(linked.reports) == 4 + tensor_engine.SINGLE_RUNS_MIN
    linked.send(request(1, priority=Priority.LOW))
    assert len(linked.reports) == 4 + tensor_engine.SINGLE_RUNS_MIN, "a lane yields its core"
    linked.wait_reports(4 + tensor_engine.SINGLE_RUNS_MIN)


def test_requests_that_arrive_during_others_leave_these_to_the_lanes(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_engine, "SHORT_S", 0.0)
    linked.send(request(1))  # its shape is no longer short
    linked.send(request(2, FOREVER, priority=Priority.LOW))
    linked.send(request(3), m.DropInput(2))
    linked.wait_reports(3)
    linked.send(request(4))
    assert len(linked.reports) == 3, "a lane computes it"
    linked.wait_reports(4)


def test_commands_are_handled_while_the_engines_thread_computes_for_long(linked: Linked) -> None:
    linked.send_from_daemon(request(2), request(3, FOREVER))

    received: list[m.Report] = []

    def cancel() -> None:
        received.extend(linked.receive())
        linked.send_from_daemon(m.DropInput(3), m.DropInput(1))

    thread = threading.Thread(target=cancel)
    thread.start()
    linked.send(request(1, FOREVER))  # returns at its end
    thread.join()
    [computed] = received
    assert isinstance(computed, m.CommandResult) and computed.id == 2
    assert linked.standby.takeovers == 1
    found = [(type(report), report.id) for report in linked.reports if hasattr(report, "id")]
    assert (m.Refused, 1) in found


def test_an_order_to_quit_cancels_the_computation_of_the_engines_thread(linked: Linked) -> None:
    linked.send_from_daemon(m.Quit())
    linked.send(request(1, FOREVER))
    assert linked.engine.quit
    assert not linked.reports, "another process computes it: its caller has not cancelled it"


def test_what_an_order_to_quit_cancels_in_a_lane_is_not_reported(linked: Linked) -> None:
    linked.engine._short_runs.clear()
    linked.engine._single_runs = 0
    linked.send(request(1, FOREVER))
    assert linked.engine.is_computing, "in a lane"
    linked.send_from_daemon(m.Quit())
    ended, turn = linked.daemon.fileno(), threading.Lock()
    worker.drive_graph(linked.link, linked.engine, ended, lambda: False, turn)
    assert linked.engine.quit
    assert select.select([linked.engine.fileno()], [], [], 60)[0]
    linked.send()
    assert not linked.engine.is_computing and not linked.reports


def test_a_bug_in_the_standby_ends_the_computation_of_the_engines_thread(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(received: object) -> None:
        raise ValueError("a bug")

    advance = linked.engine.advance
    monkeypatch.setattr(linked.engine, "advance", fail)
    linked.reports += advance([request(1, FOREVER)])
    assert isinstance(linked.engine.failure, ValueError), "the worker raises it"
    assert not linked.engine.is_computing and not linked.reports


def test_the_end_of_the_daemon_cancels_the_computation_of_the_engines_thread(
    linked: Linked,
) -> None:
    linked.daemon.shutdown(socket.SHUT_RDWR)
    linked.send(request(1, FOREVER))
    assert linked.engine.quit
