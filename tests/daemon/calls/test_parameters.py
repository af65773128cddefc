"""Parameters over a real socket: values in force and their sources."""

from __future__ import annotations

import pytest

from inferd import AsyncClient, Client, InvalidArgument
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
