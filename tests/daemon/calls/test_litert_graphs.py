"""Graphs in TensorFlow Lite through the daemon: names, bytes, refusals, crashes and hangs."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferd import (
    BackendError,
    Client,
    Graph,
    InvalidEncoding,
    LoadFailed,
    Tensor,
    Timeout,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.graph_calls import (
    AFFINE,
    DAMAGED_FILES,
    affine_of,
    check_damaged_files,
    check_shown,
    context_on,
    damaged,
    integers,
    state_of,
)
from tests.onnx_graphs import affine as onnx_affine
from tests.onnx_graphs import write_graphs as write_onnx_graphs
from tests.tflite_graphs import affine, allocation, identity, loop, modulo, write_graphs

GRAPHS = {
    "affine": affine(),
    "modulo": modulo(),
    "loop": loop(),
    "complex": identity("complex64"),
    "broken": b"\x20\0\0\0TFL3" + bytes(100),
    "allocation": allocation(),
}
FOREVER = (1 << 31) - 1


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, GRAPHS)
    config = "[daemon]\nworker-hang-timeout-s = 3\n[models.loop]\nthreads = 1\n"
    with running_daemon(config, models_dir=models) as running:
        yield running


@pytest.mark.parametrize("encoding", ["tensorflowlite", 4, "autodetect"])
def test_a_file_of_the_models_directory_is_served(client: Client, encoding: int | str) -> None:
    for name in ("affine", "affine.tflite"):
        assert affine_of(client, client.load(name, encoding=encoding)) == AFFINE
    for encoding_of_others in ("ggml", "onnx"):
        with pytest.raises(InvalidEncoding):
            client.load("affine", encoding=encoding_of_others)


@pytest.mark.parametrize("encoding", ["tensorflowlite", "autodetect"])
def test_a_graph_is_loaded_from_its_bytes_and_from_a_file(
    client: Client, tmp_path: Path, encoding: str
) -> None:
    write_graphs(tmp_path, {"mine": affine()})
    loads: tuple[Callable[[], Graph], ...] = (
        lambda: client.load(affine(), encoding=encoding),
        lambda: client.load_file(tmp_path / "mine.tflite"),
    )
    for load in loads:
        assert affine_of(client, load()) == AFFINE


def test_show_and_ps_print_inputs_and_outputs(daemon: RunningDaemon, client: Client) -> None:
    check_shown(daemon, client, "affine", "litert")


def test_graphs_that_cannot_be_served_are_refused(client: Client) -> None:
    with pytest.raises(UnsupportedOperation, match="of type complex64"):
        client.load("complex")
    with pytest.raises(LoadFailed):
        client.load("broken")


def test_inputs_that_end_the_process_are_refused_and_others_are_computed(client: Client) -> None:
    context, pid = context_on(client, "modulo"), state_of(client, "modulo")["pid"]
    for _ in range(2):  # the second time without a process
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            client.compute(context, {"a": integers(-(2**31)), "b": integers(-1)})
    outputs = client.compute(context, {"a": integers(7), "b": integers(4)}).outputs
    assert outputs[0][1].data == integers(3).data
    assert state_of(client, "modulo")["pid"] not in (0, pid)


def test_a_cancelled_computation_that_goes_on_is_killed_and_others_are_computed(
    client: Client,
) -> None:
    context = context_on(client, "loop")
    pid = state_of(client, "loop")["pid"]
    with pytest.raises(Timeout):
        client.compute(context, {"times": integers(FOREVER, dimensions=[])}, timeout=0.2)
    other = context_on(client, "loop")
    outputs = client.compute(other, {"times": integers(3, dimensions=[])}).outputs
    assert outputs[0][1].data == integers(3).data
    assert state_of(client, "loop")["pid"] not in (0, pid)


def test_a_computation_that_never_ends_is_killed_and_refused(client: Client) -> None:
    context = context_on(client, "loop")
    with pytest.raises(WorkerCrashed, match="this input crashes"):
        client.compute(context, {"times": integers(FOREVER - 1, dimensions=[])})
    assert client.compute(context, {"times": integers(3, dimensions=[])}).outputs


def test_a_computation_past_the_limit_on_memory_fails(client: Client) -> None:
    context = context_on(client, "allocation")

    def numbers(count: int) -> dict[str, Tensor]:
        return {"n": Tensor(data=struct.pack("q", count), dimensions=[1], type="i64")}

    with pytest.raises(BackendError, match="FILL"):
        client.compute(context, numbers((1 << 31) - 1))
    assert client.compute(context, numbers(1 << 10)).outputs[0][1].data == bytes(4)


def test_a_pytorch_model_is_refused_with_the_way_to_onnx(
    client: Client, daemon: RunningDaemon
) -> None:
    zipped = b"PK\x03\x04" + bytes(100)
    loads: tuple[Callable[[], Graph], ...] = (
        lambda: client.load(zipped),
        lambda: client.load(zipped, encoding="pytorch"),
        lambda: client.load("affine", encoding="pytorch"),
        lambda: client.load("affine", encoding=3),
    )
    for load in loads:
        with pytest.raises(InvalidEncoding, match="pytorch") as caught:
            load()
        assert "torch.onnx.export" in caught.value.hint
    assert state_of(client, "affine")["leases"] == 0


def test_a_name_is_that_of_the_onnx_file_if_there_are_both(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"both": affine()})
    write_onnx_graphs(tmp_path, {"both": onnx_affine()})
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        assert state_of(client, "both")["backend"] == "onnx"


def test_damaged_files_are_typed_errors_and_disturb_no_other_graph(tmp_path: Path) -> None:
    rng, data = random.Random(7), affine()
    mutants = {f"mutant{n}": damaged(data, n, rng) for n in range(DAMAGED_FILES)}
    write_graphs(tmp_path, {"whole": data, **mutants})
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        check_damaged_files(client, [*mutants])
