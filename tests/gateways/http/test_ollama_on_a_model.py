"""Ollama's API on SmolLM2: schemas, options and the description of a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import ollama
import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.models import gemma3, smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "How old is Ada, and where does she live?"}]
OPTIONS = ("--hold-headers", "30", "--test-models")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / f"{MODEL}.gguf").symlink_to(smollm2())
    (models / "gemma.gguf").symlink_to(gemma3())
    config = f"[models.{MODEL}]\nslots = 2\nctx-size = 512\n" + echo_model("echo")
    with running_daemon(config, models_dir=models) as running:
        yield running


@pytest.fixture(scope="module")
def api(http: RunningGateway) -> Iterator[ollama.Client]:
    with ollama.Client(host=http.url, timeout=CALL_S_MAX) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_shapes_the_answer(stream: bool, api: ollama.Client) -> None:
    person = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "city": {"enum": ["Paris", "London"]},
        },
        "required": ["age", "city"],
        "additionalProperties": False,
    }
    options = {"temperature": 0, "num_predict": 40, "num_ctx": 4096}
    chat: Any = api.chat
    reply = chat(MODEL, QUESTION, format=person, options=options, stream=stream)
    parts = list(reply) if stream else [reply]
    found = json.loads("".join(part.message.content or "" for part in parts))
    assert 0 <= found["age"] <= 120 and found["city"] in ("Paris", "London")
    assert parts[-1].done_reason == "stop"


def test_equal_seeds_give_equal_answers(api: ollama.Client) -> None:
    options = {"seed": 7, "num_predict": 8, "temperature": 1.0, "top_k": 40, "top_p": 0.9}
    first, second = (api.generate(MODEL, "Once", raw=True, options=options) for _ in range(2))
    assert first.response == second.response and first.eval_count == 8


def test_the_description_is_that_of_the_file(api: ollama.Client) -> None:
    shown = api.show(MODEL)
    assert shown.details is not None and shown.modelinfo is not None
    assert (shown.details.family, shown.details.parameter_size) == ("llama", "134.5M")
    assert shown.modified_at is not None
    assert shown.modified_at.timestamp() == pytest.approx(smollm2().stat().st_mtime)
    assert shown.modelinfo["llama.context_length"] == 512
    assert shown.template is not None and "<|im_start|>" in shown.template
    assert shown.capabilities == ["completion", "embedding"]


def test_the_lists_have_the_facts_of_files_that_were_never_loaded(
    api: ollama.Client, http: RunningGateway
) -> None:
    api.chat(MODEL, QUESTION, options={"num_predict": 1})
    files = {MODEL: smollm2(), "gemma": gemma3()}
    families = {MODEL: "llama", "gemma": "gemma3", "echo": "echo"}
    listed = {each.model: each for each in api.list().models}
    assert {name: each.details.family for name, each in listed.items() if each.details} == families
    for name, file in files.items():
        each = listed[name]
        assert each.details is not None and each.details.quantization_level
        assert each.modified_at is not None
        assert each.modified_at.timestamp() == pytest.approx(file.stat().st_mtime)
        with httpx.Client(base_url=http.url, timeout=CALL_S_MAX) as web:
            created = web.get(f"/v1/models/{name}").json()["created"]
            header = {"anthropic-version": "2023-06-01"}
            at = web.get(f"/v1/models/{name}", headers=header).json()["created_at"]
        assert created == int(file.stat().st_mtime)
        assert datetime.fromisoformat(at).timestamp() == created
    [loaded] = [each for each in api.ps().models if each.name == MODEL]
    assert loaded.details is not None and loaded.details.family == "llama"
    echo = listed["echo"].modified_at
    assert echo is not None and echo.year == 1  # as Ollama's own zero
