"""Values with a meaning of their own in OpenAI's, vLLM's, llama-server's and Ollama's requests."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

TEXT = "x" * 40
"""More than the 16 tokens that a completion has by default."""
MESSAGES = [{"role": "user", "content": TEXT}]
SENTINELS: list[dict[str, Any]] = [
    {"top_k": -1},
    {"top_k": 0},
    {"seed": -1},
    {"seed": None},
    {"repeat_last_n": -1},
    {"repeat_last_n": 0},
    {"dry_penalty_last_n": -1},
    {"n_keep": -1},
    {"top_n_sigma": -1},
    {"t_max_predict_ms": -1},
    {"keep_alive": -1},
]
"""Of llama-server and vLLM, as parameters of any path."""


@pytest.mark.parametrize(
    "fields", [{"max_tokens": -1}, {"max_tokens": None}, {"max_completion_tokens": -1}, *SENTINELS]
)
def test_a_chat(web: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"model": "echo", "messages": MESSAGES, **fields}
    found = web.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    [choice] = found.json()["choices"]
    assert choice["message"]["content"].startswith("x") and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": -1}, 40)],
)
def test_a_completion(web: httpx.Client, fields: dict[str, Any], tokens: int) -> None:
    found = web.post("/v1/completions", json={"model": "echo", "prompt": TEXT, **fields})
    assert found.json()["choices"][0]["text"] == "x" * tokens, found.text


def test_a_response(web: httpx.Client) -> None:
    body = {"model": "echo", "input": TEXT, "store": False, "max_output_tokens": None}
    found = web.post("/v1/responses", json=body)
    assert found.status_code == 200, found.text
    assert found.json()["status"] == "completed"


@pytest.mark.parametrize(
    "options",
    [
        {"num_predict": -1},
        {"num_predict": -2},
        {"num_ctx": 0},
        {"repeat_last_n": -1},
        {"top_k": -1},
        {"top_k": 0},
        {"seed": -1},
        {"num_gpu": -1},
        {"num_thread": 0},
        {"num_keep": -1},
    ],
)
def test_options_of_ollama(web: httpx.Client, options: dict[str, Any]) -> None:
    for path, prompt in (
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": TEXT}),
    ):
        body = {"model": "echo", "stream": False, "keep_alive": -1, **prompt, "options": options}
        found = web.post(path, json=body)
        assert found.status_code == 200, found.text
        assert found.json()["done_reason"] == "stop"


@pytest.mark.parametrize("keep_alive", [-1, "-1", "-1m", "5m", None])
def test_a_negative_keep_alive_of_ollama_does_not_unload(
    web: httpx.Client, keep_alive: object
) -> None:
    found = web.post("/api/generate", json={"model": "echo", "keep_alive": keep_alive})
    assert found.json()["done_reason"] == "load", found.text
    names = [model["name"] for model in web.get("/api/ps").json()["models"]]
    assert any(name.startswith("echo") for name in names)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repeat_penalty", "n_probs"])
def test_minus_one_is_refused_where_it_has_no_meaning(web: httpx.Client, field: str) -> None:
    body = {"model": "echo", "messages": MESSAGES, field: -1}
    assert web.post("/v1/chat/completions", json=body).status_code == 400
