"""llama-server's own paths: tokens of texts, and prompts of chats."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from inferd import Client
from tests.echo import echo_model

CONFIG = echo_model("echo") + echo_model("other")
CHAT = [{"role": "user", "content": "hi"}]


def post(web: httpx.Client, path: str, **fields: Any) -> Any:
    response = web.post(path, json={"model": "echo", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def tokens_of(web: httpx.Client, content: Any, **fields: Any) -> Any:
    return post(web, "/tokenize", content=content, parse_special=False, **fields)["tokens"]


def test_a_text_becomes_tokens_and_these_the_text(web: httpx.Client) -> None:
    tokens = tokens_of(web, "Zürich")
    assert tokens == list("Zürich".encode())
    assert post(web, "/detokenize", tokens=tokens) == {"content": "Zürich"}


def test_the_texts_and_ids_of_a_list_are_joined(web: httpx.Client) -> None:
    assert tokens_of(web, ["a", 98, "cd"]) == [97, 98, 99, 100]


def test_pieces_are_texts_and_bytes_where_a_character_is_incomplete(web: httpx.Client) -> None:
    found = tokens_of(web, "aé", with_pieces=True)
    assert found == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]


def test_nothing_has_no_tokens(web: httpx.Client) -> None:
    assert post(web, "/tokenize") == {"tokens": []}
    assert post(web, "/detokenize") == {"content": ""}


def test_a_request_without_a_model_means_the_only_one_that_is_loaded(
    web: httpx.Client, client: Client
) -> None:
    post(web, "/tokenize", content="a")
    nameless = {"content": "a", "parse_special": False}
    client.unload_model("other")
    assert web.post("/tokenize", json=nameless).json() == {"tokens": [97]}
    client.load_by_name("other")
    response = web.post("/tokenize", json=nameless)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "model" and "2 models are offered" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/detokenize", {"tokens": [1 << 20]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/tokenize", {"content": {"a": 1}}, "content"),
        ("/tokenize", {"content": ["a", -1]}, "content.1"),
    ],
)
def test_what_is_not_a_text_or_a_token_is_refused_by_its_place(
    web: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    response = web.post(path, json={"model": "echo", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].replace("[", ".").replace("]", "") == param


def test_the_prompt_of_a_chat_has_as_many_tokens_as_are_counted(web: httpx.Client) -> None:
    prompt = post(web, "/apply-template", messages=CHAT)["prompt"]
    assert "hi" in prompt
    counted = post(web, "/v1/chat/completions/input_tokens", messages=CHAT)
    tokens = post(web, "/tokenize", content=prompt, add_special=True)["tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": len(tokens)}
    answered = post(web, "/v1/chat/completions", messages=CHAT, max_tokens=1)
    assert answered["usage"]["prompt_tokens"] == len(tokens)


def test_a_chat_that_could_not_be_answered_is_not_counted(web: httpx.Client) -> None:
    for path in ("/v1/chat/completions/input_tokens", "/apply-template"):
        response = web.post(path, json={"model": "echo", "messages": CHAT, "best_of": 2})
        assert response.status_code in (400, 501), response.text
        assert response.json()["error"]["param"] == "best_of"
