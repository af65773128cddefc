"""OpenAI's client on a real model: chats, schemas, tools, sessions, prefixes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.gateways.http.own_paths import Caller
from tests.models import ONE_THREAD, smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CONFIG = ONE_THREAD + "[models.smollm2]\nslots = 4\nctx-size = 512\n"
QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_completion_tokens": 8}
PARIS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(smollm2())
    with running_daemon(CONFIG, models_dir=models) as running:
        yield running


def test_a_chat_is_the_clients(api: openai.OpenAI, client: Client) -> None:
    with client.session("smollm2", options={"temp": 0, "n-predict": 8}) as session:
        expected = session.chat(QUESTION)
    done = api.chat.completions.create(**GREEDY, messages=MESSAGES)
    assert done.choices[0].message.content == expected
    assert done.usage is not None
    assert done.usage.completion_tokens == expected.metadata["output_tokens"]
    chunks = api.chat.completions.create(**GREEDY, messages=MESSAGES, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


@pytest.mark.asyncio
async def test_asynchronous_streams_read_the_same(http: RunningGateway, api: openai.OpenAI) -> None:
    expected = api.chat.completions.create(**GREEDY, messages=MESSAGES).choices[0].message.content

    async def read(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**GREEDY, messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(
        base_url=f"{http.url}/v1", api_key="none", timeout=CALL_S_MAX
    ) as client:
        texts = await asyncio.gather(*(read(client) for _ in range(8)))
    assert texts == [expected] * 8


def test_a_growing_history_is_not_computed_again(api: openai.OpenAI) -> None:
    messages = [*MESSAGES]
    first = api.chat.completions.create(**GREEDY, messages=messages)
    messages += [first.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "user", "content": "And of Italy?"}]
    usage = api.chat.completions.create(**GREEDY, messages=messages).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert first.usage is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= first.usage.prompt_tokens


def test_a_session_takes_only_the_new_messages(api: openai.OpenAI) -> None:
    session: Any = {"session_id": "france"}
    one = api.chat.completions.create(**GREEDY, messages=MESSAGES, extra_body=session)
    two = api.chat.completions.create(**GREEDY, messages=MESSAGES, extra_body=session)
    assert one.usage is not None and two.usage is not None
    assert two.usage.prompt_tokens > one.usage.prompt_tokens + one.usage.completion_tokens


SIZES = ["small", "large town"]
GBNF = 'root ::= "small" | "large town"'
FORMS: list[dict[str, Any]] = [
    {"guided_choice": SIZES},
    {"guided_regex": "small|large town"},
    {"guided_grammar": GBNF},
    {"guided_grammar": 'start: "small" | "large town"', "guided_decoding_backend": "xgrammar"},
    {"structured_outputs": {"choice": SIZES}},
    {"structured_outputs": {"regex": "small|large town"}, "response_format": {"type": "text"}},
    {"structured_outputs": {"grammar": GBNF}},
]
JSON_FORMS: list[dict[str, Any]] = [
    {"guided_json": {"enum": SIZES}},
    {"guided_json": json.dumps({"enum": SIZES}), "guided_whitespace_pattern": ""},
    {"structured_outputs": {"json": {"enum": SIZES}}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [*FORMS, *JSON_FORMS])
def test_an_answer_has_a_format_of_vllm(
    api: openai.OpenAI, form: dict[str, Any], stream: bool
) -> None:
    keywords: Any = {**GREEDY, "messages": MESSAGES, "extra_body": form}
    if stream:
        chunks = api.chat.completions.create(**keywords, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = api.chat.completions.create(**keywords).choices[0].message.content
    assert (text if form in FORMS else json.loads(text)) in SIZES


def test_the_other_paths_have_vllms_formats_too(api: openai.OpenAI) -> None:
    form = {"structured_outputs": {"choice": SIZES}}
    done = api.completions.create(model="smollm2", prompt="A town is", extra_body=form)
    assert done.choices[0].text in SIZES
    response = api.responses.create(model="smollm2", input=QUESTION, extra_body=form)
    assert response.output_text in SIZES


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"choice": [], "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, None),
        ({"guided_json": {"type": "object"}, "response_format": {"type": "json_object"}}, None),
    ],
)
def test_a_wrong_format_of_vllm_is_refused(
    api: openai.OpenAI, form: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**GREEDY, messages=MESSAGES, extra_body=form)
    assert param in (caught.value.param, None)


SIZE = {"type": "json_schema", "schema": {"enum": ["small", "large"]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_an_answer_to_anthropics_client_follows_its_schema(
    http: RunningGateway, field: str, stream: bool
) -> None:
    form = SIZE if field == "output_format" else {"format": SIZE}
    keywords: Any = {"model": "smollm2", "max_tokens": 20, "messages": MESSAGES}
    with anthropic.Anthropic(base_url=http.url, api_key="none", timeout=CALL_S_MAX) as own:
        create: Any = own.beta.messages.create
        done = create(
            **keywords,
            stream=stream,
            betas=["structured-outputs-2025-11-13"],
            extra_body={field: form},
        )
        if stream:
            deltas = [each.delta for each in done if each.type == "content_block_delta"]
            text = "".join(delta.text for delta in deltas)
        else:
            text = done.content[0].text
        counted = own.beta.messages.count_tokens(
            model="smollm2", messages=MESSAGES, extra_body={field: form}
        )
    assert text in ('"small"', '"large"') and counted.input_tokens > 0


def test_a_schema_of_anthropics_client_is_read_back(http: RunningGateway) -> None:
    class City(pydantic.BaseModel):
        size: Literal["small", "large"]

    with anthropic.Anthropic(base_url=http.url, api_key="none", timeout=CALL_S_MAX) as own:
        done = own.beta.messages.parse(
            model="smollm2", max_tokens=50, messages=MESSAGES, output_format=City
        )
    assert done.parsed_output is not None and done.parsed_output.size in ("small", "large")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_schema(api: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "size": {"enum": ["small", "large"]},
        },
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": schema, "strict": True},
    }
    keywords: Any = {**GREEDY, "messages": MESSAGES, "response_format": form}
    keywords["max_completion_tokens"] = 100
    if stream:
        chunks = api.chat.completions.create(**keywords, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = api.chat.completions.create(**keywords).choices[0].message.content
    found = json.loads(text)
    assert set(found) == {"city", "size"} and found["size"] in ("small", "large")


def test_an_answer_is_any_object(api: openai.OpenAI) -> None:
    done = api.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=200,
        response_format={"type": "json_object"},
        extra_body={"stop-complete": "json"},
    )
    assert (done.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_wrong_schema_names_the_field(api: openai.OpenAI, strict: bool | None) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "strin"}, "strict": strict},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**GREEDY, messages=MESSAGES, response_format=form)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_with_its_schema(api: openai.OpenAI, stream: bool) -> None:
    keywords: Any = {**GREEDY, "messages": MESSAGES, "tools": PARIS, "tool_choice": "required"}
    keywords["max_completion_tokens"] = 100
    if stream:
        calls: list[Any] = []
        for chunk in api.chat.completions.create(**keywords, stream=True):
            calls += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason
    else:
        choice = api.chat.completions.create(**keywords).choices[0]
        calls, reason = choice.message.tool_calls or [], choice.finish_reason
    assert calls and reason == "tool_calls"
    assert calls[0].function.name == "get_weather" and calls[0].id
    assert set(json.loads(calls[0].function.arguments)) == {"city"}


def test_the_named_function_is_called(api: openai.OpenAI) -> None:
    function = {"name": "tell_time", "parameters": {"type": "object", "properties": {}}}
    tools: list[Any] = [*PARIS, {"type": "function", "function": function}]
    keywords: Any = {**GREEDY, "max_completion_tokens": 100, "messages": MESSAGES, "tools": tools}
    for name in ("tell_time", "get_weather"):
        choice: Any = {"type": "function", "function": {"name": name}}
        message = api.chat.completions.create(**keywords, tool_choice=choice).choices[0].message
        assert {call.function.name for call in message.tool_calls or []} == {name}


def test_without_parallel_calls_there_is_one(api: openai.OpenAI) -> None:
    keywords: Any = {**GREEDY, "max_completion_tokens": 100, "messages": MESSAGES, "tools": PARIS}
    done = api.chat.completions.create(
        **keywords, tool_choice="required", parallel_tool_calls=False
    )
    assert len(done.choices[0].message.tool_calls or []) == 1
    assert done.choices[0].finish_reason == "tool_calls"


def test_the_result_of_a_tool_is_read(api: openai.OpenAI) -> None:
    keywords: Any = {**GREEDY, "tools": PARIS}
    done = api.chat.completions.create(
        **{**keywords, "max_completion_tokens": 100}, messages=MESSAGES, tool_choice="required"
    )
    message = done.choices[0].message
    assert message.tool_calls
    result: Any = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": [{"type": "text", "text": "sunny"}],
    }
    history: list[Any] = [*MESSAGES, message.model_dump(exclude_none=True), result]
    answer = api.chat.completions.create(**keywords, messages=history, tool_choice="none")
    assert answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_of_an_allowed_function(api: openai.OpenAI, stream: bool) -> None:
    other = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [*PARIS, {"type": "function", "function": other}]
    named = [{"type": "function", "function": {"name": "get_time"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    keywords: Any = {**GREEDY, "messages": MESSAGES, "tools": tools, "tool_choice": choice}
    keywords["max_completion_tokens"] = 60
    if stream:
        with api.chat.completions.stream(**keywords) as events:
            done = events.get_final_completion()
    else:
        done = api.chat.completions.create(**keywords)
    calls = done.choices[0].message.tool_calls
    assert calls and {call.function.name for call in calls} == {"get_time"}
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "missing"}}]
    with pytest.raises(openai.BadRequestError, match="no tool is named 'missing'") as caught:
        api.chat.completions.create(**keywords)
    assert caught.value.param == "tool_choice"


def test_answers_have_different_seeds(api: openai.OpenAI) -> None:
    keywords: Any = {"model": "smollm2", "messages": MESSAGES, "n": 3, "seed": 7}
    keywords |= {"max_completion_tokens": 6, "temperature": 1.5}
    whole = api.chat.completions.create(**keywords)
    texts = ["", "", ""]
    for chunk in api.chat.completions.create(**keywords, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert len(set(texts)) == 3
    assert texts[0] == whole.choices[0].message.content


def test_logprobs_are_the_models(api: openai.OpenAI) -> None:
    done = api.chat.completions.create(**GREEDY, messages=MESSAGES, logprobs=True, top_logprobs=5)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    for each in logprobs.content:
        assert len(each.top_logprobs) == 5
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob, abs=1e-6)


def test_developers_and_long_prompts(api: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "developer", "content": "Answer in one word."}, *MESSAGES]
    assert api.chat.completions.create(**GREEDY, messages=messages).choices
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "x " * 3000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_branch_and_a_rewound_session_answer_like_an_unbranched_one(
    http: RunningGateway, api: openai.OpenAI
) -> None:
    def ask(session_id: str, text: str) -> tuple[str | None, int]:
        done = api.chat.completions.create(
            **GREEDY,
            messages=[{"role": "user", "content": text}],
            extra_body={"session_id": session_id},
        )
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        return done.choices[0].message.content, done.usage.prompt_tokens_details.cached_tokens or 0

    caller = Caller(http)
    for name in ("plain", "trunk"):
        caller.post("/sessions", model="smollm2", id=name, system="Answer in one sentence.")
        ask(name, QUESTION)
    expected, _ = ask("plain", "And of Italy?")
    other, _ = ask("trunk", "Name a colour.")
    assert other != expected
    assert caller.post("/sessions/trunk/fork", id="branch", messages=3).status == 200
    assert caller.post("/sessions/trunk/rewind", turns=1).status == 200
    history = caller.get("/sessions/plain").json["tokens"]
    for name in ("branch", "trunk"):
        answer, cached = ask(name, "And of Italy?")
        assert answer == expected
        assert cached > 20, "the common beginning is not computed again"
        found = caller.get(f"/sessions/{name}").json
        assert found["messages"] == caller.get("/sessions/plain").json["messages"]
        assert found["tokens"] == history


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_schema_is_closed_whether_strict_or_not(api: openai.OpenAI, strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": schema, "strict": strict},
    }
    done = api.chat.completions.create(
        **{**GREEDY, "max_completion_tokens": 100}, messages=MESSAGES, response_format=form
    )
    assert json.loads(done.choices[0].message.content or "") == {"city": "Paris"}
