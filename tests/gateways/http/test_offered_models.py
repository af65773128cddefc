"""The lists of models of all APIs, which offer no test models to people beside others."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from inferd import Client
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway, keyed_gateway

CONFIG = echo_model("slow") + f"[models.real]\nfile = {json.dumps(__file__)}\n"
LISTS = {
    "/v1/models": ("data", "id"),
    "/api/tags": ("models", "name"),
}


def names_at(running: RunningGateway, path: str, key: str = "") -> list[str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found = httpx.get(running.url + path, headers=headers, timeout=CALL_S_MAX).json()
    models, name = LISTS[path]
    return [each[name] for each in found[models]]


@pytest.mark.parametrize("path", LISTS)
def test_test_models_are_listed_only_if_an_option_or_a_key_asks_for_them(
    daemon: RunningDaemon, http: RunningGateway, tmp_path: Path, path: str
) -> None:
    assert names_at(http, path) == ["real"]
    with gateway(daemon, "--test-models") as running:
        assert sorted(names_at(running, path)) == ["echo", "real", "slow"]
    with keyed_gateway(daemon, tmp_path, ["ada", "bob"]) as (running, keys):
        assert names_at(running, path, keys["ada"]) == ["real"]
    file = tmp_path / "keys.toml"
    file.write_text(file.read_text().replace("[keys.bob]", '[keys.bob]\nmodels = ["echo", "real"]'))
    with gateway(daemon, "--keys", str(file)) as running:
        assert sorted(names_at(running, path, keys["bob"])) == ["echo", "real"]


def test_anthropics_list_has_no_test_models(web: httpx.Client) -> None:
    found = web.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [each["id"] for each in found["data"]] == ["real"]


def test_a_test_model_answers_requests_that_name_it_and_is_listed_as_loaded(
    web: httpx.Client, client: Client
) -> None:
    fields = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    answer = web.post("/v1/chat/completions", json=fields).json()
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert web.get("/v1/models/echo").json()["id"] == "echo"
    assert [each["name"] for each in web.get("/api/ps").json()["models"]] == ["echo"]


def test_the_states_of_models_have_those_that_are_offered(web: httpx.Client) -> None:
    found = web.get("/v1/inferd/models").json()
    offered = {each["id"]: each["offered"] for each in found["data"]}
    assert offered == {"echo": False, "slow": False, "real": True}
    assert found["preferred"] == "real"


def test_an_error_names_no_call_of_the_protocol(web: httpx.Client) -> None:
    answer = web.post("/v1/completions", json={"model": "echo", "prompt": [10**6]})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "tokenize" not in message and message.endswith(")")
