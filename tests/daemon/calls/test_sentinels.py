"""Values of wasi_nn_backend that keep the configured ones, and its biases, over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from inferd.backends.errors import InferdError
from inferd.testing import RunningDaemon, running_daemon
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

CONFIGURED = {
    "temp": 0.5,
    "top_p": 0.5,
    "min_p": 0.25,
    "typical_p": 0.5,
    "repeat_penalty": 1.25,
    "dry_multiplier": 0.5,
    "dry_base": 2.5,
    "dry_allowed_length": 3,
    "dynatemp_range": 0.25,
    "dynatemp_exponent": 1.5,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.25,
    "n_probs": 2,
    "min_keep": 2,
}
"""Values of a load; all differ from the defaults."""
KEPT_IN_RUN_INFERENCE = {
    "n_predict": 3,
    "seed": 77,
    "top_k": 9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "last_n_penalty": 17,
    "dry_penalty_last_n": 19,
    "top_n_sigma": 2.0,
}
"""Values of a load whose ranges include -1, which means something else elsewhere."""
FAR = 10**9


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_tiny("llama", models)
    config = '[models.tiny]\nfile = "tiny-llama.gguf"\nctx-size = 512\n'
    with running_daemon(config, models_dir=models) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as raw:
        yield raw


def context_of(client: RawClient, model: str, config: Mapping[str, Any]) -> int:
    text = json.dumps(config)
    graph = client.call("load_by_name_with_config", name=model, config=text)["graph"]
    return int(client.call("init_execution_context", graph=graph)["context"])


def infer(client: RawClient, context: int, config: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps({"n_predict": 2, **config})
    result = client.call("run_inference", context=context, tensor={"data": b"hi"}, config=text)
    return dict(result["metadata"])


def in_force(client: RawClient, context: int) -> dict[str, Any]:
    found = client.call("parameters", context=context)["parameters"]
    return {p["name"].replace("-", "_"): p["value"] for p in found}


@pytest.mark.parametrize("values", [dict.fromkeys(CONFIGURED, -1), dict.fromkeys(CONFIGURED, -1.0)])
@pytest.mark.parametrize("model", ["echo", "tiny"])
def test_minus_one_in_a_turn_keeps_the_configured_values(
    client: RawClient, model: str, values: dict[str, float]
) -> None:
    context = context_of(client, model, {"sampling": CONFIGURED})
    for config in (values, {"runtime": values}):
        adjusted = infer(client, context, config)["adjusted"]
        found = in_force(client, context)
        expected = {**CONFIGURED, "typ_p": CONFIGURED["typical_p"]}
        expected.pop("typical_p")
        assert {name: found[name] for name in expected} == expected
        for name in expected:
            assert "-1 means the configured default" in adjusted[name.replace("_", "-")]
    infer(client, context, {"temp": 0.75})
    assert in_force(client, context)["temp"] == 0.75


@pytest.mark.parametrize("value", [-1, -1.0])
@pytest.mark.parametrize("model", ["echo", "tiny"])
def test_minus_one_in_run_inference_keeps_each_number(
    client: RawClient, model: str, value: float
) -> None:
    kept = KEPT_IN_RUN_INFERENCE
    context = context_of(client, model, kept)
    metadata = infer(client, context, dict.fromkeys(kept, value))
    assert metadata["seed"] == 77 and metadata["output_tokens"] == 3
    found = in_force(client, context)
    assert {name: found[name] for name in kept} == kept
    for name in kept:
        assert "-1 means the configured default" in metadata["adjusted"][name.replace("_", "-")]
    client.call("set_input", context=context, index=1, tensor={"data": b'{"top_k": -1}'})
    assert in_force(client, context)["top_k"] == -1
    metadata = infer(client, context, {"n_predict": -2})
    assert "-2 means" in metadata["adjusted"]["n-predict"]


@pytest.mark.parametrize("token", [FAR, -1, -(1 << 31), (1 << 31) - 1])
@pytest.mark.parametrize("model", ["echo", "tiny"])
def test_a_bias_outside_the_vocabulary_is_left_out_and_named(
    client: RawClient, model: str, token: int
) -> None:
    context = context_of(client, model, {"logit_bias": [[5, -1.0], [token, 0.5]]})
    for _ in range(2):
        assert f": {token}" in infer(client, context, {})["adjusted"]["logit-bias"]
    adjusted = infer(client, context, {"logit_bias": [[5, 1]]})["adjusted"]
    assert "vocabulary" not in adjusted.get("logit-bias", "")


def test_a_host_reads_at_index_1_what_a_turns_configuration_did_not_set(client: RawClient) -> None:
    context = context_of(client, "echo", {"max_time_ms": 5})
    unread = {"max_time_ms": 1, "stopping": {"grammar_triggers": {}}, "temp": -1, "top_p": 7}
    reply = infer(client, context, unread)
    read = metadata_at_1(client, context)
    for found in (reply, read):
        assert found["ignored"] == ["grammar_triggers", "max_time_ms"]
        assert found["adjusted"]["temp"] == "-1 means the configured default"
        assert "7 is outside" in found["adjusted"]["top-p"]
    infer(client, context, {})
    read = metadata_at_1(client, context)
    assert read["ignored"] == ["max_time_ms"] and read["adjusted"].keys() <= {"logit-bias"}


def test_a_refused_turn_leaves_the_notes_of_the_one_before(client: RawClient) -> None:
    context = context_of(client, "echo", {})
    infer(client, context, {"max_time_ms": 1})
    with pytest.raises(InferdError):
        infer(client, context, {"runtime": {}, "timeout_config": {}, "grammar": "root ::= ("})
    assert metadata_at_1(client, context)["ignored"] == ["max_time_ms"]


def metadata_at_1(client: RawClient, context: int) -> dict[str, Any]:
    found = json.loads(client.call("get_output", context=context, index=1)["data"])
    return dict(found)
