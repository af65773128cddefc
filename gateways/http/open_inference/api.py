"""The endpoints of the Open Inference Protocol, and inference."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ....backends.errors import InferdError, UnsupportedOperation
from ....ipc.names import Priority
from ..callers import RequestKind
from ..exchange import Endpoint, Exchange
from .bodies import THREAD_BYTES_MIN, read_body, send_body
from .fields import (
    INDEX,
    INFER,
    INFER_VERSION,
    LOAD,
    REGISTER,
    UNLOAD,
    InferRequest,
    RequestParameters,
)
from .models import (
    MODEL_VERSION,
    answer_configuration,
    answer_index,
    answer_live,
    answer_metadata,
    answer_model_ready,
    answer_ready,
    answer_server,
    answer_statistics,
    load_model,
    requested_model,
    unload_model,
)
from .regions import (
    SharedTensors,
    answer_no_regions,
    answer_regions,
    find_shared,
    forget_no_regions,
    read_shared,
    refuse_region,
    register_region,
    unregister_regions,
)
from .tensors import read_inputs, write_outputs

_CLASSES: dict[int, Priority] = {0: "normal", 1: "high", 2: "normal"}
"""The priority classes by the protocol's numbers, of which 1 is the highest; others are `low`."""


async def answer_infer(exchange: Exchange) -> None:
    """Answer with the outputs of a graph."""
    model = requested_model(exchange)
    body = await read_body(exchange)
    request, _ = exchange.read_fields(INFER, body.fields)
    parameters = request.parameters or RequestParameters()
    if parameters.sequence_id:
        raise UnsupportedOperation(
            "sequences of requests are not supported",
            hint="send the state as an input, and take it from the outputs",
            data={"param": "parameters.sequence_id"},
        )
    shared = find_shared(exchange, request)
    contents = await read_shared(exchange, shared) if shared.inputs else {}
    if max((body.size, *map(len, contents.values()))) >= THREAD_BYTES_MIN:
        inputs = await exchange.run_in_thread(read_inputs, request, body, contents)
    else:
        inputs = read_inputs(request, body, contents)
    exchange.body, body = b"", None  # type: ignore[assignment]  # else they stay in memory twice
    contents.clear()
    outputs = await exchange.turns.compute_tensors(
        exchange.caller,
        model,
        inputs,
        exchange.caller.class_of(None, _CLASSES.get(parameters.priority, "low")),
        parameters.timeout / 1e6 if parameters.timeout else math.inf,
        exchange.take_memory,
    )
    await _send(exchange, model, request, outputs, shared)


async def _send(
    exchange: Exchange, model: str, request: InferRequest, outputs: Any, shared: SharedTensors
) -> None:
    size = sum(len(tensor.data) for _, tensor in outputs)
    if size >= THREAD_BYTES_MIN:
        written = await exchange.run_in_thread(write_outputs, request, outputs, shared.outputs)
    else:
        written = write_outputs(request, outputs, shared.outputs)
    for part, data in written.shared:
        await part.write(data)
    head: dict[str, Any] = {"model_name": model, "model_version": MODEL_VERSION}
    if request.id:
        head["id"] = request.id
    head["outputs"] = written.outputs
    await send_body(exchange, head, written.binary, size)


ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}


def error_body(error: InferdError, status: int) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": error.text_for_people}


_read = partial(Endpoint, kind=RequestKind.READ)
_MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_REPOSITORY = "/v2/repository/models/{model}"
_MEMORIES = {
    "system": (answer_regions, register_region, unregister_regions),
    "cuda": (answer_no_regions, refuse_region, forget_no_regions),
}


class OpenInferenceApi:
    """The Open Inference Protocol."""

    title = "OpenInference"
    prefixes = ("/v2",)
    tables = (INFER, INFER_VERSION, INDEX, LOAD, UNLOAD, REGISTER)
    endpoints = (
        _read(method="GET", path="/v2", answer=answer_server),
        Endpoint(method="GET", path="/v2/health/live", answer=answer_live, public=True),
        Endpoint(method="GET", path="/v2/health/ready", answer=answer_ready, public=True),
        _read(method="GET", path="/v2/models/stats", answer=answer_statistics),
        *(
            endpoint
            for model in _MODELS
            for endpoint in (
                Endpoint(method="POST", path=f"{model}/infer", answer=answer_infer, tensors=True),
                _read(method="GET", path=f"{model}/ready", answer=answer_model_ready),
                _read(method="GET", path=f"{model}/config", answer=answer_configuration),
                _read(method="GET", path=f"{model}/stats", answer=answer_statistics),
                _read(method="GET", path=model, answer=answer_metadata),
            )
        ),
        _read(method="POST", path="/v2/repository/index", answer=answer_index),
        Endpoint(method="POST", path=f"{_REPOSITORY}/load", answer=load_model),
        Endpoint(method="POST", path=f"{_REPOSITORY}/unload", answer=unload_model),
        *(
            _read(method=method, path=f"/v2/{memory}sharedmemory{path}", answer=answer)
            for memory, (status, register, unregister) in _MEMORIES.items()
            for method, path, answer in (
                ("GET", "/status", status),
                ("GET", "/region/{region}/status", status),
                ("POST", "/region/{region}/register", register),
                ("POST", "/region/{region}/unregister", unregister),
                ("POST", "/unregister", unregister),
            )
        ),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


OPEN_INFERENCE = OpenInferenceApi()
