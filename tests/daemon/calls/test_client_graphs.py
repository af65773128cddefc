"""`client.graph`: arrays in and out, with and without NumPy, several callers, and its end."""

from __future__ import annotations

import gc
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest

from inferd import (
    AsyncClient,
    Client,
    InvalidArgument,
    ProtocolError,
    Tensor,
    TensorInfo,
    Timeout,
)
from inferd.ipc.client import arrays, graphs
from inferd.testing import RunningDaemon, running_daemon
from tests.onnx_graphs import affine, identity, loop, write_graphs

CHANNEL: str | None = None
DAEMON = f"00-{'1' * 32}-{'2' * 16}-01"
"""The spans of runs in the graph's channel, and of those that the daemon makes on a context."""
WAYS = pytest.mark.parametrize("way", [CHANNEL, DAEMON])
KINDS = {kind: name for kind, name in arrays.ARRAY_NAMES.items() if kind != "bf16"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(
        models, {f"copy-{kind}": identity(kind, shape=None) for kind in arrays.ARRAY_NAMES}
    )
    write_graphs(models, {"affine": affine(), "loop": loop(), "0": identity("u8", "u8")})
    write_graphs(models, {"texts": identity("string", shape=None)})
    with running_daemon(models_dir=models) as running:
        yield running


def sessions_and_leases(client: Client, model: str) -> tuple[int, int]:
    shown = client.show(model)
    mine = [one for one in client.sessions() if one["model"] == model]
    return len(mine), shown["leases"]


def test_a_graph_computes_arrays_and_names_its_inputs(client: Client) -> None:
    graph = client.graph("affine")
    assert client.show("affine")["info"] is None, "nothing is loaded before it is used"
    assert graph.inputs == (
        TensorInfo("a", "fp32", ("n", 2)),
        TensorInfo("b", "fp32", ("n", 2)),
    )
    assert [info.name for info in graph.outputs] == ["y"]
    assert client.show("affine")["info"] is None, "its file states them"
    found = graph.run({"a": np.ones((2, 2), np.float32), "b": [[1, 2], [3, 4]]})
    assert list(found) == ["y"] and found["y"].dtype == np.float32
    assert found["y"].tolist() == [[3, 4], [5, 6]]
    found["y"][0, 0] = 7  # it belongs to the caller
    assert sessions_and_leases(client, "affine") == (0, 0)


@pytest.mark.parametrize(("way", "contexts"), [(CHANNEL, 0), (DAEMON, 1)])
def test_an_open_graph_uses_one_lease_and_at_most_one_context_again(
    client: Client, way: str | None, contexts: int
) -> None:
    with client.graph("affine") as graph:
        for number in range(5):
            inputs = {"a": [[number, 0]], "b": [[0, 0]]}
            found = graph.run(inputs, priority="low", timeout=60, traceparent=way)
            assert found["y"].tolist() == [[2 * number, 0]]
            assert sessions_and_leases(client, "affine") == (contexts, 1)
    assert sessions_and_leases(client, "affine") == (0, 0)
    graph.close()
    assert graph.run({"a": [[1, 1]], "b": [[0, 0]]})["y"].tolist() == [[2, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_passes_unchanged(client: Client, kind: str) -> None:
    limits = np.iinfo(KINDS[kind]) if np.dtype(KINDS[kind]).kind in "iu" else None
    values = [0, 1] if limits is None else [limits.min, limits.max]
    given = np.array([values, values], KINDS[kind])
    graph = client.graph(f"copy-{kind}")
    for value in (given, given.T, given[:, ::-1], given[0, 1], given[:0], given.byteswap().view(
        given.dtype.newbyteorder()
    )):  # fmt: skip
        found = graph.run({"x0": value})["y0"]
        assert found.dtype == given.dtype and found.shape == value.shape
        assert np.array_equal(found, value)
    assert graph.run({"x0": given.tolist()})["y0"].tolist() == given.tolist()
    if kind != "fp16":  # Python's arrays and its memoryview lack it
        flat = memoryview(given.tobytes()).cast(arrays.CODES[kind])
        assert graph.run({"x0": flat})["y0"].tolist() == given.flatten().tolist()


def test_strings_pass_as_arrays_and_lists(client: Client) -> None:
    texts, graph = ["", "a", "\u00e4\0\u20ac", "long " * 100], client.graph("texts")
    square = np.array(texts, object).reshape(2, 2)
    for given in (square, square.T, np.array(["ab", "c"]), np.array([[b"ab"], [b"c"]])):
        found = graph.run({"x0": given})["y0"]
        assert found.dtype == object and found.shape == given.shape
        expected = [t.decode() if isinstance(t, bytes) else t for t in given.ravel().tolist()]
        assert found.ravel().tolist() == expected
    assert graph.run({"x0": texts})["y0"].tolist() == texts
    assert graph.run({"x0": [["a"], [b"b"]]})["y0"].tolist() == [["a"], ["b"]]
    assert graph.run({"x0": "one"})["y0"].tolist() == "one"
    assert graph.run({"x0": np.array([], object)})["y0"].shape == (0,)
    tensor = graph.run_tensors({"x0": ["a", "bc"]})["y0"]
    assert (tensor.type, tensor.dimensions) == ("string", [2])
    assert arrays.numbers_of(tensor) == ["a", "bc"]
    for value, message in (
        ([1], "got the value 1"),
        (np.array([1.5]), "got the value 1.5"),
        ([["a"], ["b", "c"]], "lists of different lengths"),
        (["\ud800"], "half a surrogate pair"),
        ([b"\xff"], "not UTF-8"),
        ([None], "got the value None"),
    ):
        with pytest.raises(InvalidArgument, match=message) as caught:
            graph.run({"x0": value})
        assert caught.value.hint
    with pytest.raises(InvalidArgument, match="got the value 'a'"):
        client.graph("copy-u8").run({"x0": ["a"]})


def test_strings_that_are_not_utf8_are_bytes() -> None:
    tensor = Tensor(data=b"\1\0\0\0a\1\0\0\0\xff", dimensions=[2], type="string")
    assert arrays.array_of(tensor).tolist() == [b"a", b"\xff"]
    assert arrays.numbers_of(tensor) == ["a", "\\xff"]
    with pytest.raises(ProtocolError, match="cut off"):
        arrays.array_of(Tensor(data=b"\1\0\0\0", dimensions=[1], type="string"))
    with pytest.raises(ProtocolError, match="cannot be read"):
        arrays.array_of(Tensor(data=b"\0\0\0\0", dimensions=[2], type="string"))


def test_arrays_become_the_declared_type_if_no_integer_changes(client: Client) -> None:
    floats, bytes_, bfloats = (client.graph(f"copy-{kind}") for kind in ("fp16", "u8", "bf16"))
    assert floats.run({"x0": np.array([0.5, 7])})["y0"].dtype == np.float16
    assert floats.run({"x0": np.array([3])})["y0"].tolist() == [3]
    assert bytes_.run({"x0": np.array([0, 255])})["y0"].tolist() == [0, 255]
    assert bytes_.run({"x0": array("q", [0, 255])})["y0"].tolist() == [0, 255]
    assert bfloats.run({"x0": np.array([1.5, -2])})["y0"].tolist() == [1.5, -2]
    for graph, value, message in (
        (floats, np.array([1e9]), "values that fp16 does not have"),
        (floats, [1e9], "values that fp16 does not have"),
        (bytes_, np.array([256]), "values that u8 does not have"),
        (bytes_, array("q", [-1]), "values that u8 does not have"),
        (bytes_, [256], "values that u8 does not have"),
        (bytes_, np.array([1.0]), "got an array of fp32|got an array of fp64"),
        (bytes_, array("f", [1]), "got an array of fp32"),
        (bytes_, [1.0], "got the value 1.0"),
        (bytes_, ["1"], "got the value '1'"),
        (bytes_, np.array(["1"]), "got an array of <U1"),
        (bytes_, [[1], [2, 3]], "lists of different lengths"),
        (bytes_, object(), "got a object"),
        (client.graph("copy-bool"), [2], "values that bool does not have"),
        (client.graph("copy-bool"), np.array([1]), "got an array of i64"),
    ):
        with pytest.raises(InvalidArgument, match=message) as caught:
            graph.run({"x0": value})  # type: ignore[dict-item]
        assert caught.value.hint


def test_bfloat16_is_rounded_to_the_nearest_even_number(client: Client) -> None:
    values = np.array([1, 1.00390625, 1.01171875, -3e38, np.inf, np.nan, 1e-40], np.float32)
    expected = np.array([1, 1, 1.015625, -3.0040553e38, np.inf, np.nan, 9.1835496e-41], np.float32)
    for given in (values, values.tolist(), values.astype(ml_dtypes.bfloat16)):
        found = client.graph("copy-bf16").run({"x0": given})["y0"]
        assert np.allclose(found, expected, rtol=1e-6, atol=0, equal_nan=True)
        assert found[1] == 1 and found[2] == np.float32(1.015625)


def test_mistakes_name_the_inputs(client: Client) -> None:
    graph = client.graph("affine")
    with pytest.raises(InvalidArgument, match="'affine' has no input 'c'") as caught:
        graph.run({"c": [1]})
    assert caught.value.hint == "its inputs are 'a' (fp32 [n, 2]), 'b' (fp32 [n, 2])"
    with pytest.raises(InvalidArgument, match="the inputs are a list"):
        graph.run([1])  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match=r"'b' \(fp32 \[n, 2\]\) is missing"):
        graph.run({"a": [[1, 2]]})
    with pytest.raises(InvalidArgument, match=r"got the shape \[3\]"):
        graph.run({"a": [1, 2, 3], "b": [[1, 2]]})
    assert sessions_and_leases(client, "affine") == (0, 0)


def test_an_index_names_an_input(client: Client) -> None:
    found = client.graph("0").run({"0": [1, 2], "x1": [3]})
    assert [value.tolist() for value in found.values()] == [[1, 2], [3]]


def test_a_language_model_is_no_graph_and_echo_takes_any_tensor(client: Client) -> None:
    tensor = Tensor(data=b"\1\0\0\0", dimensions=[1], type="i32")
    assert client.graph("echo").run_tensors({"any": tensor})["any"].data == tensor.data
    with pytest.raises(InvalidArgument, match="the type of the input 'any' is not known"):
        client.graph("echo").run({"any": [1]})
    found = client.graph("echo").run({"any": np.array([1.5])})
    assert found["any"].tolist() == [1.5]


@WAYS
def test_threads_share_a_graph(client: Client, way: str | None) -> None:
    failures: list[Any] = []

    def call(number: int) -> None:
        for n in range(20):
            found = graph.run({"a": [[number, n]], "b": [[0, 0]]}, traceparent=way)["y"].tolist()
            if found != [[2 * number, 2 * n]]:
                failures.append((number, n, found))

    with client.graph("affine") as graph:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sessions_and_leases(client, "affine")[0] <= 4
    assert failures == []
    assert sessions_and_leases(client, "affine") == (0, 0)


@WAYS
@pytest.mark.anyio
async def test_tasks_share_a_graph(daemon: RunningDaemon, way: str | None) -> None:
    found: dict[int, Any] = {}
    async with AsyncClient(daemon.socket) as client:
        graph = client.graph("affine")
        with pytest.raises(InvalidArgument, match="not known yet"):
            _ = graph.inputs
        assert (await graph.describe()).inputs[0].name == "a"

        async def call(number: int) -> None:
            outputs = await graph.run({"a": [[number, 1]], "b": [[0, 0]]}, traceparent=way)
            found[number] = outputs["y"].tolist()

        async with graph, anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(call, number)
        shown = await client.show("affine")
        assert shown["leases"] == 0
        assert [one for one in await client.sessions() if one["model"] == "affine"] == []
    assert found == {number: [[2 * number, 2]] for number in range(40)}


@pytest.mark.parametrize(("way", "contexts"), [(CHANNEL, 0), (DAEMON, 1)])
@pytest.mark.anyio
async def test_a_cancelled_run_leaves_a_usable_graph(
    daemon: RunningDaemon, way: str | None, contexts: int
) -> None:
    endless: dict[str, Any] = {"x": [1.0], "times": 1 << 62}
    async with AsyncClient(daemon.socket) as client, client.graph("loop") as graph:
        with pytest.raises(Timeout):
            await graph.run(endless, timeout=0.2, traceparent=way)
        with anyio.move_on_after(0.2):
            await graph.run(endless, traceparent=way)
        assert (await graph.run({"x": [1.0], "times": 2}, traceparent=way))["y"].tolist() == [1]
        sessions = [one for one in await client.sessions() if one["model"] == "loop"]
        assert len(sessions) == contexts


@WAYS
def test_a_client_that_reconnects_opens_the_graph_again(
    daemon: RunningDaemon, way: str | None
) -> None:
    with Client(daemon.socket, reconnect=True) as client, client.graph("affine") as graph:
        inputs = {"a": [[1, 2]], "b": [[0, 0]]}
        graph.run(inputs, traceparent=way)
        connection = client._asynchronous._open_connection
        connection.close()
        assert graph.run(inputs, traceparent=way)["y"].tolist() == [[2, 4]]


def test_unused_contexts_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CONTEXTS_MAX", 0)
    with client.graph("affine") as graph:
        graph.run({"a": [[1, 2]], "b": [[0, 0]]}, traceparent=DAEMON)
        assert sessions_and_leases(client, "affine") == (0, 1)


def test_a_graph_that_was_not_closed_is_closed_with_a_warning(client: Client) -> None:
    graph = client.graph("affine").open()
    assert sessions_and_leases(client, "affine") == (0, 1)
    with pytest.warns(ResourceWarning, match="unclosed .*affine"):
        del graph
        gc.collect()
    assert sessions_and_leases(client, "affine") == (0, 0)


WITHOUT_NUMPY = """
import sys
from array import array
sys.modules["numpy"] = None
from inferd import Client, Tensor
with Client(sys.argv[1]) as client, client.graph("affine") as graph:
    a = memoryview(array("f", [1, 2])).cast("B").cast("f", [1, 2])
    found = graph.run({"a": a, "b": [[0.5, 1]]})["y"]
    assert isinstance(found, Tensor), found
    assert memoryview(found.data).cast("f").tolist() == [2.5, 5], found
    assert client.graph("copy-bf16").run({"x0": [1.5]})["y0"].data == b"\\xc0\\x3f"
"""


def test_without_numpy_lists_and_buffers_go_in_and_tensors_come_out(
    daemon: RunningDaemon,
) -> None:
    command = [sys.executable, "-c", WITHOUT_NUMPY, str(daemon.socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_outputs_are_read_as_numbers_of_python() -> None:
    half = Tensor(data=struct.pack("<2e", 0.5, 2), dimensions=[2], type="fp16")
    assert list(arrays.numbers_of(half)) == [0.5, 2]
    brain = Tensor(data=b"\xc0\x3f", dimensions=[1], type=6)
    assert list(arrays.numbers_of(brain)) == [1.5]
    assert arrays.type_name_of(brain) == "bf16"
