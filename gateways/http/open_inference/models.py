"""Models in the protocol's form: metadata, configuration, statistics, and the repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from .... import __version__
from ....backends import ENGINES
from ....backends.errors import (
    InferdError,
    PermissionDenied,
    UnsupportedOperation,
    error_from_wire,
)
from ....backends.model_spec import CPU
from ....ipc.client import AsyncClient, ModelInfo, ShownModel
from ..exchange import Exchange, offered_to
from ..exchange.exchange import HttpRefusal
from ..fields import FieldTable
from ..limits import CLOSE_S_MAX
from ..turns.inferences import FailureCounts
from .fields import INDEX, LOAD, UNLOAD, LoadRequest
from .tensors import DATATYPE_OF, TEXTS

MODEL_VERSION = "1"
"""The only version that a model has."""
_PLATFORMS = {"onnx": ("onnxruntime_onnx", "onnxruntime"), "llama": ("llama.cpp", "llama.cpp")}
"""By engines, Triton's names of platforms and backends; the engine's own where it has none."""
_EXTENSIONS = (
    *("classification", "model_configuration", "model_repository", "schedule_policy"),
    *("statistics", "binary_tensor_data", "parameters"),
)
_CPUS = {CPU, "dnnl", "xnnpack"}
_GPUS = {
    *("cuda", "tensorrt", "nvtensorrtrtx", "rocm", "migraphx", "dml", "webgpu"),  # ONNX Runtime's
    "gpu",  # OpenVINO's
}
"""Devices by the names that a graph's table gives them."""
_STATES = {"ready": "READY", "loading": "LOADING", "unloading": "UNLOADING"}
_UNUSED_PARAMETERS = ("unload_dependents",)


async def answer_server(exchange: Exchange) -> None:
    """Answer with the server's name, version and extensions."""
    extensions = [*_EXTENSIONS]
    if exchange.turns.regions.enabled:
        extensions.append("system_shared_memory")
    await exchange.send_json({"name": "inferd", "version": __version__, "extensions": extensions})


async def answer_live(exchange: Exchange) -> None:
    """Answer that the gateway runs."""
    await exchange.send_json({"live": True})


async def answer_ready(exchange: Exchange) -> None:
    """Answer that the daemon answers.

    :raises ConnectionLost: it does not.
    """
    await exchange.turns.health.check()
    await exchange.send_json({"ready": True})


def requested_model(exchange: Exchange) -> str:
    """Return the model of a path.

    :raises ModelNotFound: the caller may not use it.
    :raises HttpRefusal: the path names a version that it does not have.
    """
    name = exchange.caller.check_model(exchange.params["model"])
    version = exchange.params.get("version", MODEL_VERSION)
    if version != MODEL_VERSION:
        raise HttpRefusal(
            404,
            f"the model {name[:100]!r} has no version {version[:100]!r}",
            hint=f"its version is {MODEL_VERSION}",
        )
    return name


async def answer_model_ready(exchange: Exchange) -> None:
    """Answer that a model can be used. It need not be loaded: the first request loads it.

    :raises HttpRefusal: its last load has failed, or its file cannot be read.
    """
    name = requested_model(exchange)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        shown = await client.show(name)
    cause = None if shown["info"] is not None else _problem(shown)
    if cause:
        raise HttpRefusal(503, f"the model {name[:100]!r} is not ready: {cause}", hint="repair it")
    await exchange.send_json({"name": name, "ready": True})


def _problem(shown: ShownModel) -> str:
    """Return why a model that is not loaded cannot be, or an empty text."""
    if shown["state"] == "failed" and shown["error"] is not None:
        return error_from_wire(shown["error"]).message_for_people
    return shown["file_error"] or ""


async def answer_metadata(exchange: Exchange) -> None:
    """Answer with the inputs and outputs of a model."""
    shown = await _described(exchange)
    await exchange.send_json(
        {
            "name": shown["name"],
            "versions": [MODEL_VERSION],
            "platform": _platform(shown)[0],
            "inputs": [_metadata(one) for one in _tensors(shown, "inputs") or ()],
            "outputs": [_metadata(one) for one in _tensors(shown, "outputs") or ()],
        }
    )


async def _described(exchange: Exchange) -> ShownModel:
    """Return the description of a model. A graph whose file does not state its inputs and outputs
    is loaded first.
    """
    name = requested_model(exchange)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        shown = await client.show(name)
    engine = ENGINES.get(shown["backend"])
    if engine is None or not engine.graphs or _tensors(shown, "inputs") is not None:
        return shown
    async with exchange.turns.lease_graph(exchange.caller, name) as (client, _):
        return await client.show(name)


def _tensors(shown: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]] | None:
    """Return the inputs or outputs of a model; a daemon of an older version has those of a loaded
    one only.
    """
    found: Sequence[Mapping[str, Any]] | None = shown.get(key)
    return found if found is not None else (shown["info"] or {}).get(key)


def _platform(info: Mapping[str, Any]) -> tuple[str, str]:
    return _PLATFORMS.get(info["backend"], (info["backend"], info["backend"]))


def _metadata(tensor: Mapping[str, Any]) -> dict[str, Any]:
    datatype = DATATYPE_OF.get(tensor["type"], tensor["type"].upper())
    return {"name": tensor["name"], "datatype": datatype, "shape": _dimensions(tensor)}


def _dimensions(tensor: Mapping[str, Any]) -> list[int]:
    """Return dimensions with -1 for each that is free, and for an unknown number of them."""
    shape = tensor["shape"]
    return [-1] if shape is None else [n if isinstance(n, int) else -1 for n in shape]


async def answer_configuration(exchange: Exchange) -> None:
    """Answer with a model's configuration in Triton's form."""
    shown = await _described(exchange)
    platform, backend = _platform(shown)
    await exchange.send_json(
        {
            "name": shown["name"],
            "platform": platform,
            "backend": backend,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": 0,
            "input": [_configured(one) for one in _tensors(shown, "inputs") or ()],
            "output": [_configured(one) for one in _tensors(shown, "outputs") or ()],
            "instance_group": [
                {"name": shown["name"], **_count(shown), **_instances(shown)},
            ],
            "default_model_filename": shown["file"].rpartition("/")[2],
            "parameters": {},
        }
    )


def _instances(shown: ShownModel) -> dict[str, Any]:
    if (shown["info"] or {}).get("n_gpu_layers"):
        return {"kind": "KIND_MODEL"}  # GPUs have some or all layers of a language model
    return instances_on(shown.get("device") or CPU)


def instances_on(device: str) -> dict[str, Any]:
    """Return the kind of the instances that a device computes, and of a GPU its number. A device of
    another kind, or one that may share the work with the CPU, is the engine's choice: KIND_MODEL.
    """
    name, _, number = device.partition(".")
    if name in _CPUS:
        return {"kind": "KIND_CPU"}
    if name in _GPUS:
        return {"kind": "KIND_GPU", "gpus": [int(number) if number.isdecimal() else 0]}
    return {"kind": "KIND_MODEL"}


def _count(shown: ShownModel) -> dict[str, int]:
    """Return the computations at once: one for each thread, where the configuration names these."""
    threads = shown["options"].get("threads", 0)
    return {"count": threads} if threads > 0 else {}


def _configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    datatype = DATATYPE_OF.get(tensor["type"], tensor["type"].upper())
    datatype = "STRING" if datatype == TEXTS else datatype  # the configuration's own name
    return {
        "name": tensor["name"],
        "data_type": f"TYPE_{datatype}",
        "dims": _dimensions(tensor),
    }


async def answer_statistics(exchange: Exchange) -> None:
    """Answer with the counts of inferences of a model, or of all that the caller may use. They are
    those of all clients of the daemon, since the model was loaded, and failures those of this
    gateway, since its start.
    """
    async with exchange.turns.pool.lease(exchange.caller) as client:
        if "model" in exchange.params:
            models: list[str] = [(await client.show(requested_model(exchange)))["name"]]
        else:
            found = offered_to(
                exchange.caller, await client.models(), test_models=exchange.test_models
            )
            models = [info["name"] for info in found]
        engines = (await client.stats())["models"]
    counts = exchange.turns.inferences.counts_of
    await exchange.send_json(
        {"model_stats": [statistics_of(name, engines, counts(name)) for name in models]}
    )


def statistics_of(
    name: str, engines: Mapping[str, Mapping[str, Any]], failures: FailureCounts
) -> dict[str, Any]:
    """Return the counts of a model in the protocol's form, from those of the *engines* by their
    models; in a fleet a model has one on each node, `NAME@NODE`.
    """
    batches: dict[int, list[int]] = {}
    done = queue_us = runs = 0
    last_at = 0.0
    for place, engine in engines.items():
        if name not in (place, place.rpartition("@")[0]):
            continue
        done += engine.get("computed", 0)
        queue_us += engine.get("queue_us", 0)
        last_at = max(last_at, engine.get("computed_at", 0.0))
        for inputs, number, microseconds in engine.get("batches", ()):
            counts = batches.setdefault(inputs, [0, 0])
            counts[0] += number
            counts[1] += microseconds
            runs += number
    # The computation of several requests counts for each of them, as it does for Triton.
    compute_us = sum(inputs * microseconds for inputs, (_, microseconds) in batches.items())
    unmeasured = ("compute_input", "compute_output", "cache_hit", "cache_miss")
    return {
        "name": name,
        "version": MODEL_VERSION,
        "last_inference": int(last_at * 1000),
        "inference_count": done,
        "execution_count": runs,
        "inference_stats": {
            "success": _times(done, queue_us + compute_us),
            "fail": {"count": failures.failed, "ns": round(failures.failed_s * 1e9)},
            "queue": _times(done, queue_us),
            "compute_infer": _times(done, compute_us),
            **{part: _times(0, 0) for part in unmeasured},
        },
        "batch_stats": [
            {
                "batch_size": inputs,
                "compute_input": _times(0, 0),
                "compute_infer": _times(number, microseconds),
                "compute_output": _times(0, 0),
            }
            for inputs, (number, microseconds) in sorted(batches.items())
        ],
    }


def _times(count: int, microseconds: int) -> dict[str, int]:
    return {"count": count, "ns": 1000 * microseconds}


async def _usable(exchange: Exchange) -> list[ModelInfo]:
    async with exchange.turns.pool.lease(exchange.caller) as client:
        models = await client.models()
    return offered_to(exchange.caller, models, test_models=exchange.test_models)


async def answer_index(exchange: Exchange) -> None:
    """Answer with the models that the caller may use, and whether they are loaded."""
    request, _ = exchange.read_fields(INDEX, None if exchange.body else {})
    found = [
        {
            "name": info["name"],
            "version": MODEL_VERSION,
            "state": _STATES.get(info["state"], "UNAVAILABLE"),
            "reason": _reason(info),
        }
        for info in await _usable(exchange)
        if info["state"] == "ready" or not request.ready
    ]
    await exchange.send_json(found)


def _reason(info: ModelInfo) -> str:
    if info["state"] == "failed" and info["error"] is not None:
        return error_from_wire(info["error"]).message_for_people
    return "unloaded" if info["state"] == "cold" else ""


async def load_model(exchange: Exchange) -> None:
    """Load a model, for an operator.

    :raises PermissionDenied: the caller is not one.
    """
    name, operator = requested_model(exchange), exchange.caller.as_operator()
    _check_parameters(exchange, LOAD)
    try:
        async with exchange.turns.pool.lease(operator) as client:
            await _load(client, name)
    except PermissionDenied:
        raise
    except InferdError as exc:
        exc.message = f"failed to load {name[:100]!r}: {exc.message}"
        raise
    await exchange.send_json({})


async def _load(client: AsyncClient, name: str) -> None:
    graph = await client.load_by_name(name)
    with anyio.move_on_after(CLOSE_S_MAX, shield=True):
        await client.unload(graph, keep=True)


async def unload_model(exchange: Exchange) -> None:
    """Unload a model that is not in use, for an operator.

    :raises PermissionDenied: the caller is not one.
    """
    name, operator = requested_model(exchange), exchange.caller.as_operator()
    _check_parameters(exchange, UNLOAD)
    await exchange.turns.pool.end_kept()
    async with exchange.turns.pool.lease(operator) as client:
        await client.unload_model(name)
    await exchange.send_json({})


def _check_parameters(exchange: Exchange, table: FieldTable[LoadRequest]) -> None:
    """Check that a request has no parameters with an effect.

    :raises UnsupportedOperation: it has one.
    """
    request, _ = exchange.read_fields(table, None if exchange.body else {})
    for name in request.parameters or {}:
        if name not in _UNUSED_PARAMETERS:
            raise UnsupportedOperation(
                f"the parameter {name[:100]!r} is not supported",
                hint="the daemon's configuration has the files and settings of models",
                data={"param": "parameters"},
            )
