"""The context that models serve, in the lists and descriptions of all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.models import smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CONFIGURED, DEFAULT, TRAINED = 512, 4096, 8192
SIZES = {"small": CONFIGURED, "plain": DEFAULT, "echo": 20}
OPTIONS = ("--hold-headers", "30", "--test-models")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    for name in ("small", "plain"):
        (models / f"{name}.gguf").symlink_to(smollm2())
    config = f"[models.small]\nslots = 2\nctx-size = {CONFIGURED}\n"
    with running_daemon(config + echo_model("echo", ctx_size=20), models_dir=models) as running:
        yield running


def contexts(web: httpx.Client, name: str) -> dict[str, Any]:
    """Return the context of a model by the place that has it."""
    listed = {each["id"]: each for each in web.get("/v1/models").json()["data"]}[name]
    one = web.get(f"/v1/models/{name}").json()
    assert one == listed
    with anthropic.Anthropic(base_url=str(web.base_url), api_key="none") as api:
        own = api.models.retrieve(name)
        assert own in list(api.models.list())
    shown = web.post("/api/show", json={"model": name}).json()
    family = shown["details"]["family"]
    parameters = dict(line.split(" ", 1) for line in shown["parameters"].splitlines())
    return {
        "max_model_len": one["max_model_len"],
        "n_ctx": one["meta"]["n_ctx"],
        "max_input_tokens": own.max_input_tokens,
        "context_length": shown["model_info"][f"{family}.context_length"],
        "num_ctx": int(parameters["num_ctx"]),
    }


@pytest.mark.parametrize("name", SIZES)
def test_every_api_has_the_served_context_before_and_after_the_load(
    web: httpx.Client, client: Client, name: str
) -> None:
    before = contexts(web, name)
    assert set(before.values()) == {SIZES[name]}, before
    graph = client.load_by_name(name)
    after = contexts(web, name)
    assert set(after.values()) == {SIZES[name]}, after
    info = client.show(name)["info"]
    assert info is not None and info["ctx_size"] == SIZES[name]
    client.unload(graph)


def test_the_trained_context_is_beside_it(web: httpx.Client) -> None:
    meta = web.get("/v1/models/small").json()["meta"]
    assert (meta["n_ctx"], meta["n_ctx_train"]) == (CONFIGURED, TRAINED)
    assert meta["n_params"] > 10**8 and meta["size"] == smollm2().stat().st_size
