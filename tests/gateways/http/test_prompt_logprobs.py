"""Logprobs of prompts in `/v1/completions` and chats: `echo` with `logprobs`, and vLLM's
`prompt_logprobs`. The echo model's logprobs fall with the distance to the previous token.
"""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any

import openai
import pytest

from inferd.backends.echo.model import DISTANCE
from inferd.backends.echo.options import PROMPT_BEGIN, PROMPT_END
from tests.echo import echo_model

CONFIG = echo_model("echo") + echo_model("slow", step_ms=2, slots=2)
NAMES = {PROMPT_BEGIN: "<|prompt|>", PROMPT_END: "<|echo|>"}


def expected(tokens: list[int]) -> list[float | None]:
    return [None, *(-abs(b - a) / DISTANCE for a, b in itertools.pairwise(tokens))]


def ids_of(text: str) -> list[int]:
    return [PROMPT_BEGIN, *text.encode(), PROMPT_END]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 16])
def test_an_echo_begins_with_the_logprobs_of_the_prompt(
    api: openai.OpenAI, max_tokens: int, stream: bool
) -> None:
    keywords: Any = {"model": "echo", "prompt": "abc", "max_tokens": max_tokens, "echo": True}
    keywords |= {"logprobs": 1}
    if stream:
        text, found, reason = "", Parts(), None
        for chunk in api.completions.create(**keywords, stream=True):
            [choice] = chunk.choices
            text, reason = text + choice.text, choice.finish_reason or reason
            found.add(choice.logprobs)
    else:
        [whole] = api.completions.create(**keywords).choices
        text, found, reason = whole.text, Parts(whole.logprobs), whole.finish_reason
    answer = "abc"[:max_tokens]
    ended = max_tokens > 3
    assert text == "abc" + answer and reason == ("stop" if ended else "length")
    tokens = ids_of("abc")
    assert found.tokens == ["<|prompt|>", *"abc", "<|echo|>", *answer, *([""] if ended else [])]
    assert found.token_logprobs[:5] == expected(tokens)
    assert found.token_logprobs[5:] == [0.0] * (len(answer) + ended)
    begin = [0, 0, 1, 2, 3]
    assert found.text_offset == [*begin, *range(3, 3 + len(answer) + ended)]
    assert found.top_logprobs[0] is None
    assert found.top_logprobs[2] == {"a": 0.0, "b": -1 / DISTANCE}, "the top one, and its own"


class Parts:
    def __init__(self, logprobs: Any = None):
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []
        self.add(logprobs)

    def add(self, logprobs: Any) -> None:
        if logprobs is not None:
            for name in vars(self):
                getattr(self, name).extend(getattr(logprobs, name))


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_answers_have_their_own(api: openai.OpenAI, stream: bool) -> None:
    prompts = ["one", "three", "seven"]
    keywords: Any = {"model": "echo", "prompt": prompts, "n": 2, "echo": True, "logprobs": 0}
    found = [Parts() for _ in range(6)]
    if stream:
        for chunk in api.completions.create(**keywords, max_tokens=1, stream=True):
            for choice in chunk.choices:
                found[choice.index].add(choice.logprobs)
    else:
        for whole in api.completions.create(**keywords, max_tokens=1).choices:
            found[whole.index].add(whole.logprobs)
    for number, parts in enumerate(found):
        prompt = prompts[number // 2]
        assert parts.token_logprobs == [*expected(ids_of(prompt)), 0.0]
        assert parts.text_offset == [0, *range(len(prompt)), len(prompt), len(prompt)]
        assert parts.top_logprobs[1] == {prompt[0]: parts.token_logprobs[1]}


def test_characters_of_several_tokens_have_the_offset_of_their_beginning(
    api: openai.OpenAI,
) -> None:
    """Each byte is a token of the echo model."""
    prompt = "é🦙x"
    done = api.completions.create(
        model="echo", prompt=prompt, echo=True, logprobs=1, max_tokens=7
    ).choices[0]
    assert done.text == prompt + prompt and done.logprobs is not None
    marked = [0, *([0] * 2), *([1] * 4), 2, 3]
    assert done.logprobs.text_offset == [*marked, *([3] * 2), *([4] * 4), 5]
    assert done.logprobs.tokens is not None
    assert done.logprobs.tokens[1:4] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_token_ids(api: openai.OpenAI, stream: bool) -> None:
    def texts(**keywords: Any) -> list[str]:
        found = [""] * 2
        if not stream:
            for whole in api.completions.create(model="echo", **keywords).choices:
                found[whole.index] += whole.text
            return found
        for chunk in api.completions.create(model="echo", **keywords, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.text
        return found

    assert texts(prompt=ids_of("abc")) == ["abc", ""]
    assert texts(prompt=[ids_of("one"), ids_of("two")]) == ["one", "two"]
    assert texts(prompt=[ids_of("one"), [*b"two"]], echo=True) == [
        "<|prompt|>one<|echo|>one",
        "two",
    ]
    done = api.completions.create(
        model="echo", prompt=ids_of("é"), echo=True, logprobs=0, max_tokens=0
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset == [0, 10, 10, 11]
    assert done.usage is not None and done.usage.prompt_tokens == 4


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_have_the_form_of_vllm(api: openai.OpenAI, top: int) -> None:
    body = {"model": "echo", "prompt": "ab", "max_tokens": 1, "prompt_logprobs": top}
    done: Any = api.post("/completions", body=body, cast_to=object)
    [choice] = done["choices"]
    assert choice["text"] == "a" and choice["logprobs"] is None
    first, a, b, end = choice["prompt_logprobs"]
    assert first is None
    assert b["98"]["logprob"] == -1 / DISTANCE and b["98"]["decoded_token"] == "b"
    assert b["98"]["rank"] in (2, 3), "as probable as another one"
    assert len(a) == len(end) == 1 + top
    if top:
        assert b["97"] == {"logprob": 0.0, "rank": 1, "decoded_token": "a"}
    messages = [{"role": "user", "content": "ab"}]
    chat: Any = api.post(
        "/chat/completions",
        body={"model": "echo", "messages": messages, "prompt_logprobs": top, "n": 2},
        cast_to=object,
    )
    assert chat["prompt_logprobs"] == choice["prompt_logprobs"]
    assert [each["message"]["content"] for each in chat["choices"]] == ["ab", "ab"]
    with pytest.raises(openai.BadRequestError) as caught:
        api.post(
            "/chat/completions",
            body={"model": "echo", "messages": messages, "prompt_logprobs": 1, "stream": True},
            cast_to=object,
        )
    assert caught.value.param == "prompt_logprobs"


def loglikelihoods(api: openai.OpenAI, pairs: list[tuple[list[int], list[int]]]) -> list[Any]:
    """Request and read log-likelihoods as lm-eval's `local-completions` does (`create_payload` and
    `parse_logprobs` of `lm_eval/models/openai_completions.py`), with contexts and continuations as
    token ids.
    """
    body = {
        "model": "echo",
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    outputs: Any = api.post("/completions", body=body, cast_to=object)
    found = []
    choices = sorted(outputs["choices"], key=itemgetter("index"))
    for choice, (context, _) in zip(choices, pairs, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        greedy = all(t == max(top.values()) for t, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), greedy))
    return found


def test_an_evaluation_reads_log_likelihoods(api: openai.OpenAI) -> None:
    """Some answers end at once: the token that ends them is the one that is left out."""
    pairs = [
        ([97, 98], [98, 98]),
        ([97, 98], [99]),
        ([PROMPT_BEGIN, 97], [98, PROMPT_END]),
        ([120], [100, 120]),
    ]
    found = loglikelihoods(api, pairs)
    for (value, greedy), (context, continuation) in zip(found, pairs, strict=True):
        whole = context + continuation
        wanted = expected(whole)[len(context) :]
        assert value == pytest.approx(sum(each or 0.0 for each in wanted))
        assert greedy == (set(continuation) == {context[-1]})


def test_a_long_echo_streams_at_its_readers_pace(api: openai.OpenAI) -> None:
    prompt = "a long text " * 200
    found = Parts()
    for chunk in api.completions.create(
        model="slow", prompt=prompt, echo=True, logprobs=1, max_tokens=3, stream=True
    ):
        found.add(chunk.choices[0].logprobs)
    assert found.token_logprobs[: len(prompt) + 2] == expected(ids_of(prompt))
    assert "".join(found.tokens) == f"<|prompt|>{prompt}<|echo|>a l"
