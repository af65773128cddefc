"""The asynchronous clients of OpenAI, Anthropic and Ollama: whole and streamed answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
import pytest_asyncio

from tests.gateways.http.driver import CALL_S_MAX, RunningGateway

pytestmark = pytest.mark.asyncio
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture
async def of_openai(http: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{http.url}/v1", api_key="none", timeout=CALL_S_MAX, max_retries=0
    ) as client:
        yield client


@pytest_asyncio.fixture
async def of_anthropic(http: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=http.url, api_key="none", timeout=CALL_S_MAX, max_retries=0
    ) as client:
        yield client


@pytest_asyncio.fixture
async def of_ollama(http: RunningGateway) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=http.url, timeout=CALL_S_MAX) as client:
        yield client


async def test_openais_chats_and_completions(of_openai: openai.AsyncOpenAI) -> None:
    done = await of_openai.chat.completions.create(model="echo", messages=HELLO)
    assert done.choices[0].message.content == "hello"
    async with of_openai.chat.completions.stream(model="echo", messages=HELLO) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello"
    whole = await of_openai.completions.create(model="echo", prompt="hello")
    parts = await of_openai.completions.create(model="echo", prompt="hello", stream=True)
    texts = [part.choices[0].text async for part in parts]
    assert whole.choices[0].text == "".join(texts) == "hello"


async def test_openais_responses(of_openai: openai.AsyncOpenAI) -> None:
    done = await of_openai.responses.create(model="echo", input="hello")
    again = await of_openai.responses.create(
        model="echo", input="bye", previous_response_id=done.id
    )
    assert (done.output_text, again.output_text) == ("hello", "bye")
    async with of_openai.responses.stream(model="echo", input="hello") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "hello"


async def test_openais_models_and_embeddings(of_openai: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in of_openai.models.list()] == ["echo"]
    found = await of_openai.embeddings.create(model="echo", input=["one", "two"])
    assert [each.index for each in found.data] == [0, 1] and found.data[0].embedding


async def test_anthropics_messages(of_anthropic: anthropic.AsyncAnthropic) -> None:
    done: Any = await of_anthropic.messages.create(model="echo", max_tokens=9, messages=HELLO)
    assert done.content[0].text == "hello"
    stream = await of_anthropic.messages.create(
        model="echo", max_tokens=9, messages=HELLO, stream=True
    )
    kinds = [event.type async for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    beta: Any = await of_anthropic.beta.messages.create(
        model="echo", max_tokens=9, messages=HELLO, betas=["context-management-2025-06-27"]
    )
    assert beta.content[0].text == "hello"


async def test_anthropics_models_and_counts(of_anthropic: anthropic.AsyncAnthropic) -> None:
    assert [model.id async for model in of_anthropic.models.list()] == ["echo"]
    counted = await of_anthropic.messages.count_tokens(model="echo", messages=HELLO)
    assert counted.input_tokens == 7


async def test_ollamas_chats_and_completions(of_ollama: ollama.AsyncClient) -> None:
    assert (await of_ollama.chat("echo", HELLO)).message.content == "hello"
    assert (await of_ollama.generate("echo", "hello")).response == "hello"
    lines = await of_ollama.generate("echo", "hello", stream=True)
    assert "".join([line.response or "" async for line in lines]) == "hello"


async def test_ollamas_models_and_embeddings(of_ollama: ollama.AsyncClient) -> None:
    assert [model.model for model in (await of_ollama.list()).models] == ["echo"]
    shown = await of_ollama.show("echo")
    assert shown.capabilities and (await of_ollama.ps()).models
    assert len((await of_ollama.embed("echo", ["one", "two"])).embeddings) == 2
