"""Each key of other wasi-nn systems has the effect that docs/wasi-nn.md states, over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from inferd.backends.errors import InferdError, InvalidArgument
from inferd.daemon.calls.models import MEMORY_POLICY
from inferd.testing import RunningDaemon
from tests.raw import RawClient
from tools.reference_keys import (
    ROWS,
    SYSTEMS,
    TOP,
    TURN,
    WASI_NN_BACKEND,
    Row,
    all_names,
    places_of,
)

BEGUN = {"backend", "memory_policy", "memory", "logging", "performance"}
"""The objects of the configuration that `init_backend_with_config` reads."""


def nested(place: str, key: str, row: Row) -> dict[str, Any]:
    """Return the configuration that has a row's key in its place."""
    value: Any = {key: row.value}
    for name in reversed([] if place in (TOP, TURN) else place.split(".")):
        value = {name: value}
    return {**row.beside, **value}


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as raw:
        yield raw


def load(client: RawClient, config: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(config)
    return dict(client.call("load_by_name_with_config", name="echo", config=text))


def parameters(client: RawClient, context: int) -> dict[str, dict[str, Any]]:
    found = client.call("parameters", context=context)["parameters"]
    return {parameter["name"]: parameter for parameter in found}


def check(client: RawClient, row: Row, key: str, reports: Mapping[str, Any], context: int) -> None:
    """Check the effect of a key: the values in force, and every report of one that is not."""
    adjusted = reports.get("adjusted", {}).keys()
    assert list(reports.get("ignored", ())) == ([key] if row.effect == "ignored" else [])
    assert adjusted == (row.used.keys() if row.is_adjusted else set())
    not_applied = reports.get("not_applied", {}).keys()
    assert not_applied == (row.used.keys() if row.effect == "operator" else set())
    in_force = parameters(client, context) if row.used else {}
    for name, value in row.used.items():
        if row.effect == "sets":
            assert in_force[name]["value"] == value
            assert in_force[name]["origin"] != "built-in"
        else:
            assert in_force[name]["value"] != value


def check_load(client: RawClient, row: Row, key: str, config: dict[str, Any]) -> None:
    if row.effect == "refused":
        with pytest.raises(InferdError, match=key) as caught:
            load(client, config)
        assert caught.value.number == row.number
        return
    if row.effect == "ignored":
        with pytest.raises(InvalidArgument, match="has no effect here: "):
            load(client, {**config, "strict": True})
    result = load(client, config)
    context = client.call("init_execution_context", graph=result["graph"])["context"]
    check(client, row, key, result, context)


def check_input(client: RawClient, row: Row, key: str, config: dict[str, Any]) -> None:
    context = client.context()
    if row.effect == "refused":
        with pytest.raises(InferdError, match=key) as caught:
            client.set_input(context, json.dumps(config).encode(), index=1)
        assert caught.value.number == row.number
    else:
        client.set_input(context, json.dumps(config).encode(), index=1)
        check(client, row, key, client.metadata(context), context)


def check_turn(client: RawClient, row: Row, key: str, config: dict[str, Any]) -> None:
    context = client.context()
    text = json.dumps({"n_predict": 2, **config})
    result = client.call("run_inference", context=context, tensor={"data": b"hi"}, config=text)
    assert result["metadata"]["ignored"] == [] and result["metadata"]["not_applied"] == {}
    in_force = parameters(client, context)
    for name, value in row.used.items():
        assert (in_force[name]["value"], in_force[name]["origin"]) == (value, "turn")


def check_begin(client: RawClient, row: Row, key: str, config: dict[str, Any]) -> None:
    """Check a key of `init_backend`: the memory policy holds for later graphs."""
    result = client.call("init_backend", config=json.dumps(config))
    [name] = row.used or [key]
    assert result.get("ignored", []) == ([] if name in MEMORY_POLICY else [name])
    if name in MEMORY_POLICY:
        check(client, row, key, {}, client.context())


@pytest.mark.parametrize("name", ROWS)
def test_a_key(name: str, client: RawClient) -> None:
    row, checked = ROWS[name], set[tuple[str, str]]()
    for system, place, key in places_of(name):
        config = nested(place, key, row)
        if place == TURN:
            check_turn(client, row, key, config)
            continue
        if (place, key) not in checked:
            checked.add((place, key))
            check_load(client, row, key, config)
            check_input(client, row, key, config)
        if system == "B" and (place in BEGUN or key in WASI_NN_BACKEND["backend"]):
            check_begin(client, row, key, config)


def test_every_key_of_the_systems_has_a_row() -> None:
    assert all_names() == ROWS.keys()
    assert {name: len(keys) for name, keys in SYSTEMS.items()} == {
        "W": 181,
        "A": 7,
        "L": 24,
        "B": 151,
    }


OUTPUTS: dict[str, tuple[int, type]] = {
    "input_tokens": (1, int),
    "output_tokens": (1, int),
    "llama_build_number": (1, int),
    "llama_commit": (1, str),
    "n_embedding": (0, int),
    "embedding": (0, list),
}
"""By a key of WasmEdge's JSON outputs, the index of the output and the type of the value."""


@pytest.mark.parametrize("key", OUTPUTS)
def test_a_key_of_an_output(key: str, client: RawClient) -> None:
    index, kind = OUTPUTS[key]
    context = client.context(config='{"embedding": true}')
    if index == 1:
        assert type(client.metadata(context)[key]) is kind, "before any input"
    client.set_input(context, b"hello")
    client.call("compute", context=context)
    found = json.loads(client.output(context, index))
    assert type(found[key]) is kind
    if key == "embedding":
        assert len(found[key]) == found["n_embedding"] and all(type(x) is float for x in found[key])
