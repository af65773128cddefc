"""Ollama's API on SmolLM2: schemas, options and the description of a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.models import smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "How old is Ada, and where does she live?"}]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / f"{MODEL}.gguf").symlink_to(smollm2())
    config = f"[models.{MODEL}]\nslots = 2\nctx-size = 512\n"
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
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.template is not None and "<|im_start|>" in shown.template
    assert shown.capabilities == ["completion", "embedding"]
