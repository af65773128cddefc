"""The load of a node, from answers of a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd import AsyncClient
from inferd.gateways.fleet.relay.load import LoadQuery, TokenTimeLearner, node_load
from inferd.gateways.fleet.routing.loads import ModelLoad
from inferd.testing import running_daemon
from tests.onnx_graphs import affine, write_graphs

STATS: dict[str, Any] = {
    "draining": False,
    "sessions": 3,
    "sessions_waiting": 1,
    "sessions_max": 8,
    "memory": {"load_free_bytes": 500, "load_evictable_bytes": 40},
    "models": {},
}
MODEL: dict[str, Any] = {
    "name": "m",
    "state": "cold",
    "backend": "llama",
    "file": "/models/m.gguf",
    "size_bytes": 1_000_000_000,
    "slots": 2,
    "progress": 0.0,
    "load_s": 0.0,
    "need_bytes": 600,
}
COST: dict[str, Any] = {
    "ubatch_s": 0.0512,
    "token_s": 0.0003,
    "position_s": 1e-6,
    "token_s_least": 0.0002,
}
TASK: dict[str, Any] = {
    "state": "running",
    "priority": "normal",
    "effective_priority": None,
    "position": None,
    "prompt_tokens": 3,
    "computed_tokens": None,
    "output_tokens": 0,
}


def load_of(**fields: object) -> ModelLoad:
    """Return the load of a model with other *fields*."""
    return node_load(1, STATS, [MODEL | fields], [], TokenTimeLearner()).models["m"]


def test_a_report_has_the_memory_for_loads_and_the_need_of_each_model() -> None:
    load = node_load(1, STATS, [MODEL], [], TokenTimeLearner())
    assert (load.free_bytes, load.evictable_bytes, load.sessions) == (500, 40, 4)
    assert load.models["m"].need_bytes == 600 and load.models["m"].slots == 2


def test_a_load_takes_as_long_as_the_last_one_or_as_its_file_lets_expect() -> None:
    assert load_of().load_s == pytest.approx(3.0)
    assert load_of(load_s=7.0).load_s == 7.0
    loading = load_of(load_s=8.0, state="loading", progress=0.75)
    assert loading.loading and loading.load_s == pytest.approx(2.0)


def test_models_of_one_connection_are_left_out() -> None:
    assert node_load(1, STATS, [MODEL | {"file": ""}], [], TokenTimeLearner()).models == {}


def test_all_names_of_a_model_have_the_load_of_its_process() -> None:
    names = [MODEL, MODEL | {"name": "coder", "of": "m"}, MODEL | {"name": "other"}]
    tasks = [TASK | {"model": "m"}, TASK | {"model": "coder"}, TASK | {"model": "gone"}]
    stats = STATS | {"models": {"m": {"step_cost": COST}}}
    models = node_load(1, stats, names, tasks, TokenTimeLearner()).models
    assert models["m"] == models["coder"]
    assert sum(models["m"].running) == 2 and sum(models["other"].running) == 0
    assert models["m"].prompt_token_s is not None and models["other"].prompt_token_s is None


def test_a_report_has_the_time_of_a_prompt_token_once_steps_were_computed() -> None:
    assert load_of().prompt_token_s is None
    times = TokenTimeLearner()

    def learned(**changes: object) -> float | None:
        stats = STATS | {"models": {"m": {"step_cost": COST | changes}}}
        return node_load(1, stats, [MODEL], [], times).models["m"].prompt_token_s

    assert learned() == pytest.approx(0.0004)
    assert learned(token_s_least=0.01) == 0.01


@pytest.mark.asyncio
@pytest.mark.process
async def test_a_node_with_a_loaded_graph_reports_its_load(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine()})
    async with (
        running_daemon(models_dir=tmp_path) as daemon,
        AsyncClient(daemon.socket) as client,
        client.graph("affine"),
    ):
        load = await LoadQuery().run(client)
    assert "affine" in load.models
