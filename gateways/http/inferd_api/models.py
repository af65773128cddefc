"""`/v1/inferd/models`: the state of each model, and its changes by operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import msgspec

from ....backends.errors import InferdError, error_from_wire
from ....ipc.client import AsyncClient, ModelInfo
from ....ipc.model_names import is_graph, preferred_model
from ..callers import Caller
from ..exchange import Exchange, offered_to
from ..exchange.exchange import status_of
from ..exchange.streaming import EVENT_STREAM, STREAM_HEADERS
from ..limits import CLOSE_S_MAX
from .fields import LOAD, SWAP, UNLOAD

_STATES = {"cold": "unloaded", "ready": "loaded"}
"""The daemon's names of states that have another name here, with this name."""


async def answer_models(exchange: Exchange) -> None:
    """Answer with the state of each model that the caller may use."""
    caller, test_models = exchange.caller, exchange.test_models
    async with exchange.turns.pool.lease(caller) as client:
        models, stats = await client.models(), await client.stats()
    memory = stats.get("memory", {})
    await exchange.send_json(models_of(caller, models, memory, test_models=test_models))


async def answer_model(exchange: Exchange) -> None:
    """Answer with the state of a model and, of a graph, its inputs and outputs. They can be
    thousands, so that the states of all models have none.
    """
    name = exchange.caller.check_model(exchange.params["model"])
    async with exchange.turns.pool.lease(exchange.caller) as client:
        model = await client.show(name)
    tensors = {"inputs": model["inputs"], "outputs": model["outputs"]}
    await exchange.send_json(_status(model) | tensors)


def models_of(
    caller: Caller, models: list[ModelInfo], memory: dict[str, Any], *, test_models: bool
) -> dict[str, Any]:
    """Return the models that a caller may use, in the form of the API, and the one of them with
    which a chat begins, by the daemon's *memory*.
    """
    offered = offered_to(caller, models, test_models=test_models)
    names = {model["name"] for model in offered}
    data = [
        {**_status(model), "offered": model["name"] in names}
        for model in models
        if caller.may_use(model["name"])
    ]
    return {"object": "list", "preferred": preferred_model(offered, memory), "data": data}


def _status(model: ModelInfo) -> dict[str, Any]:
    info, memory, has_process = model["info"] or {}, model["memory"], bool(model["pid"])
    error = model["error"]
    return {
        "object": "model.status",
        "id": model["name"],
        "state": _STATES.get(model["state"], model["state"]),
        "progress": model["progress"],
        "swapped_to": model["swapped_to"] or None,
        "size_bytes": model["size_bytes"],
        "memory_bytes": memory["total"] if memory else None,
        "resident_bytes": model["resident_bytes"] if has_process else None,
        "ctx_size": info.get("ctx_size"),
        "slots": info.get("slots"),
        "graph": is_graph(model),
        "generates": False if is_graph(model) else info.get("generates"),
        "reads": model.get("reads") or ["text"],
        "tasks": model["tasks"],
        "pinned": model["pinned"],
        "expires_s": model["expires_s"],
        "adapters": [adapter["name"] for adapter in model["adapters"]],
        "error": error and _shown_error(error),
    }


def _shown_error(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an error with the texts for people."""
    error = error_from_wire(fields)
    return {**fields, "message": error.message_for_people, "hint": error.hint_for_people}


async def load_model(exchange: Exchange) -> None:
    """Load a model, and answer once it is loaded, or with events of the progress.

    A client that disconnects cancels the load, unless others wait for it.
    """
    fields, _ = exchange.read_fields(LOAD)
    operator, fields.model = _operator(exchange.caller, fields.model)
    async with exchange.turns.pool.lease(operator) as client:
        if fields.stream:
            await _stream_load(exchange, client, fields.model)
        else:
            await _load(client, fields.model)
            await exchange.send_json(await _status_of(client, fields.model))


async def _load(client: AsyncClient, model: str, progress: Any = None) -> None:
    graph = await client.load_by_name(model, on_progress=progress)
    with anyio.move_on_after(CLOSE_S_MAX, shield=True):
        await client.unload(graph, keep=True)


async def _stream_load(exchange: Exchange, client: AsyncClient, model: str) -> None:
    await client.show(model)  # an unknown model is an error before the stream begins
    await exchange.start(200, EVENT_STREAM, STREAM_HEADERS)
    fractions, changed = [0.0], anyio.Event()

    def note_progress(fraction: float) -> None:
        fractions[0] = fraction
        changed.set()

    async def write_progress() -> None:
        nonlocal changed
        while True:
            data = {"model": model, "progress": round(fractions[0], 4)}
            await exchange.write(event("progress", data))
            await changed.wait()
            changed = anyio.Event()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(write_progress)
            await _load(client, model, note_progress)
            group.cancel_scope.cancel()
        last = event("loaded", await _status_of(client, model))
    except* InferdError as errors:
        error = errors.exceptions[0]
        assert isinstance(error, InferdError)
        last = event("error", exchange.api.error_body(error, status_of(error)))
    await exchange.write(last, more=False)


def event(kind: str, data: Any) -> bytes:
    """Return a server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(data))


async def unload_model(exchange: Exchange) -> None:
    """Unload a model."""
    fields, _ = exchange.read_fields(UNLOAD)
    operator, fields.model = _operator(exchange.caller, fields.model)
    await exchange.turns.pool.end_kept()
    async with exchange.turns.pool.lease(operator) as client:
        await client.unload_model(fields.model, force=fields.force)
        await exchange.send_json(await _status_of(client, fields.model))


async def swap_model(exchange: Exchange) -> None:
    """Replace a model by another, or end the swap."""
    fields, _ = exchange.read_fields(SWAP)
    operator, fields.model = _operator(exchange.caller, fields.model)
    fields.to = exchange.caller.check_model(fields.to)
    async with exchange.turns.pool.lease(operator) as client:
        await client.swap(fields.model, fields.to, mode=fields.mode, force=fields.force)
        await exchange.send_json(await _status_of(client, fields.model))


def _operator(caller: Caller, model: str) -> tuple[Caller, str]:
    """Return a caller as the gateway's own user, who may change models, and the name of *model*.

    :raises PermissionDenied: the caller is not an operator.
    :raises ModelNotFound: the caller may not use the model.
    """
    operator = caller.as_operator()
    return operator, caller.check_model(model)


async def _status_of(client: AsyncClient, name: str) -> dict[str, Any]:
    return _status(await client.show(name))
