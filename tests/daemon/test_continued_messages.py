"""Chats whose last message, the assistant's, is continued, on models of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from inferd import Client, InvalidArgument, UnsupportedOperation
from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.http.driver import RunningGateway, gateway
from tests.models import short_smollm2
from tests.tiny_gguf import write_tiny

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]
CONFIG = "[defaults]\nthreads = 1\nctx-size = 2048\n"
GREEDY: dict[str, Any] = {"temp": 0.0, "n_predict": 12, "ignore_eos": True}
ASKED = [{"role": "user", "content": "Name a colour."}]
BEGUN = [*ASKED, {"role": "assistant", "content": "The colour is "}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "blue"]}, "dark": {"type": "boolean"}},
    "required": ["name", "dark"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
        },
    },
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    for kind in ("llama", "t5-chat"):
        write_tiny(kind, models)
    (models / "chat.gguf").symlink_to(short_smollm2())
    with running_daemon(CONFIG, models_dir=models) as running:
        yield running


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[RunningGateway]:
    with gateway(daemon, "--hold-headers", "30") as running:
        yield running


def test_the_answer_continues_the_text_behind_the_generation_prompt(client: Client) -> None:
    graph = client.load_by_name("chat")
    prompt = client.apply_template(graph, ASKED)
    begun = client.apply_template(graph, BEGUN, continue_final_message=True)
    assert begun == prompt + "The colour is "
    raw = client.tokenize(graph, str(prompt), special=True, bos=True)
    raw += client.tokenize(graph, "The colour is ")
    assert begun.tokens == len(raw)
    with client.session("chat") as session:
        expected = session.chat(raw, **GREEDY)
    found = client.chat("chat", BEGUN, continue_final_message=True, **GREEDY)
    assert str(found) == str(expected)
    assert found.metadata["input_tokens"] == len(raw)
    assert found.metadata["output_tokens"] == 12


def test_the_history_has_one_message_with_both_parts(client: Client) -> None:
    with client.session("chat") as session:
        stream = session.stream(BEGUN, continue_final_message=True, **GREEDY)
        answer = "".join(stream)
        messages = session.history().messages
        assert messages[-1]["content"] == "The colour is " + answer
        assert [m["role"] for m in messages[-2:]] == ["user", "assistant"]
        before = stream.metadata["input_tokens"] + stream.metadata["output_tokens"]
        again = session.chat("And another?", **GREEDY)
        assert again.metadata["recomputed_tokens"] == 0
        assert again.metadata["input_tokens"] > before
        assert again.metadata["cached_tokens"] >= before - 1


def test_the_whole_message_follows_a_schema(client: Client) -> None:
    begun = [*ASKED, {"role": "assistant", "content": '{"name": "bl'}]
    found = client.chat(
        "chat", begun, continue_final_message=True, json_schema=SCHEMA, temp=0.0, n_predict=60
    )
    assert json.loads('{"name": "bl' + found)["name"] == "blue"
    wrong = [*ASKED, {"role": "assistant", "content": "Well, "}]
    with pytest.raises(InvalidArgument):
        client.chat("chat", wrong, continue_final_message=True, json_schema=SCHEMA)


def test_reasoning_is_continued_or_ended(client: Client) -> None:
    graph = client.load_by_name("chat")
    thought = {"role": "assistant", "content": "", "reasoning_content": "Let me see"}
    text = client.apply_template(graph, [*ASKED, thought], continue_final_message=True)
    assert text.endswith("<think>Let me see")
    found = client.chat(
        "chat",
        [*ASKED, thought],
        continue_final_message=True,
        reasoning_format="deepseek",
        reasoning_budget=0,
        **GREEDY,
    )
    assert "Let me see" not in found.reasoning + found
    both = thought | {"content": "Red"}
    text = client.apply_template(graph, [*ASKED, both], continue_final_message=True)
    assert text.endswith("<think>Let me see</think>Red")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (ASKED, "of the role 'user'"),
        ([*ASKED, {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": "{}"}}]}], "calls tools"),
        (BEGUN[1:], "no message precedes"),
    ],
)  # fmt: skip
def test_a_last_message_that_cannot_be_continued_is_refused(
    client: Client, messages: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(InvalidArgument, match=why):
        client.chat("chat", messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("model", "why"),
    [("tiny-llama", "does not show where an answer begins"), ("tiny-t5-chat", "encoder-decoder")],
)
def test_a_model_that_cannot_continue_a_message_says_so(
    client: Client, model: str, why: str
) -> None:
    with pytest.raises(UnsupportedOperation, match=why):
        client.chat(model, BEGUN, continue_final_message=True, **GREEDY)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_clients_continue_with_vllms_field(http: RunningGateway, stream: bool) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False, "temp": 0}
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none") as api:
        create: Any = api.chat.completions.create
        made = create(model="chat", messages=BEGUN, max_tokens=12, stream=stream, extra_body=fields)
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in made if c.choices)
        else:
            text = made.choices[0].message.content
        counted = httpx.post(
            f"{http.url}/v1/chat/completions/input_tokens",
            json={"model": "chat", "messages": BEGUN, **fields},
        ).json()["input_tokens"]
        if not stream:
            assert made.usage.prompt_tokens == counted
    with anthropic.Anthropic(base_url=http.url, api_key="none") as other:
        begun: Any = BEGUN
        message: Any = other.messages.create(
            model="chat", messages=begun, max_tokens=12, extra_body={"temp": 0}
        )
        counted_too = other.messages.count_tokens(model="chat", messages=begun)
    assert message.content[0].text == text and not text.startswith("The colour is")
    assert counted_too.input_tokens == counted


def test_a_prompt_without_an_answers_beginning_is_refused_over_http(http: RunningGateway) -> None:
    fields = {"model": "chat", "messages": ASKED, "add_generation_prompt": False}
    response = httpx.post(f"{http.url}/v1/chat/completions", json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "add_generation_prompt"
