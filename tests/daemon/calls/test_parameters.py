"""Parameters over a real socket: values in force and their sources."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferd import AsyncClient, Client, InvalidArgument
from inferd.backends.params import PARAMETERS
from inferd.testing import running_daemon

CONFIG = """
[defaults]
top-k = 7
[models.echo]
backend = "echo"
top-p = 0.5
"""


@pytest.mark.asyncio
async def test_the_call_returns_each_value_in_force_and_its_source() -> None:
    async with running_daemon(CONFIG) as daemon, AsyncClient(daemon.socket) as client:
        graph = await client.load_by_name_with_config("echo", {"min_p": 0.25})
        context = await client.init_execution_context(graph)
        await client.set_options(context, {"temp": 0})
        await client.chat(context, "hi", options={"mirostat": 2, "samplers": "k"})

        found = {p["name"]: p for p in await client.parameters(context)}
        held = {name: (p["value"], p["origin"]) for name, p in found.items()}
        assert held["top-k"] == (7, "model") and held["top-p"] == (0.5, "model")
        assert held["min-p"] == (0.25, "graph") and held["temp"] == (0, "session")
        assert held["typ-p"] == (1, "built-in")
        assert held["samplers"] == (["temperature"], "turn")
        assert "mirostat" in found["samplers"]["adjusted"]
        assert found["top-k"]["adjusted"] == ""


def test_the_synchronous_client_has_the_call_and_a_turn_cannot_set_a_models_parameter() -> None:
    with (
        running_daemon(CONFIG) as daemon,
        Client(daemon.socket) as client,
        client.session("echo", options={"top-k": 3}) as session,
    ):
        assert {p["name"]: p["value"] for p in session.parameters()}["top-k"] == 3
        with pytest.raises(InvalidArgument, match="threads: applies to a model"):
            session.chat("hi", options={"threads": 1})
        assert session.chat("hi") == "hi"


@pytest.mark.asyncio
async def test_documents_of_wasi_nn_backend_are_accepted_unchanged() -> None:
    async with running_daemon() as daemon, AsyncClient(daemon.socket) as client:
        graph = await client.load_by_name_with_config(
            "echo",
            '{"n_gpu_layers":98,"ctx_size":2048,"n_predict":512,"batch_size":512,"threads":8,'
            '"temp":0.7,"top_p":0.95,"repeat_penalty":1.10}',
        )
        assert graph.ignored == [] and set(graph.not_applied) <= {"n-gpu-layers", "threads"}
        context = await client.init_execution_context(graph)
        nested = (
            '{"sampling":{"dynatemp":{"range":0.1,"exponent":1.2}},"memory_management":'
            '{"cache_policy":{"enable_prompt_cache":true,"retention_ms":300000}}}'
        )
        await client.set_input(context, 1, nested)
        found = {p["name"]: (p["value"], p["origin"]) for p in await client.parameters(context)}
        assert found["ctx-size"] == (2048, "graph") and found["n-predict"] == (512, "graph")
        assert found["temp"] == (0.7, "graph") and found["repeat-penalty"] == (1.1, "graph")
        assert found["dynatemp-range"] == (0.1, "session")
        assert found["retention-ms"] == (300_000, "session")


# Parameters that do not apply.

OTHERS: dict[str, tuple[Any, Any]] = {
    "batch-size": (4096, 512),
    "threads": (300, 2),
    "n-gpu-layers": (7, 0),
    "main-gpu": (1, -1),
    "tensor-split": ([1, 2], []),
    "cpu-moe": (True, False),
    "n-cpu-moe": (2, 0),
    "threads-batch": (3, 0),
    "cache-type-k": ("q8_0", "f16"),
    "cache-type-v": ("q8_0", "f16"),
    "flash-attn": ("on", "auto"),
    "swa-full": (True, False),
    "mmap": (False, True),
    "mlock": (True, False),
    "numa": ("distribute", "off"),
    "rope-scaling": ("yarn", ""),
    "rope-freq-base": (5.0, 0.0),
    "rope-freq-scale": (0.5, 0.0),
    "yarn-ext-factor": (1.0, -1.0),
    "yarn-attn-factor": (1.0, -1.0),
    "yarn-beta-fast": (1.0, -1.0),
    "yarn-beta-slow": (1.0, -1.0),
    "yarn-orig-ctx": (100, 0),
    "override-kv": (["a=int:1"], []),
    "slots": (9, 3),
    "chat-template": ("{{ messages }}", ""),
    "chat-template-file": ("other.jinja", ""),
    "tool-format": ("hermes", ""),
    "similarity-model": ("other", ""),
    "similarity-wait-ms": (5, 1000),
}
"""By name of a model's parameter, a value that a client requests, and the value in force."""
OPERATORS = """
[daemon]
cores = 2
[models.fixed]
backend = "echo"
slots = 3
keep-alive = 60
"""


def test_each_parameter_of_a_model_is_requested_below() -> None:
    of_models = {p.name for p in PARAMETERS if p.level == "model"}
    elsewhere = {"ctx-size", "keep-alive", "mmproj", "draft-model"}
    assert OTHERS.keys() == of_models - elsewhere


@pytest.mark.parametrize("key", ["slots", "threads", "flash-attn", "keep-alive"])
def test_a_later_request_of_the_value_in_force_is_no_longer_reported(key: str) -> None:
    other, in_force = {**OTHERS, "keep-alive": (5.0, 60.0)}[key]
    with running_daemon(OPERATORS) as daemon, Client(daemon.socket) as client:
        context = client.init_execution_context(client.load_by_name("fixed"))
        for value, reported in ((other, {key: in_force}), (in_force, {})):
            client.set_input(context, 1, msgspec.json.encode({key: value}))
            assert metadata(client, context)["not_applied"] == reported


def test_not_applied_has_the_value_in_force() -> None:
    requested = {key: other for key, (other, _) in OTHERS.items()}
    in_force = {key: value for key, (_, value) in OTHERS.items()}
    with running_daemon(OPERATORS) as daemon, Client(daemon.socket) as client:
        graph = client.load_by_name_with_config("fixed", requested)
        assert graph.not_applied == in_force
        [loaded] = [m for m in client.models() if m["name"] == "fixed"]
        assert loaded["slots"] == in_force["slots"]
        context = client.init_execution_context(client.load_by_name("fixed"))
        assert metadata(client, context)["not_applied"] == {}
        client.set_input(context, 1, msgspec.json.encode(requested | {"keep-alive": 5}))
        assert metadata(client, context)["not_applied"] == in_force | {"keep-alive": 60.0}
        found = {p["name"]: p["value"] for p in client.parameters(context)}
        assert {key: found[key] for key in in_force} == in_force


@pytest.mark.parametrize("requested", [{"threads": 0}, {"n-gpu-layers": 0}, {"ctx-size": 0}])
def test_a_choice_that_is_left_to_the_daemon_is_applied(requested: dict[str, int]) -> None:
    with running_daemon(OPERATORS) as daemon, Client(daemon.socket) as client:
        graph = client.load_by_name_with_config("fixed", requested)
        assert graph.not_applied == {}
        context = client.init_execution_context(graph)
        client.set_input(context, 1, msgspec.json.encode(requested))
        assert metadata(client, context)["not_applied"] == {}


def metadata(client: Client, context: int) -> dict[str, Any]:
    return dict(msgspec.json.decode(client.get_output(context, 1)))
