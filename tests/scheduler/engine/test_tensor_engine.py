"""The engine of a graph: order, time limits, cancelled computations, and the record."""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from inferd.backends import GraphModel, ModelSpec, load_model
from inferd.backends.errors import OutOfMemory
from inferd.backends.tensors import TENSOR_TYPES, NamedTensor, Tensor
from inferd.scheduler import messages as m
from inferd.scheduler.engine.tensor_engine import TensorEngine
from inferd.scheduler.owner import Owner, Priority, Requester
from inferd.scheduler.record import ActivityKind
from tests.onnx_graphs import loop

FOREVER = 1 << 62


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine with a graph that copies its input as often as a request says."""

    def __init__(self, folder: Path, lanes: int = 1):
        (folder / "loop.onnx").write_bytes(loop())
        path = str(folder / "loop.onnx")
        spec = ModelSpec(name="loop", backend="onnx", path=path, threads=lanes, lanes=lanes)
        self.clock = Clock()
        self.model = cast(GraphModel, load_model(spec, lambda _: True))
        self.engine = TensorEngine(self.model, spec, self.clock)
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
    assert bench.engine.wait_s_max() == 5.0
    bench.clock.now = 5.5
    bench.send()
    [late] = bench.reports
    assert isinstance(late, m.Refused) and late.id == 2
    assert (late.error["name"], late.error["data"]) == ("Timeout", {"timeout": "queue"})
    assert bench.engine.wait_s_max() == 3.5
    bench.send(m.DropInput(3))
    assert bench.engine.wait_s_max() is None


def test_users_take_turns_and_classes_order_those_of_one_user(bench: Bench) -> None:
    bench.send(request(1, FOREVER, user=1))
    bench.send(*(request(n, 2000, user=1) for n in (2, 3, 4)), request(5, 2000, user=2))
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
    bench.send(request(1))
    bench.wait_reports(1)
    bench.send(m.Stats(2))
    report = bench.reports[1]
    assert isinstance(report, m.CommandResult)
    assert (report.value["computations"], report.value["running"]) == (1, 0)


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
    lanes.send(request(1, 300_000, user=1))
    lanes.wait_reports(1)  # the engine expects as much of the next one
    lanes.send(request(2, FOREVER, user=3), request(3, FOREVER, user=3))
    lanes.send(*(request(n, FOREVER, user=4) for n in (4, 5)), request(6, FOREVER, user=5))
    lanes.send(m.DropInput(2), m.DropInput(3))
    lanes.wait_reports(3)
    assert lanes.under_way() == (4, 6), "the first computation of a user precedes the second one"


class FewThreads:
    """A model that has no further lane."""

    def __init__(self, model: GraphModel):
        self.new_computation = model.new_computation

    def add_lane(self) -> None:
        raise OutOfMemory("there is too little memory for a lane")


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
