"""Completions, embeddings and the queue on the echo model, with OpenAI's client."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from inferd import Client
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway
from tests.waiting import wait_until

CONFIG = echo_model("echo") + echo_model("slow", step_ms=50, slots=1)


def test_a_completion_uses_its_prompt_unchanged(api: openai.OpenAI) -> None:
    done = api.completions.create(model="echo", prompt="hello", logprobs=1)
    assert done.choices[0].text == "hello" and done.choices[0].finish_reason == "stop"
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (list("hello"), [0, 1, 2, 3, 4])
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"h": 0.0}


def test_a_completion_has_sixteen_tokens_unless_it_says_otherwise(api: openai.OpenAI) -> None:
    done = api.completions.create(model="echo", prompt="x" * 40)
    assert done.choices[0].text == "x" * 16 and done.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_their_own_answers(api: openai.OpenAI, stream: bool) -> None:
    keywords: Any = {"model": "echo", "prompt": ["one", "two"], "n": 2, "echo": True}
    texts = [""] * 4
    if stream:
        keywords["stream_options"] = {"include_usage": True}
        for chunk in api.completions.create(**keywords, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        usage = chunk.usage
    else:
        done = api.completions.create(**keywords)
        for whole in done.choices:
            texts[whole.index] += whole.text
        usage = done.usage
    assert texts == ["oneone", "oneone", "twotwo", "twotwo"]
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (10, 16)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 259]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1, 259], "echo": True}, "prompt"),
        ({"prompt": [[1], [1 << 40]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[], "x"]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[1, None]]}, "prompt[0][1]"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"prompt": [[1]] * 17}, "prompt"),
        ({"prompt": "x" * 3000, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": ["x"] * 13, "n": 5}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
    ],
)
def test_a_refusal_names_the_field(api: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.post("/completions", body={"model": "echo", "prompt": "x"} | fields, cast_to=object)
    assert caught.value.param == param


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings_are_the_clients(api: openai.OpenAI, client: Client, encoding: Any) -> None:
    texts = ["one", "two", "three"]
    found = api.embeddings.create(
        model="echo", input=texts, encoding_format=encoding or openai.omit
    )
    vectors: list[Any] = [each.embedding for each in found.data]
    if encoding == "base64":
        import array
        import base64

        vectors = [array.array("f", base64.b64decode(text)).tolist() for text in vectors]
    expected = client.embed("echo", texts)
    for vector, wanted in zip(vectors, expected, strict=True):
        assert vector == pytest.approx(wanted, abs=1e-6)
    assert found.usage.prompt_tokens == sum(expected.tokens)
    assert math.isclose(sum(x * x for x in vectors[0]), 1, abs_tol=1e-5)


def test_a_refused_embedding_names_the_field(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.embeddings.create(model="echo", input=["one", "x" * 5000])
    assert caught.value.param == "input.1"
    with pytest.raises(openai.BadRequestError) as caught:
        api.embeddings.create(model="echo", input="one", dimensions=3)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as caught:
        api.embeddings.create(model="echo", input=["one", None])  # type: ignore[arg-type]
    assert caught.value.param == "input.1"


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], ["one", [3]], [["one"]]])
def test_token_ids_for_embeddings_are_refused_with_langchains_option(
    api: openai.OpenAI, ids: Any
) -> None:
    """They are ids of OpenAI's vocabulary, and no model here has it."""
    with pytest.raises(openai.BadRequestError) as caught:
        api.embeddings.create(model="echo", input=ids)
    assert caught.value.param == "input"
    assert "another vocabulary" in caught.value.message
    assert "check_embedding_ctx_length=False" in caught.value.message


def test_the_queue_shows_the_turns_in_their_order(api: openai.OpenAI, http: RunningGateway) -> None:
    def turns() -> list[Any]:
        found: Any = api.get("/inferd/queue", cast_to=object)
        return list(found["data"])

    first = api.completions.create(model="slow", prompt="x" * 500, max_tokens=500, stream=True)
    next(first)
    second = api.completions.create(model="slow", prompt="y" * 500, max_tokens=500, stream=True)
    shown = wait_until(lambda: found if len(found := turns()) == 2 else None)
    assert [turn["position"] for turn in shown] == [0, 1]
    assert {turn["priority"] for turn in shown} == {"normal"}
    first.close()
    second.close()
    wait_until(lambda: not turns())
