"""The Open Inference Protocol: Triton's client, bodies in each form, mistakes and bounds."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import msgspec
import numpy as np
import onnxruntime
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from inferd import Client, InvalidArgument, Tensor
from inferd.gateways.http.callers import new_key
from inferd.gateways.http.exchange import Endpoint
from inferd.gateways.http.limits import BODIES_BYTES_MAX, TENSORS_BYTES_MAX, Limits
from inferd.gateways.http.open_inference import OPEN_INFERENCE, tensors
from inferd.gateways.http.open_inference.bodies import JSON_BYTES_MAX
from inferd.gateways.http.open_inference.models import instances_on, statistics_of
from inferd.gateways.http.open_inference.tensors import DATATYPES
from inferd.gateways.http.turns.inferences import FailureCounts
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway
from tests.models import magika
from tests.onnx_graphs import affine, identity, loop, write_graphs, zeros
from tests.waiting import wait_until

LENGTH = "Inference-Header-Content-Length"
TYPES = {kind: name for name, kind in DATATYPES.items()}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    graphs = {f"copy-{kind}": identity(kind, shape=["n", 2]) for kind in DATATYPES.values()}
    graphs |= {"affine": affine(), "loop": loop(), "complex": identity("complex64")}
    graphs["zeros"] = zeros()
    write_graphs(models, graphs)
    (models / "broken.onnx").write_bytes(b"\x08\x0a" + bytes(100))
    config = echo_model("text") + f"[models.magika]\nfile = {json.dumps(str(magika()))}\n"
    config += "threads = 2\n"
    write_graphs(models, dict.fromkeys(("on-cuda", "on-gpu", "on-npu"), affine()))
    config += '[models.on-cuda]\ndevice = "CUDAExecutionProvider"\n'
    config += '[models.on-gpu]\nbackend = "openvino"\ndevice = "GPU.1"\nthreads = 2\n'
    config += '[models.on-npu]\nbackend = "openvino"\ndevice = "npu"\n'
    with running_daemon(config, models_dir=models) as running:
        yield running


@pytest.fixture(scope="module")
def operator(
    daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningGateway, dict[str, str]]]:
    """A gateway with keys, and the headers of an operator and of a caller of one model."""
    entries = {"olga": "operator = true\n", "bob": 'models = ["affine"]\npriority-max = "low"\n'}
    keys = {name: new_key(name) for name in entries}
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("\n".join(entry + entries[name] for name, (_, entry) in keys.items()))
    with gateway(daemon, "--keys", str(file)) as running:
        yield running, {name: key for name, (key, _) in keys.items()}


@pytest.fixture
def client(http: RunningGateway) -> Iterator[Any]:
    with triton.InferenceServerClient(http.address, connection_timeout=CALL_S_MAX) as made:
        yield made


def tensor(name: str, array: Any, datatype: str, *, binary: bool = True) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def pair(*, binary: bool = True) -> list[Any]:
    a, b = np.array([[1, 2]], np.float32), np.array([[10, 20]], np.float32)
    return [tensor("a", a, "FP32", binary=binary), tensor("b", b, "FP32", binary=binary)]


def fields(**more: Any) -> dict[str, Any]:
    inputs = [
        {"name": "a", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]},
        {"name": "b", "shape": [1, 2], "datatype": "FP32", "data": [[10, 20]]},
    ]
    return {"inputs": inputs, **more}


def test_tritons_client_reads_the_state_of_server_and_models(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    server = client.get_server_metadata()
    assert server["name"] == "inferd" and "binary_tensor_data" in server["extensions"]
    assert client.get_model_metadata("affine") == {
        "name": "affine",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "b", "datatype": "FP32", "shape": [-1, 2]},
        ],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    }
    assert client.get_model_metadata("affine", model_version="1")["name"] == "affine"
    config = client.get_model_config("affine")
    assert config["max_batch_size"] == 0 and config["backend"] == "onnxruntime"
    assert config["instance_group"] == [{"name": "affine", "kind": "KIND_CPU"}]
    assert client.get_model_config("magika")["instance_group"][0]["count"] == 2
    assert config["input"][0] == {"name": "a", "data_type": "TYPE_FP32", "dims": [-1, 2]}
    assert client.is_model_ready("affine") and client.is_model_ready("affine", "1")
    assert not client.is_model_ready("broken") and not client.is_model_ready("missing")
    assert client.get_model_metadata("text")["inputs"] == []
    states = {one["name"]: one for one in client.get_model_repository_index()}
    assert states["magika"]["state"] == "UNAVAILABLE" and "text" not in states


def test_the_configuration_names_the_kind_of_the_device_of_a_graph(client: Any) -> None:
    groups = {
        name: client.get_model_config(name)["instance_group"] for name in ("on-cuda", "on-gpu")
    }
    assert groups == {
        "on-cuda": [{"name": "on-cuda", "kind": "KIND_GPU", "gpus": [0]}],
        "on-gpu": [{"name": "on-gpu", "count": 2, "kind": "KIND_GPU", "gpus": [1]}],
    }
    [group] = client.get_model_config("on-npu")["instance_group"]
    assert group == {"name": "on-npu", "kind": "KIND_MODEL"}


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", "KIND_CPU"),
        ("xnnpack", "KIND_CPU"),
        ("tensorrt", "KIND_GPU"),
        ("gpu", "KIND_GPU"),
        ("openvino", "KIND_MODEL"),
        ("hetero", "KIND_MODEL"),
    ],
)
def test_devices_have_tritons_kinds(device: str, kind: str) -> None:
    found = instances_on(device)
    assert found.pop("kind") == kind
    assert found == ({"gpus": [0]} if kind == "KIND_GPU" else {})  # others may not name GPUs


def test_a_graph_can_be_unloaded_right_after_an_inference(
    client: Any, daemon: RunningDaemon
) -> None:
    """The gateway keeps the context of an inference for the next one."""
    with Client(daemon.socket) as direct:
        for _ in range(3):
            client.infer("affine", pair())
            direct.unload_model("affine")
            assert direct.show("affine")["state"] == "cold"


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritons_client_infers(client: Any, binary: bool, compression: str | None) -> None:
    for outputs in (None, [triton.InferRequestedOutput("y", binary_data=binary)]):
        result = client.infer(
            "affine",
            pair(binary=binary),
            outputs=outputs,
            request_id="my id",
            priority=1,
            timeout=60_000_000,
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
        assert result.as_numpy("y").tolist() == [[12, 24]]
        response = result.get_response()
        assert (response["id"], response["model_name"]) == ("my id", "affine")
        is_binary = "binary_data_size" in response["outputs"][0].get("parameters", {})
        assert is_binary == (binary or outputs is None)


@pytest.mark.parametrize("kind", [kind for kind in DATATYPES.values() if kind != "string"])
def test_each_type_passes(client: Any, kind: str) -> None:
    datatype = TYPES[kind]
    if kind == "bf16":
        array = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    else:
        array = np.array([[0, 1]]).astype(triton_dtype(datatype))
    result = client.infer(f"copy-{kind}", [tensor("x0", array, datatype)])
    assert np.array_equal(result.as_numpy("y0"), array)
    if kind in ("fp16", "bf16"):
        given = [{"name": "x0", "shape": [1, 2], "datatype": datatype, "data": [1, 2]}]
        with httpx.Client(base_url=f"http://{client_address(client)}") as web:
            reply = web.post(f"/v2/models/copy-{kind}/infer", json={"inputs": given})
            assert reply.status_code == 400 and "which JSON does not have" in reply.json()["error"]
        outputs = [triton.InferRequestedOutput("y0", binary_data=False)]
        with pytest.raises(InferenceServerException, match="which JSON does not have"):
            client.infer(f"copy-{kind}", [tensor("x0", array, datatype)], outputs=outputs)
    else:
        outputs = [triton.InferRequestedOutput("y0", binary_data=False)]
        given = tensor("x0", array, datatype, binary=False)
        result = client.infer(f"copy-{kind}", [given], outputs=outputs)
        assert np.array_equal(result.as_numpy("y0"), array)


@pytest.mark.parametrize("binary", [True, False])
def test_strings_pass(client: Any, binary: bool) -> None:
    texts = ["", "a", "\u00e4\0\u20ac", "x" * 1000]
    given = tensor("x0", np.array(texts, object).reshape(2, 2), "BYTES", binary=binary)
    outputs = [triton.InferRequestedOutput("y0", binary_data=binary)]
    result = client.infer("copy-string", [given], outputs=outputs)
    found = result.as_numpy("y0")
    assert found.shape == (2, 2)
    assert [t if isinstance(t, str) else t.decode() for t in found.ravel().tolist()] == texts
    assert result.get_response()["outputs"][0]["datatype"] == "BYTES"
    metadata = client.get_model_metadata("copy-string")
    assert metadata["inputs"] == [{"name": "x0", "datatype": "BYTES", "shape": [-1, 2]}]
    config = client.get_model_config("copy-string")
    assert config["output"] == [{"name": "y0", "data_type": "TYPE_STRING", "dims": [-1, 2]}]


def test_strings_that_do_not_fit_are_refused(
    web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(given: dict[str, Any], tail: bytes = b"", **more: Any) -> str:
        one = {"name": "x0", "shape": [1, 2], "datatype": "BYTES", **given}
        head = json.dumps({"inputs": [one], **more}).encode()
        headers = {LENGTH: str(len(head))}
        reply = web.post("/v2/models/copy-string/infer", content=head + tail, headers=headers)
        assert reply.status_code in (200, 400, 413), reply.text
        return str(reply.json().get("error", reply.json().get("outputs")))

    packed = b"\1\0\0\0a\2\0\0\0bc"
    sized = {"parameters": {"binary_data_size": len(packed)}}
    assert "'data': ['a', 'bc']" in send(sized, packed)
    assert "'data': ['a', 'bc']" in send({"data": [["a", "bc"]]})
    for given, tail, message in (
        ({"data": ["a"]}, b"", "has 1 elements; its shape [1, 2] has 2"),
        ({"data": ["a", 1]}, b"", "are not strings"),
        ({"data": [["a", ["b"]]], "shape": [2]}, b"", "are not strings"),
        ({"data": {}}, b"", "are not strings"),
        ({"data": 3}, b"", "are not strings"),
        ({"parameters": {"binary_data_size": 5}}, packed[:5], "has 1 elements"),
        ({"parameters": {"binary_data_size": 9}}, packed[:9], "are not strings: a string is cut"),
        ({"parameters": {"binary_data_size": 12}}, packed, "of which 11 bytes arrived"),
        ({**sized}, b"\1\0\0\0a\2\0\0\0\xff\xfe", "not UTF-8"),
        ({"data": ["a", "b"], "shape": [1 << 40, 1 << 40]}, b"", "more than 65536 strings"),
    ):
        assert message in send(given, tail), (given, message)
    outputs = [{"name": "y0", "parameters": {"classification": 2}}]
    assert "has no classes" in send({"data": ["a", "b"]}, outputs=outputs)
    # An engine may compute bytes that are not UTF-8.
    bad = Tensor(data=b"\1\0\0\0\xff", dimensions=[1], type="string")
    with pytest.raises(InvalidArgument, match="not UTF-8, which JSON does not have"):
        tensors._texts("y", bad)


def triton_dtype(datatype: str) -> Any:
    from tritonclient.utils import triton_to_np_dtype

    return triton_to_np_dtype(datatype)


def client_address(client: Any) -> str:
    return f"{client._parsed_url.host}:{client._parsed_url.port}"


def test_magika_has_the_results_of_the_engine(client: Any) -> None:
    data = np.full((2, 2048), 256, np.int32)
    data[0, :5] = list(b"hello")
    session = onnxruntime.InferenceSession(str(magika()), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"bytes": data})
    name = client.get_model_metadata("magika")["outputs"][0]["name"]
    found = client.infer("magika", [tensor("bytes", data, "INT32")]).as_numpy(name)
    assert np.allclose(found, expected, atol=1e-5)
    outputs = [triton.InferRequestedOutput(name, class_count=3)]
    classes = client.infer("magika", [tensor("bytes", data, "INT32")], outputs=outputs)
    rows = classes.as_numpy(name)
    assert rows.shape == (2, 3)
    for row, scores in zip(rows, expected, strict=True):
        best = np.argsort(-scores)[:3]
        assert [int(text.split(b":")[1]) for text in row] == best.tolist()
        assert [float(text.split(b":")[0]) for text in row] == pytest.approx(
            scores[best].tolist(), abs=1e-5
        )


def test_classes_in_json_are_texts(web: httpx.Client) -> None:
    outputs = [{"name": "y", "parameters": {"classification": 9}}]
    reply = web.post("/v2/models/affine/infer", json=fields(outputs=outputs)).json()
    assert reply["outputs"] == [
        {
            "name": "y",
            "datatype": "BYTES",
            "shape": [1, 2],
            "data": ["24.000000:1", "12.000000:0"],
        }
    ]


def test_tritons_asynchronous_client_infers(http: RunningGateway) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(http.address) as client:
            assert await client.is_model_ready("affine")
            results = await asyncio.gather(*(client.infer("affine", pair()) for _ in range(20)))
            assert {str(each.as_numpy("y").tolist()) for each in results} == {"[[12.0, 24.0]]"}

    asyncio.run(run())


def test_tritons_client_sends_requests_without_waiting(http: RunningGateway) -> None:
    with triton.InferenceServerClient(http.address, concurrency=4) as client:
        requests = [client.async_infer("affine", pair()) for _ in range(8)]
        assert [each.get_result().as_numpy("y").tolist() for each in requests] == [[[12, 24]]] * 8


def test_statistics_count_the_inferences_of_all_clients(daemon: RunningDaemon) -> None:
    with (
        gateway(daemon) as running,
        triton.InferenceServerClient(running.address) as client,
        Client(daemon.socket) as local,
        local.graph("affine") as graph,
    ):
        [before] = client.get_inference_statistics("affine")["model_stats"]
        for _ in range(3):
            client.infer("affine", pair())
        graph.run({"a": [[1, 2]], "b": [[1, 2]]})
        with pytest.raises(InferenceServerException):
            client.infer("affine", pair()[:1])
        [found] = client.get_inference_statistics("affine")["model_stats"]
        assert found["last_inference"] > max(0, before["last_inference"] - 1)
        assert found["inference_count"] == before["inference_count"] + 4
        counts, times = found["inference_stats"], before["inference_stats"]
        for part in ("success", "queue", "compute_infer"):
            assert counts[part]["count"] == times[part]["count"] + 4
            assert counts[part]["ns"] > times[part]["ns"]
        assert counts["fail"]["count"] == 1 and counts["fail"]["ns"] > 0
        assert counts["success"]["ns"] == counts["queue"]["ns"] + counts["compute_infer"]["ns"]
        sizes = {one["batch_size"]: one["compute_infer"] for one in found["batch_stats"]}
        assert sum(size * one["count"] for size, one in sizes.items()) == found["inference_count"]
        assert sum(one["count"] for one in sizes.values()) == found["execution_count"]
        every = client.get_inference_statistics()["model_stats"]
        assert {one["name"] for one in every} >= {"affine", "magika"}


def test_the_page_offers_no_graph_for_chats_also_before_it_is_loaded(web: httpx.Client) -> None:
    found = web.get("/v1/inferd/models").json()
    models = {one["id"]: one for one in found["data"]}
    assert models["complex"]["state"] != "loaded" and models["complex"]["generates"] is False
    assert models["affine"]["generates"] is False and models["text"]["generates"] is not False


def test_a_graph_is_described_with_its_inputs_and_outputs_before_it_is_loaded(
    web: httpx.Client,
) -> None:
    found = web.get("/v1/inferd/models/complex").json()
    assert (found["object"], found["graph"], found["state"]) == ("model.status", True, "unloaded")
    listed = {one["id"]: one for one in web.get("/v1/inferd/models").json()["data"]}
    assert found.keys() - listed["complex"].keys() == {"inputs", "outputs"}
    assert web.get("/v1/inferd/models/affine").json()["inputs"] == [
        {"name": name, "type": "fp32", "shape": ["n", 2]} for name in ("a", "b")
    ]
    text = web.get("/v1/inferd/models/text").json()
    assert (text["graph"], text["inputs"], text["outputs"]) == (False, None, None)
    missing = web.get("/v1/inferd/models/absent")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_the_gateways_own_statistics_have_graphs(client: Any, web: httpx.Client) -> None:
    client.infer("affine", pair())
    models = {one["model"]: one for one in web.get("/v1/inferd/statistics").json()["data"]}
    shown = models["affine"]
    assert [shown[name] for name in ("generated_tokens", "running", "parked")] == [0, 0, 0]


def test_statistics_add_the_engines_of_a_fleet() -> None:
    engines: dict[str, dict[str, Any]] = {
        "m@a": {
            "computed": 5,
            "queue_us": 7,
            "computed_at": 2.0,
            "batches": [[1, 1, 10], [4, 1, 20]],
        },
        "m@b": {"computed": 4, "queue_us": 3, "computed_at": 3.0, "batches": [[4, 1, 30]]},
        "n@b": {"computed": 1, "queue_us": 1, "computed_at": 4.0, "batches": [[1, 1, 1]]},
        "text@b": {"generated": 3},
    }
    found = statistics_of("m", engines, FailureCounts())
    assert (found["inference_count"], found["execution_count"], found["last_inference"]) == (
        *(9, 3, 3000),
    )
    counts = found["inference_stats"]
    assert counts["queue"] == {"count": 9, "ns": 10_000}
    assert counts["compute_infer"] == {"count": 9, "ns": 210_000}
    assert [one["batch_size"] for one in found["batch_stats"]] == [1, 4]
    assert found["batch_stats"][1]["compute_infer"] == {"count": 2, "ns": 50_000}
    assert statistics_of("text", engines, FailureCounts())["inference_count"] == 0


def leases(client: Client, model: str) -> int:
    return next(info["leases"] for info in client.models() if info["name"] == model)


def test_operators_load_and_unload(
    daemon: RunningDaemon, operator: tuple[RunningGateway, dict[str, str]]
) -> None:
    running, keys = operator
    olga, bob = ({"Authorization": f"Bearer {keys[name]}"} for name in ("olga", "bob"))
    with (
        triton.InferenceServerClient(running.address) as client,
        Client(daemon.socket) as local,
    ):
        client.load_model("affine", headers=olga)
        index = {one["name"]: one for one in client.get_model_repository_index(headers=olga)}
        assert index["affine"]["state"] == "READY"
        wait_until(lambda: not leases(local, "affine"))  # another gateway keeps one for a moment
        client.infer("affine", pair(), headers=olga)
        assert leases(local, "affine") == 1, "this one keeps one, too"
        client.unload_model("affine", headers=olga)
        assert local.show("affine")["info"] is None
        cases: list[tuple[dict[str, str], Callable[[Any], object], str]] = [
            (olga, lambda h: client.load_model("missing", headers=h), "failed to load 'missing'"),
            (olga, lambda h: client.load_model("broken", headers=h), "failed to load 'broken'"),
            (bob, lambda h: client.load_model("affine", headers=h), "only an operator"),
            (bob, lambda h: client.unload_model("affine", headers=h), "only an operator"),
            (bob, lambda h: client.load_model("magika", headers=h), "there is no model"),
            (olga, lambda h: client.load_model("affine", headers=h, config="{}"), "'config' is"),
        ]
        for headers, call, message in cases:
            with pytest.raises(InferenceServerException, match=message):
                call(headers)
        shown = client.get_model_repository_index(headers=bob)
        assert [one["name"] for one in shown] == ["affine"]
        assert client.infer("affine", pair(), headers=bob, priority=1).as_numpy("y") is not None
        with pytest.raises(InferenceServerException, match="there is no model"):
            client.infer("magika", pair(), headers=bob)
        with pytest.raises(InferenceServerException, match="the request has no key"):
            client.infer("affine", pair())
        assert client.is_server_ready(), "probes need no key"


@pytest.mark.parametrize(
    "endpoint", OPEN_INFERENCE.endpoints, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}"
)
def test_each_path_but_the_probes_needs_a_key(
    operator: tuple[RunningGateway, dict[str, str]], endpoint: Endpoint
) -> None:
    running, keys = operator
    path = endpoint.path.format(model="magika", version="1", region="r")
    with httpx.Client(base_url=running.url, timeout=CALL_S_MAX) as web:
        reply = web.request(endpoint.method, path, content=b"{}")
        if endpoint.public:
            assert reply.status_code == 200
            return
        assert reply.status_code == 401 and set(reply.json()) == {"error"}
        if "{model}" in endpoint.path:
            headers = {"Authorization": f"Bearer {keys['bob']}"}
            reply = web.request(endpoint.method, path, content=b"{}", headers=headers)
            assert reply.status_code == 404, "the key may not use the model"


def test_shared_memory_of_cuda_is_refused_and_forgotten(client: Any, web: httpx.Client) -> None:
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []
    reply = web.post("/v2/cudasharedmemory/region/r/register", json={})
    assert reply.status_code == 400 and "of CUDA is not supported" in reply.json()["error"]
    assert web.get("/v2/cudasharedmemory/region/r/status").status_code == 404


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    made = fields()
    change(made)
    return made


def first(**values: Any) -> dict[str, Any]:
    return changed(lambda made: made["inputs"][0].update(values))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "inputs: Object missing required field"),
        ({"inputs": 3}, "inputs: "),
        ({"inputs": [3]}, "inputs"),
        ({"inputs": [None]}, "inputs"),
        ({"inputs": []}, "'a' (fp32 [n, 2]) is missing"),
        (first(name=3), "inputs"),
        (first(name="c"), "no input 'c'"),
        (first(datatype="FP31"), "unknown type 'FP31'"),
        (first(datatype="BYTES"), "are not strings"),
        (first(datatype="BYTES", data=["1", "2"]), "got a tensor of string"),
        (first(datatype="INT32"), "got a tensor of i32"),
        (first(shape=[2]), "got the shape [2]"),
        (first(shape=[2, 2]), "has 2 elements; its shape [2, 2] has 4"),
        (first(shape=[-1, 2]), "shape"),
        (first(data=["x", "y"]), "are not numbers of FP32"),
        (first(data={"a": 1}), "are not numbers of FP32"),
        (first(data=None), "has no data"),
        (first(data=[1, [2]]), ""),
        (first(datatype="INT32", data=[1.5, 2]), "are not numbers of INT32"),
        (first(datatype="UINT8", data=[256, 2]), "are not numbers of UINT8"),
        (first(datatype="BOOL", data=[2, 1]), "are not numbers of BOOL"),
        (first(parameters={"binary_data_size": 8}), "has data and binary_data_size"),
        (fields(outputs=[{"name": "z"}]), "no output 'z'"),
        (fields(parameters={"sequence_id": 7}), "sequences of requests are not supported"),
        (fields(parameters={"timeout": -1}), "timeout"),
    ],
)
def test_mistakes_are_errors_of_the_protocol(
    web: httpx.Client, body: dict[str, Any], message: str
) -> None:
    reply = web.post("/v2/models/affine/infer", json=body)
    if not message:
        assert reply.status_code == 200  # rows may be lists of their own
        return
    assert reply.status_code == 400, reply.text
    assert set(reply.json()) == {"error"} and message in reply.json()["error"]


def test_binary_bodies_are_checked(web: httpx.Client) -> None:
    def send(head: dict[str, Any], tail: bytes, length: int | str | None = None) -> Any:
        text = json.dumps(head).encode()
        headers = {LENGTH: str(len(text) if length is None else length)}
        return web.post("/v2/models/affine/infer", content=text + tail, headers=headers)

    def binary(size: int) -> dict[str, Any]:
        made = fields(parameters={"binary_data_output": True})
        for given in made["inputs"]:
            del given["data"]
            given["parameters"] = {"binary_data_size": size}
        return made

    values = struct.pack("4f", 1, 2, 10, 20)
    good = send(binary(8), values)
    assert good.status_code == 200 and good.headers["content-type"] == "application/octet-stream"
    length = int(good.headers[LENGTH])
    assert json.loads(good.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert struct.unpack("2f", good.content[length:]) == (12, 24)
    for reply, message in (
        (send(binary(8), values[:-1]), "of which 7 bytes arrived"),
        (send(binary(8), values + b"x"), "1 bytes follow the binary data"),
        (send(binary(4), values), "its shape and type need 8"),
        (send(binary(8), values, "x"), "the bytes of the JSON"),
        (send(binary(8), values, 10_000), "the bytes of the JSON"),
        (send(binary(8), values, 0), "the bytes of the JSON"),
        (send(fields(), b"", 5), "the request is not JSON"),
    ):
        assert reply.status_code == 400 and message in reply.json()["error"], reply.text


def test_compressed_bodies_are_bounded(web: httpx.Client) -> None:
    path = "/v2/models/affine/infer"

    def send(data: bytes, encoding: str, **headers: str) -> Any:
        return web.post(path, content=data, headers={"Content-Encoding": encoding, **headers})

    text = json.dumps(fields()).encode()
    for encoding, data in (("gzip", gzip.compress(text)), ("deflate", zlib.compress(text))):
        assert send(data, encoding).json()["outputs"][0]["data"] == [12, 24]
        assert "cut off" in send(data[:-9], encoding).json()["error"]
        assert "cannot be decompressed" in send(b"x" + data, encoding).json()["error"]
    assert send(text, "br").status_code == 415
    bomb = gzip.compress(bytes(TENSORS_BYTES_MAX + 1))
    assert send(bomb, "gzip").status_code == 413
    long = gzip.compress(b" " * (JSON_BYTES_MAX + 1) + text)
    assert "in the binary form" in send(long, "gzip").json()["error"]
    other = web.post("/v2/repository/index", content=b"x", headers={"Content-Encoding": "gzip"})
    assert other.status_code == 415, "other paths read no compressed bodies"


def test_long_json_is_read_and_written_in_slices(
    web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 60_000
    data = [[row, 0.5] for row in range(rows)]
    given = fields()
    given["inputs"][0] |= {"shape": [rows, 2], "data": data}
    given["inputs"][1] |= {"shape": [rows, 2], "data": [0] * 2 * rows}
    reply = web.post("/v2/models/affine/infer", json=given).json()
    assert reply["outputs"][0]["data"] == [n for row in range(rows) for n in (2 * row, 1)]
    monkeypatch.setattr(tensors, "SLICE_BYTES", 4)
    monkeypatch.setattr(tensors, "_SLICE_NUMBERS", 2)
    for text in (b"[]", b"[1]", b"[[1, 2], [3, 44], [555, 6]]", b"[ 1234567 ,8\n]"):
        slices = list(tensors._numbers_in(text, "i32"))
        flat = np.array(json.loads(text)).flatten().tolist()
        assert [n for each in slices for n in each] == flat
        assert len(slices) > 1 or len(text) < 5
        assert bytes(tensors._numbers_text(flat)) == json.dumps(flat).replace(" ", "").encode()
    for text in (b"{}", b'["1"]', b'[1, "23456", 7]', b"[1, {}, 2345678]", b"true"):
        with pytest.raises(msgspec.DecodeError):
            list(tensors._numbers_in(text, "i32"))


def test_a_response_is_compressed_if_its_client_accepts_that(web: httpx.Client) -> None:
    rows = 200
    given = fields()
    for one in given["inputs"]:
        one |= {"shape": [rows, 2], "data": [0.5] * 2 * rows}
    for accepted, used in (("gzip", "gzip"), ("br, deflate;q=0.5", "deflate"), ("gzip;q=0", None)):
        reply = web.post(
            "/v2/models/affine/infer", json=given, headers={"Accept-Encoding": accepted}
        )
        assert reply.headers.get("content-encoding") == used
        assert reply.json()["outputs"][0]["data"] == [1.5] * 2 * rows
    short = web.post("/v2/models/affine/infer", json=fields(), headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in short.headers


def test_large_tensors_pass_and_larger_ones_are_refused(client: Any, web: httpx.Client) -> None:
    for rows in ((6 << 20) // 8, (20 << 20) // 8):  # the first ones fit into frames
        array = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        zeros = np.zeros((rows, 2), np.float32)
        given = [tensor("a", array, "FP32"), tensor("b", zeros, "FP32")]
        assert np.array_equal(client.infer("affine", given).as_numpy("y"), 2 * array)
    # More than the memory for bodies together: that of each request is given back.
    for _ in range(BODIES_BYTES_MAX // (60 << 20)):
        assert np.array_equal(client.infer("affine", given).as_numpy("y"), 2 * array)
    for options in ({"binary_data": False}, {"binary_data": True, "class_count": 1}):
        outputs = [triton.InferRequestedOutput("y", **options)]
        with pytest.raises(InferenceServerException, match="in JSON and as classes have 20971520"):
            client.infer("affine", given, outputs=outputs)
    huge = web.post("/v2/models/affine/infer", json=first(shape=[9 << 20, 2]))
    assert huge.status_code == 413 and "'a' has 75497472 bytes" in huge.json()["error"]
    assert Limits().body_bytes_max_of("/v2/models/a/versions/1/infer") == TENSORS_BYTES_MAX


def test_outputs_that_grow_pass(client: Any) -> None:
    """The place for outputs that no reply takes is enlarged."""
    for rows in (10, (9 << 20) // 8, 10, (21 << 20) // 8, (9 << 20) // 8):
        array = np.full((rows, 2), rows, np.float32)
        given = [tensor("a", array, "FP32"), tensor("b", array, "FP32")]
        assert np.array_equal(client.infer("affine", given).as_numpy("y"), 3 * array)


def test_outputs_beyond_the_limit_of_a_computation_are_refused(client: Any) -> None:
    given = [tensor("n", np.array([(65 << 20) // 4], np.int64), "INT64")]
    with pytest.raises(InferenceServerException, match="the outputs have 68157440 bytes"):
        client.infer("zeros", given)
    given = [tensor("n", np.array([(63 << 20) // 4], np.int64), "INT64")]
    assert client.infer("zeros", given).as_numpy("y").size == (63 << 20) // 4


def test_requests_end_in_time_and_when_their_client_leaves(
    daemon: RunningDaemon, client: Any, http: RunningGateway
) -> None:
    given = [
        tensor("x", np.ones(1, np.float32), "FP32"),
        tensor("times", np.array(1 << 62), "INT64"),
    ]
    with pytest.raises(InferenceServerException, match=r"did not end within 0\.3 s"):
        client.infer("loop", given, timeout=300_000)
    small = [given[0], tensor("times", np.array(2), "INT64")]
    assert client.infer("loop", small).as_numpy("y").tolist() == [1]
    begun = threading.Event()

    def leave() -> None:
        with httpx.Client(base_url=http.url, timeout=0.5) as web:
            body = {
                "inputs": [
                    {"name": "x", "shape": [1], "datatype": "FP32", "data": [1]},
                    {"name": "times", "shape": [], "datatype": "INT64", "data": [1 << 62]},
                ]
            }
            begun.set()
            with pytest.raises(httpx.ReadTimeout):
                web.post("/v2/models/loop/infer", json=body)

    thread = threading.Thread(target=leave)
    thread.start()
    begun.wait()
    thread.join()
    assert client.infer("loop", small).as_numpy("y").tolist() == [1]
    with Client(daemon.socket) as local:
        wait_until(lambda: not [one for one in local.sessions() if one["model"] == "loop"])


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v2/models/missing", 404, "there is no model 'missing'"),
        ("GET", "/v2/models/affine/versions/2", 404, "has no version '2'"),
        ("POST", "/v2/models/affine/versions/2/infer", 404, "has no version '2'"),
        ("POST", "/v2/models/missing/infer", 404, "there is no model 'missing'"),
        ("POST", "/v2/models/complex/infer", 400, "of type complex64"),
        ("GET", "/v2/models/broken", 500, "is not an ONNX file"),
        ("GET", "/v2/models/broken/ready", 503, "is not ready"),
        ("GET", "/v2/trace/setting", 404, "there is no /v2/trace/setting"),
        ("PUT", "/v2/models/affine", 405, "has no PUT"),
        ("POST", "/v2/repository/models/affine/load", 403, "only an operator"),
    ],
)
def test_errors_have_the_protocols_shape(
    web: httpx.Client, method: str, path: str, status: int, message: str
) -> None:
    body = fields() if path.endswith("infer") else None
    reply = web.request(method, path, json=body)
    assert reply.status_code == status and set(reply.json()) == {"error"}, reply.text
    assert message in reply.json()["error"]


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    from tests.tiny_gguf import write_tiny

    write_tiny("llama", tmp_path)
    with (
        running_daemon(models_dir=tmp_path) as running,
        gateway(running) as made,
        triton.InferenceServerClient(made.address) as client,
    ):
        assert client.get_model_metadata("tiny-llama")["platform"] == "llama.cpp"
        with pytest.raises(InferenceServerException, match="is a language model"):
            client.infer("tiny-llama", pair())
