"""`/infill`, and the suffixes of other APIs. The model repeats prefix and suffix, with `|` between
them.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from inferd.testing import running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, gateway

CONFIG = echo_model("code", fim=True) + echo_model("chat")
CONFIG += echo_model("slow", fim=True, slots=2, step_ms=20, **{"ctx-size": 8192})
VIM_FIELDS = [
    "content",
    "timings/prompt_n",
    "timings/prompt_ms",
    "timings/prompt_per_token_ms",
    "timings/prompt_per_second",
    "timings/predicted_n",
    "timings/predicted_ms",
    "timings/predicted_per_token_ms",
    "timings/predicted_per_second",
    "truncated",
    "tokens_cached",
]
VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def f():\n",
    "input_suffix": "\n\nprint(f())\n",
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "    ret",
    "n_predict": 128,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": VIM_FIELDS,
}
"""A request of llama.vim."""
VIM_WARM_UP: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "stream": False,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
"""A request of llama.vim with which it has other files computed."""
VSCODE = {
    "input_prefix": "def f():\n",
    "input_suffix": "\n",
    "input_extra": [{"text": "x = 1\n", "time": 1730000000000, "filename": "a.py"}],
    "prompt": "    ret",
    "n_predict": 128,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}
"""A request of llama-vscode."""
TEXTS = {"input_prefix": "ab", "input_suffix": "yz"}


def post(web: httpx.Client, path: str = "/infill", **fields: Any) -> Any:
    response = web.post(path, json={"model": "code", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_answer_has_llama_servers_fields(web: httpx.Client) -> None:
    found = post(web, **TEXTS, prompt="c\n")
    assert found["content"] == "abc\n|yz" and found["has_new_line"]
    assert (found["stop"], found["stop_type"], found["truncated"]) == (True, "eos", False)
    assert found["tokens_evaluated"] == 10
    assert found["timings"]["predicted_n"] == found["tokens_predicted"]


def test_a_request_of_llama_vim_gets_the_fields_that_it_reads(web: httpx.Client) -> None:
    found = post(web, **VIM)
    assert set(found) == set(VIM_FIELDS)
    assert found["content"] == "def f():\n    ret|\n\nprint(f())\n"


VSCODE_WARM_UP = {
    **{name: VIM_WARM_UP[name] for name in ("input_prefix", "input_suffix", "prompt", "stream")},
    **{"n_predict": 1, "top_k": 40, "top_p": 0.99, "samplers": ["temperature"]},
    **{"cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1},
}
"""The request with which llama-vscode has other files computed."""


def test_llama_vim_has_other_files_computed_in_advance(web: httpx.Client) -> None:
    assert post(web, **VIM_WARM_UP) == {}


@pytest.mark.parametrize("warm_up", [VIM_WARM_UP, VSCODE_WARM_UP], ids=["vim", "vscode"])
def test_other_files_are_computed_whole_whatever_time_their_request_allows(
    web: httpx.Client, warm_up: dict[str, Any]
) -> None:
    """They take longer than the one millisecond that editors send, which llama-server ignores."""
    kind = "vim" if warm_up is VIM_WARM_UP else "vscode"
    extra = [{"text": f"{kind} {number}\n" * 40, "filename": "a.py"} for number in range(8)]
    files = {"model": "slow", "input_extra": extra}
    size = sum(len(each["text"]) for each in extra)
    assert web.post("/infill", json={**warm_up, **files}).status_code == 200
    vim = {name: value for name, value in VIM.items() if name != "input_extra"}
    found = post(web, **{**vim, **files, "t_max_prompt_ms": 1, "t_max_predict_ms": -1})
    assert found["content"] == "def f():\n    ret|\n\nprint(f())\n"
    assert found["timings/prompt_n"] < size / 10


def test_a_request_of_llama_vscode_is_answered_without_the_name_of_a_model(
    web: httpx.Client,
) -> None:
    post(web, **TEXTS)  # the only model in memory, or the only one that was named
    response = web.post("/infill", json={"model": "code", **VSCODE})
    assert response.json()["content"] == "def f():\n    ret|\n"
    assert {"content", "generation_settings", "tokens_cached", "truncated", "timings"} <= set(
        response.json()
    )


def test_llama_vims_instructions_are_chats(web: httpx.Client) -> None:
    """Also the request with which it has the selected text computed in advance."""
    fields = {"model": "chat", "id_slot": 7, "messages": [{"role": "user", "content": "hello"}]}
    more = {"samplers": [], "n_predict": 0, "stream": False, "response_fields": [""]}
    assert web.post("/v1/chat/completions", json={**fields, **more}).status_code == 200
    more = {"samplers": ["min_p", "temperature"], "min_p": 0.1, "temperature": 0.1, "stream": True}
    with web.stream("POST", "/v1/chat/completions", json={**fields, **more}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == "hello"


def test_the_empty_model_of_llama_vims_instructions_is_the_only_loaded_one() -> None:
    """It sends this, unless its user names a model."""
    fields = {"model": "", "messages": [{"role": "user", "content": "hello"}]}
    path = "/v1/chat/completions"
    with running_daemon(echo_model("only")) as daemon, gateway(daemon) as http:
        httpx.post(http.url + path, json={**fields, "model": "only"}, timeout=CALL_S_MAX)
        found = httpx.post(http.url + path, json=fields, timeout=CALL_S_MAX).json()
        assert found["model"] == "only"
        assert found["choices"][0]["message"]["content"] == "hello"
        counted = httpx.post(f"{http.url}{path}/input_tokens", json=fields, timeout=CALL_S_MAX)
        assert counted.json()["input_tokens"] > 0
    config = echo_model("one") + echo_model("two")
    with running_daemon(config) as daemon, gateway(daemon) as http:
        refused = httpx.post(http.url + path, json=fields, timeout=CALL_S_MAX)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "model"


def test_a_request_of_llama_vim_for_several_answers_gets_a_list(web: httpx.Client) -> None:
    content = "def f():\n    ret|\n\nprint(f())\n"
    for supersede in ("", "buffer"):
        found = post(web, **VIM, n_cmpl=3, supersede=supersede)
        assert [each["content"] for each in found] == [content] * 3
        assert {frozenset(each) for each in found} == {frozenset(VIM_FIELDS)}
    assert post(web, **VIM, n_cmpl=1)["content"] == content
    assert [each["index"] for each in post(web, **TEXTS, n_cmpl=2)] == [0, 1]
    fields = {"model": "code", **TEXTS, "prompt": "\n", "n_cmpl": 2, "stream": True}
    with web.stream("POST", "/infill", json=fields) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for number in (0, 1):
        own = [event for event in events if event["index"] == number]
        assert "".join(event["content"] for event in own) == "ab\n|yz"
        assert own[-1]["stop"] and own[-1]["has_new_line"]
    assert web.post("/infill", json={"model": "code", **TEXTS, "n_cmpl": 17}).status_code == 400


@pytest.mark.parametrize(
    ("more", "stop_type"),
    [({"n_predict": 2}, "limit"), ({"stop": ["b"]}, "word"), ({}, "eos")],
)
def test_the_end_of_an_answer_has_its_type(
    web: httpx.Client, more: dict[str, Any], stop_type: str
) -> None:
    found = post(web, **TEXTS, **more)
    assert found["stop_type"] == stop_type
    assert found["stopping_word"] == ("b" if stop_type == "word" else "")


def test_a_stream_has_the_text_in_parts_and_ends_with_all_else(web: httpx.Client) -> None:
    with web.stream("POST", "/infill", json={"model": "code", **TEXTS, "stream": True}) as found:
        lines = [line for line in found.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == "ab|yz"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "eos" and events[-1]["tokens_predicted"] == 6


def test_a_model_that_does_not_fill_in_refuses_with_a_sentence(web: httpx.Client) -> None:
    for stream in (False, True):
        response = web.post("/infill", json={"model": "chat", **TEXTS, "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert "does not fill in text between two others" in error["message"]
        assert "fill in the middle" in error["message"]


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "a"}])
def test_a_part_of_a_file_without_a_text_is_refused(
    web: httpx.Client, extra: dict[str, Any]
) -> None:
    response = web.post("/infill", json={"model": "code", **TEXTS, "input_extra": [extra]})
    assert response.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_the_suffix_of_openais_completions_follows_the_answer(
    api: openai.OpenAI, stream: bool
) -> None:
    found: Any = api.completions.create(
        model="code", prompt=["ab", "cd"], suffix="yz", max_tokens=50, stream=stream
    )
    if not stream:
        assert [choice.text for choice in found.choices] == ["ab|yz", "cd|yz"]
        return
    texts = ["", ""]
    for chunk in found:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["ab|yz", "cd|yz"]


def test_a_suffix_with_token_ids_is_refused(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not token ids"):
        api.completions.create(model="code", prompt=[1, 2], suffix="yz")


def test_the_suffix_of_ollamas_completions_follows_the_answer(web: httpx.Client) -> None:
    fields = {"model": "code", "prompt": "ab", "suffix": "yz", "stream": False}
    found = web.post("/api/generate", json=fields).json()
    assert found["response"] == "ab|yz" and found["done_reason"] == "stop"
    refused = web.post("/api/generate", json=fields | {"model": "chat"})
    assert refused.status_code == 400
    assert "does not fill in" in refused.json()["error"]
