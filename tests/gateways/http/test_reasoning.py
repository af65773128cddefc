"""Bounds on reasoning in the fields of each API, and the end of a running answer's reasoning.

The echo model has a token for each byte, and skips as much of its prompt as is forced.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.daemon.calls.test_reasoning import THOUGHT, split_at
from tests.echo import echo_model

CONFIG = echo_model("echo") + echo_model("slow", step_ms=30)
CONFIG += "[models.echo.reasoning-efforts]\nlow = 3\nhigh = 7\n"
MESSAGES = [{"role": "user", "content": THOUGHT}]
LONG = "<think>" + "0123456789" * 20 + "</think>The answer."


def chat(web: httpx.Client, **fields: Any) -> tuple[str, str]:
    body = {"model": "echo", "messages": MESSAGES, **fields}
    response = web.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    return message["reasoning_content"], message["content"]


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"reasoning_budget_tokens": 2}, 2),
        ({"thinking_budget_tokens": 2}, 2),
        ({"reasoning_budget": 1}, 1),
        ({"thinking_budget": 4}, 4),
        ({"thinking_token_budget": 4}, 4),
        ({"reasoning_effort": "low"}, 3),
        ({"think": "high"}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 5),
        ({"reasoning_effort": "low", "reasoning_budget_tokens": 1}, 1),
        ({"reasoning_budget_tokens": -1, "reasoning_control": True}, 18),
    ],
)
def test_a_chat_has_the_fields_of_several_servers(
    web: httpx.Client, fields: dict[str, Any], size: int
) -> None:
    expected = split_at(size) if size < 18 else ("0123456789abcdefgh", "The answer is long enough.")
    assert chat(web, **fields) == expected


def test_a_chat_has_the_message_of_llama_server(web: httpx.Client) -> None:
    found = chat(web, reasoning_budget_tokens=2, reasoning_budget_message=" So.")
    assert found == split_at(2, " So.</think>")


def test_a_message_of_anthropic_has_a_budget_of_tokens(web: httpx.Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4}
    body = {"model": "echo", "messages": MESSAGES, "max_tokens": 100, "thinking": thinking}
    blocks = web.post("/v1/messages", json=body).json()["content"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == split_at(4)
    body = {**body, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    blocks = web.post("/v1/messages", json=body).json()["content"]
    assert blocks[0]["thinking"] == split_at(3)[0]


def test_a_response_has_a_level_of_effort_and_its_tokens(web: httpx.Client) -> None:
    body = {"model": "echo", "input": THOUGHT, "reasoning": {"effort": "low"}}
    done = web.post("/v1/responses", json=body).json()
    assert done["output"][0]["content"][0]["text"] == split_at(3)[0]
    tokens = done["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert tokens == 3 + len("</think>")


def test_a_chat_of_ollama_has_a_level(web: httpx.Client) -> None:
    body = {"model": "echo", "messages": MESSAGES, "stream": False, "think": "high"}
    message = web.post("/api/chat", json=body).json()["message"]
    assert (message["thinking"], message["content"]) == split_at(7)


def test_a_request_makes_a_running_completion_answer(web: httpx.Client) -> None:
    body = {"model": "slow", "messages": [{"role": "user", "content": LONG}], "stream": True}
    reasoning, text, results = "", "", list[Any]()
    with web.stream("POST", "/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            delta = chunk["choices"][0]["delta"]
            reasoning += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            if len(reasoning) >= 10 and not results:
                control = {"id": chunk["id"], "action": "reasoning_end"}
                results.append(web.post("/v1/chat/completions/control", json=control))
    answer = results[0].json()
    assert (answer["success"], answer["reason"]) == (True, "")
    size = len(reasoning)
    assert 10 <= size < 200
    assert text == LONG[7 + size + len("</think>") :]
    control = {"id": answer["id"], "action": "reasoning_end"}
    ended = web.post("/v1/chat/completions/control", json=control)
    assert ended.status_code == 404 and "no running completion" in ended.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"id": "x"}, {"id": "x", "action": "stop"}])
def test_a_control_of_another_form_is_refused(web: httpx.Client, body: dict[str, Any]) -> None:
    assert web.post("/v1/chat/completions/control", json=body).status_code == 400


def test_a_request_makes_a_session_answer(web: httpx.Client) -> None:
    created = web.post("/v1/inferd/sessions", json={"id": "talk", "model": "slow"})
    assert created.status_code < 300, created.text
    path = "/v1/inferd/sessions/talk/end-reasoning"
    found = web.post(path, json={}).json()
    assert (found["ended"], found["reason"]) == (False, "no_turn")
    messages = [{"role": "user", "content": LONG}]
    body = {"model": "slow", "messages": messages, "stream": True, "session_id": "talk"}
    reasoning, results = "", list[Any]()
    with web.stream("POST", "/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                reasoning += delta.get("reasoning_content") or ""
                if len(reasoning) >= 10 and not results:
                    results.append(web.post(path, json={}).json()["ended"])
    assert results == [True] and len(reasoning) < 200
    assert web.post("/v1/inferd/sessions/none/end-reasoning", json={}).status_code == 404
