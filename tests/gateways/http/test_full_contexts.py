"""Conversations longer than a context, as each API describes it, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.model
TEXT = "a question about the sea and its fish"
CHAT: list[Any] = [
    {"role": role, "content": f"{TEXT} {number}"}
    for number in range(8)
    for role in ("user", "assistant")
]
LONG: list[Any] = [
    {"role": "system", "content": "Be brief."},
    *CHAT,
    {"role": "user", "content": TEXT},
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    path = write_tiny("llama", tmp_path_factory.mktemp("models"))
    options = "ctx-size = 512\nn-predict = 8\ntemp = 0\nignore-eos = true\n"
    with running_daemon(f"[models.tiny]\nfile = '{path}'\n{options}") as running:
        yield running


@pytest.fixture(scope="module")
def own(http: RunningGateway) -> Iterator[ollama.Client]:
    with ollama.Client(host=http.url, timeout=CALL_S_MAX) as client:
        yield client


def test_chats_without_a_session_are_refused(http: RunningGateway, api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="tiny", messages=LONG)
    assert caught.value.code == "context_length_exceeded"
    with (
        anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0) as claude,
        pytest.raises(anthropic.BadRequestError, match="context"),
    ):
        claude.messages.create(model="tiny", messages=LONG[1:], max_tokens=4)
    dropped = api.chat.completions.create(
        model="tiny", messages=LONG, extra_body={"overflow": "drop-turns"}
    )
    assert dropped.usage is not None and dropped.usage.prompt_tokens <= 504


def test_a_session_goes_on(http: RunningGateway, api: openai.OpenAI) -> None:
    for number in range(12):
        reply = api.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{TEXT} {number}"}],
            extra_body={"session_id": "long"},
        )
        assert reply.usage is not None and reply.usage.prompt_tokens < 512
    shown = httpx.get(f"{http.url}/v1/inferd/sessions/long").json()
    marked = [message.get("dropped", False) for message in shown["messages"]]
    assert len(marked) == 24 and marked[0] and not marked[-1]


def test_responses_truncate_if_they_are_asked_to(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        api.responses.create(model="tiny", input=LONG)
    reply = api.responses.create(model="tiny", input=LONG, truncation="auto")
    assert reply.truncation == "auto" and reply.usage is not None
    assert reply.usage.input_tokens <= 504


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_a_conversation_of_responses(api: openai.OpenAI, truncation: Any) -> None:
    previous: str | None = None
    for number in range(14):
        try:
            reply = api.responses.create(
                model="tiny",
                input=f"{TEXT} {number}",
                previous_response_id=previous,
                truncation=truncation,
            )
        except openai.BadRequestError:
            assert truncation == "disabled" and number > 4
            return
        previous = reply.id
    assert truncation == "auto"


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_chats_lose_their_oldest_turns(http: RunningGateway, stream: bool) -> None:
    for keywords in ({}, {"truncate": True, "shift": True}, {"shift": False}):
        body = {"model": "tiny", "messages": LONG, "stream": stream, **keywords}
        reply = httpx.post(f"{http.url}/api/chat", json=body, timeout=CALL_S_MAX)
        assert reply.status_code == 200, reply.text
        last = reply.text.strip().splitlines()[-1]
        assert '"done_reason":"length"' in last and '"eval_count":8' in last
    refused = httpx.post(
        f"{http.url}/api/chat",
        json={"model": "tiny", "messages": LONG, "truncate": False, "stream": stream},
    )
    assert refused.status_code == 400


@pytest.mark.parametrize("size", [600, 20_000])
@pytest.mark.parametrize("shift", [True, False])
def test_ollamas_single_message_loses_its_middle(
    http: RunningGateway, size: int, shift: bool
) -> None:
    messages = [LONG[0], {"role": "user", "content": "x" * size}]
    body = {"model": "tiny", "messages": messages, "stream": False, "shift": shift}
    reply = httpx.post(f"{http.url}/api/chat", json=body, timeout=CALL_S_MAX)
    assert reply.status_code == 200 and reply.json()["prompt_eval_count"] < 512
    refused = httpx.post(f"{http.url}/api/chat", json=body | {"truncate": False})
    assert refused.status_code == 400


def test_ollamas_prompts_lose_their_middle_and_answers_shift(
    http: RunningGateway, own: ollama.Client
) -> None:
    reply = own.generate("tiny", "x" * 5000, raw=True)
    assert reply.prompt_eval_count is not None and reply.prompt_eval_count < 512
    reply = own.generate("tiny", "x" * 490, raw=True, options={"num_predict": 60})
    assert reply.eval_count == 60 and reply.done_reason == "length"
    body = {"model": "tiny", "prompt": "x" * 490, "raw": True, "stream": False, "shift": False}
    for fields in (
        {"options": {"num_predict": 60}},
        {"options": {"num_predict": -2}},
        {"options": {"num_predict": -2}, "shift": True},
    ):
        ended = httpx.post(f"{http.url}/api/generate", json=body | fields).json()
        assert ended["eval_count"] < 30 and ended["done_reason"] == "length"
