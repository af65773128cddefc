"""Chat completions on the echo model, with OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from inferd import Client

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_the_models_are_the_daemons(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["echo"]
    assert api.models.retrieve("echo").owned_by == "inferd"


def test_a_whole_completion_has_its_text_its_end_and_its_usage(api: openai.OpenAI) -> None:
    done = api.chat.completions.create(model="echo", messages=HELLO)
    assert done.choices[0].message.content == "hello"
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 6)
    assert done.usage.total_tokens == 13


def test_a_stream_is_the_whole_in_pieces(api: openai.OpenAI) -> None:
    chunks = list(api.chat.completions.create(model="echo", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "hello" and len([t for t in texts if t]) > 1
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_of_a_stream_comes_last_if_it_is_wanted(api: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        api.chat.completions.create(
            model="echo", messages=HELLO, stream=True, stream_options=options
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_come_side_by_side(api: openai.OpenAI, stream: bool) -> None:
    texts = ["", "", ""]
    if stream:
        for chunk in api.chat.completions.create(model="echo", messages=HELLO, n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        done = api.chat.completions.create(model="echo", messages=HELLO, n=3)
        for whole in done.choices:
            texts[whole.index] += whole.message.content or ""
        assert done.usage is not None and done.usage.completion_tokens == 18
    assert texts == ["hello"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_its_logprob(api: openai.OpenAI, stream: bool) -> None:
    keywords: Any = {"model": "echo", "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    found: list[Any] = []
    if stream:
        for chunk in api.chat.completions.create(**keywords, stream=True):
            if chunk.choices[0].logprobs:
                found += chunk.choices[0].logprobs.content or []
    else:
        logprobs = api.chat.completions.create(**keywords).choices[0].logprobs
        assert logprobs is not None
        found = logprobs.content or []
    assert [each.token for each in found] == list("hello")
    assert found[0].bytes == [104] and found[0].top_logprobs[0].token == "h"


def test_an_answer_ends_at_its_limits(api: openai.OpenAI) -> None:
    def ended(**keywords: Any) -> tuple[str | None, str]:
        done = api.chat.completions.create(model="echo", messages=HELLO, **keywords)
        return done.choices[0].message.content, done.choices[0].finish_reason

    assert ended(max_completion_tokens=2) == ("he", "length")
    assert ended(max_tokens=3) == ("hel", "length")
    assert ended(max_tokens=3, max_completion_tokens=1) == ("h", "length")
    assert ended(stop="l") == ("he", "stop")
    assert ended(stop=["x", "o"]) == ("hell", "stop")


def test_parts_of_text_are_joined(api: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    done = api.chat.completions.create(model="echo", messages=[{"role": "user", "content": parts}])
    assert done.choices[0].message.content == "one\ntwo"


def test_a_session_stays_after_its_requests(api: openai.OpenAI, client: Client) -> None:
    for _ in range(2):
        api.chat.completions.create(
            model="echo", messages=HELLO, extra_body={"session_id": "diary"}
        )
    [session] = client.sessions(dormant=True)
    assert session["session_id"] == "diary" and session["turns"] == 2
    assert session["state"] == "dormant"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "messages.0.role"),
        ({"temperature": 200}, 400, "temperature"),
        ({"n": 17}, 400, "n"),
        ({"logit_bias": {"yes": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"service_tier": "slow"}, 400, "service_tier"),
        ({"priority": "urgent"}, 403, "priority"),
        ({"audio": {"voice": "a", "format": "wav"}}, 400, "audio"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"documents": [{"text": "x"}]}, 400, "documents"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field(
    api: openai.OpenAI, fields: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    body = {"model": "echo", "messages": HELLO, "stream": stream} | fields
    with pytest.raises(openai.APIStatusError) as caught:
        api.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.status_code == status
    assert caught.value.body["param"] == param  # type: ignore[index]


def test_a_file_is_refused_by_name(api: openai.OpenAI) -> None:
    file: Any = {"type": "file", "file": {"file_id": "a"}}
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="echo", messages=[{"role": "user", "content": [file]}])
    assert "'file'" in caught.value.message and caught.value.param == "messages.0.content.0"


def test_fields_that_ask_for_nothing_are_accepted(api: openai.OpenAI) -> None:
    done = api.chat.completions.create(
        model="echo",
        messages=HELLO,
        store=False,
        modalities=["text"],
        user="ada",
        metadata={"a": "b"},
        extra_body={"audio": None, "top_k": 20},
    )
    assert done.choices[0].message.content == "hello"


async def _answer(api: openai.AsyncOpenAI) -> str:
    stream = await api.chat.completions.create(model="echo", messages=HELLO, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.mark.asyncio
async def test_many_asynchronous_streams_end(http: Any) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none") as client:
        texts = await asyncio.gather(*(_answer(client) for _ in range(50)))
    assert texts == ["hello"] * 50


USER: Any = {"role": "user", "content": "hello"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None}, "messages.1.content"),
        ({"role": "assistant"}, "messages.1.content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages.1.content"),
        ({"role": "assistant", "content": []}, "messages.1.content"),
        ({"role": "user", "content": None}, "messages.1.content"),
        ({"role": "tool", "tool_call_id": "a"}, "messages.1.content"),
        ({"role": "system", "content": 7}, "messages.1.content"),
        ({"role": "critic", "content": "x"}, "messages.1.role"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.1.tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL, {}]}, "messages.1.tool_calls.1"),
    ],
    ids=str,
)
def test_a_wrong_message_is_refused_with_its_place(
    api: openai.OpenAI, message: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="echo", messages=[USER, message, USER], stream=stream)
    assert caught.value.param == param and param in caught.value.message


def test_an_assistants_refusal_is_its_text(api: openai.OpenAI) -> None:
    refusal: Any = {"role": "assistant", "content": None, "refusal": "No."}
    done = api.chat.completions.create(model="echo", messages=[USER, refusal, USER])
    assert done.choices[0].finish_reason == "stop"


def test_a_prediction_is_drafted_from_and_the_usage_counts_its_tokens(api: openai.OpenAI) -> None:
    text = "".join(chr(97 + (n * n * 7 + n // 5) % 26) for n in range(150))
    prediction: Any = {"type": "content", "content": [{"type": "text", "text": text}]}
    done = api.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": text}],
        prediction=prediction,
        extra_body={"speculation": "ngram"},
    )
    assert done.choices[0].message.content == text and done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None and (details.accepted_prediction_tokens or 0) > 50
    other: Any = {"type": "other", "content": "x"}
    with pytest.raises(openai.BadRequestError, match="prediction"):
        api.chat.completions.create(model="echo", messages=HELLO, prediction=other)
