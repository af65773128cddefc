"""Ollama's API on the echo model, with Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from inferd import Client
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway

CONFIG = "".join(
    (
        echo_model("echo", tool_format="hermes"),
        echo_model("broken", fail_at_step=6),
        *(echo_model(f"late-{number}", load_ms=300) for number in range(4)),
    )
)
CALL = '<tool_call>{"name": "weather", "arguments": {"at": "Rome"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def api(http: RunningGateway) -> Iterator[ollama.Client]:
    with ollama.Client(host=http.url, timeout=CALL_S_MAX) as client:
        yield client


def test_a_whole_chat_has_its_text_its_end_and_its_counts(api: ollama.Client) -> None:
    done = api.chat("echo", HELLO)
    assert done.message.content == "hello"
    assert (done.done, done.done_reason, done.model) == (True, "stop", "echo")
    assert (done.prompt_eval_count, done.eval_count) == (7, 6)
    assert done.total_duration and done.eval_duration is not None


def test_the_time_of_a_load_is_part_of_the_total(api: ollama.Client) -> None:
    def durations(call: Callable[[], Any]) -> tuple[int, int]:
        done = call()
        return done.load_duration, done.total_duration

    calls: list[Callable[[], Any]] = [
        lambda: api.chat("late-0", HELLO),
        lambda: list(api.chat("late-1", HELLO, stream=True))[-1],
        lambda: api.generate("late-2", "hello"),
        lambda: api.embed("late-3", "hello"),
    ]
    for call in calls:
        load, total = durations(call)
        assert 300e6 <= load <= total
        again, total = durations(call)
        assert 0 < again <= total
        while again >= load:  # a busy machine may delay a call as long; pytest limits the time
            again, _ = durations(call)


def test_a_stream_has_a_line_for_each_piece_and_a_last_one(api: ollama.Client) -> None:
    lines = list(api.chat("echo", HELLO, stream=True))
    texts = [line.message.content or "" for line in lines]
    assert "".join(texts) == "hello" and len([text for text in texts if text]) > 1
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == 6 and lines[-1].done_reason == "stop"


@pytest.mark.asyncio
async def test_the_asynchronous_client_streams(http: RunningGateway) -> None:
    async with ollama.AsyncClient(host=http.url) as client:
        lines = await client.chat("echo", HELLO, stream=True)
        texts = [line.message.content async for line in lines]
    assert "".join(text or "" for text in texts) == "hello"


def test_a_chat_streams_by_default(web: httpx.Client) -> None:
    reply = web.post("/api/chat", json={"model": "echo", "messages": HELLO})
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert len(reply.text.splitlines()) > 2


def test_a_number_of_tokens_ends_the_answer(api: ollama.Client) -> None:
    done = api.chat("echo", HELLO, options={"num_predict": 2})
    assert (done.message.content, done.done_reason, done.eval_count) == ("he", "length", 2)
    assert api.chat("echo", HELLO, options={"num_predict": -2}).message.content == "hello"


def test_each_token_has_its_logprob(api: ollama.Client) -> None:
    done = api.chat("echo", HELLO, logprobs=True, top_logprobs=1)
    assert done.logprobs is not None
    assert [each.token for each in done.logprobs] == list("hello")
    lines = list(api.chat("echo", HELLO, logprobs=True, stream=True))
    assert [each.token for line in lines for each in line.logprobs or ()] == list("hello")


@pytest.mark.parametrize("raw", [False, True])
def test_a_completion_has_the_answer_to_a_prompt(api: ollama.Client, raw: bool) -> None:
    done = api.generate("echo", "hello", raw=raw)
    assert done.response == "hello" and done.done_reason == "stop"
    lines = list(api.generate("echo", "hello", raw=raw, stream=True))
    assert "".join(line.response or "" for line in lines) == "hello" and lines[-1].done


def test_a_tag_is_left_out_of_a_models_name(api: ollama.Client) -> None:
    done = api.chat("echo:latest", HELLO)
    assert (done.message.content, done.model) == ("hello", "echo:latest")


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_request_without_a_prompt_loads_the_model(path: str, web: httpx.Client) -> None:
    reply = web.post(f"/api/{path}", json={"model": "echo"})
    assert (reply.status_code, reply.json()["done_reason"]) == (200, "load")
    refused = web.post(f"/api/{path}", json={"model": "echo", "keep_alive": 0})
    assert refused.status_code == 403 and "operator" in refused.json()["error"]


def test_an_operators_request_without_a_prompt_unloads_the_model(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    made = inferd("gateway", "--new-key", "ada")
    key, file = made.stderr.split()[-1], tmp_path / "keys.toml"
    file.write_text(f"{made.stdout}operator = true\n")  # its own user may not manage models
    headers = {"Authorization": f"Bearer {key}"}
    with (
        gateway(daemon, "--keys", str(file)) as running,
        ollama.Client(host=running.url, headers=headers, timeout=CALL_S_MAX) as own,
    ):
        own.chat("echo", HELLO)
        assert "echo" in [model.model for model in own.ps().models]
        assert own.generate("echo", keep_alive=0).done_reason == "unload"
        assert "echo" not in [model.model for model in own.ps().models]


def test_a_session_stays_after_its_requests(client: Client, web: httpx.Client) -> None:
    body = {"model": "echo", "stream": False, "session_id": "kept", "messages": HELLO}
    for _ in range(2):
        assert web.post("/api/chat", json=body).json()["message"]["content"] == "hello"
    [session] = [s for s in client.sessions(dormant=True) if s["session_id"] == "kept"]
    assert session["turns"] == 2 and session["state"] == "dormant"


def test_embeddings_are_the_daemons(api: ollama.Client, daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client:
        expected = client.embed("echo", ["one", "another"])
    found = api.embed("echo", ["one", "another"])
    assert [list(vector) for vector in found.embeddings] == list(expected)
    assert found.prompt_eval_count == sum(expected.tokens)
    assert [list(v) for v in api.embed("echo", "one").embeddings] == expected[:1]
    assert list(api.embeddings("echo", "one").embedding) == expected[0]
    assert api.embed("echo", []).embeddings == []


def test_a_long_text_to_embed_is_truncated_or_refused(
    api: ollama.Client, web: httpx.Client
) -> None:
    texts = ["one", "x" * 5000]
    whole = api.embed("echo", ["one", "x" * 4094])
    for keywords in ({}, {"truncate": True}):
        cut = web.post("/api/embed", json={"model": "echo", "input": texts, **keywords}).json()
        assert cut["truncated"] == [1] and cut["prompt_eval_count"] == whole.prompt_eval_count
        assert cut["embeddings"] == [list(vector) for vector in whole.embeddings]
    with pytest.raises(ollama.ResponseError, match="text 1: the text has") as refused:
        api.embed("echo", texts, truncate=False)
    assert refused.value.status_code == 400
    assert web.post("/v1/embeddings", json={"model": "echo", "input": texts}).status_code == 400
    older = {"model": "echo", "prompt": texts[1], "truncate": True}
    assert web.post("/api/embeddings", json=older).status_code == 400
    assert "truncated" not in web.post("/api/embed", json={"model": "echo", "input": "one"}).json()


def test_shortened_embeddings_have_length_one(api: ollama.Client, web: httpx.Client) -> None:
    [vector] = api.embed("echo", "one", dimensions=4).embeddings
    assert len(vector) == 4 and sum(number * number for number in vector) == pytest.approx(1)
    reply = web.post("/api/embed", json={"model": "echo", "input": "one", "dimensions": 10**6})
    assert reply.status_code == 400 and "dimensions" in reply.json()["error"]


def test_the_lists_name_the_daemons_models(api: ollama.Client) -> None:
    api.chat("echo", HELLO)
    [listed] = [each for each in api.list().models if each.model == "echo"]
    assert listed.model == "echo" and listed.digest and len(listed.digest) == 64
    [loaded] = [each for each in api.ps().models if each.name == "echo"]
    assert loaded.name == "echo" and loaded.context_length and loaded.expires_at
    shown = api.show("echo")
    assert shown.capabilities is not None and "completion" in shown.capabilities
    assert shown.details is not None and shown.details.family == "echo"


def test_programs_find_it_as_they_find_ollama(web: httpx.Client) -> None:
    assert web.get("/").text == "Ollama is running"
    assert web.head("/").status_code == 200
    assert web.get("/api/version").json()["version"].count(".") == 2


def test_the_machines_models_are_not_changed(api: ollama.Client, web: httpx.Client) -> None:
    calls: list[Callable[[], object]] = [
        lambda: api.pull("qwen3"),
        lambda: api.push("qwen3"),
        lambda: api.create("new", from_="echo"),
        lambda: api.copy("echo", "new"),
        lambda: api.delete("echo"),
    ]
    for refused in calls:
        with pytest.raises(ollama.ResponseError, match="does not change the machine's models") as e:
            refused()
        assert e.value.status_code == 400
    assert web.post(f"/api/blobs/sha256:{'0' * 64}", json={}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(api: ollama.Client, stream: bool) -> None:
    with pytest.raises(ollama.ResponseError, match="missing") as found:
        list(api.chat("missing", HELLO, stream=stream))  # type: ignore[call-overload]
    assert found.value.status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["!"]}]}, "0.images.0"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": "AAAA"}]}, "0.images"),
        ("chat", {"messages": [{"content": "a"}]}, "role"),
        ("chat", {"messages": [{"role": "user", "content": 1}]}, "content"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        ("chat", {"messages": HELLO, "options": {"temperature": "hot"}}, "temperature"),
        ("chat", {"messages": HELLO, "format": "xml"}, "format"),
        ("chat", {"messages": HELLO, "think": "hard"}, "think"),
        ("generate", {"prompt": "a", "images": ["!"]}, "images.0"),
        ("generate", {"prompt": "a", "images": [1]}, "images"),
        ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("generate", {"prompt": "a", "template": "b"}, "template"),
        ("generate", {"prompt": "a", "context": [1]}, "context"),
        ("embed", {"input": [1]}, "input"),
        ("show", {"model": "echo", "system": "x"}, "system"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(
    path: str, body: dict[str, Any], named: str, web: httpx.Client
) -> None:
    reply = web.post(f"/api/{path}", json={"model": "echo", **body})
    assert reply.status_code == 400 and named in reply.json()["error"], reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_its_arguments_as_an_object(stream: bool, api: ollama.Client) -> None:
    chat: Any = api.chat
    messages = [{"role": "user", "content": CALL}]
    reply = chat("echo", messages, tools=[TOOL], stream=stream)
    parts = list(reply) if stream else [reply]
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"at": "Rome"})
    history = [*messages, {"role": "assistant", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_name": "weather", "content": "sunny"}, *HELLO]
    assert chat("echo", history, tools=[TOOL]).message.content == "hello"


def test_a_message_without_content_is_empty_as_in_ollama(web: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant"}, {"role": "user", "content": None}]
    reply = web.post("/api/chat", json={"model": "echo", "messages": messages, "stream": False})
    assert reply.status_code == 200, reply.text


def test_a_late_error_is_a_line_of_the_stream(web: httpx.Client) -> None:
    with web.stream("POST", "/api/chat", json={"model": "broken", "messages": HELLO}) as reply:
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert reply.status_code == 200 and lines[0]["done"] is False
    assert list(lines[-1]) == ["error"]


def test_a_program_may_leave_the_content_type_out(web: httpx.Client) -> None:
    """As litellm does, and `curl -d`, which declares a form."""
    body = json.dumps({"model": "echo", "messages": HELLO, "stream": False})
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        reply = web.post("/api/chat", content=body, headers=headers)
        assert reply.json()["message"]["content"] == "hello"


@pytest.mark.parametrize("name", ["echo:latest", "Echo", "ECHO:latest"])
def test_each_api_knows_a_model_by_its_tag_and_in_any_case(
    http: RunningGateway, api: ollama.Client, web: httpx.Client, name: str
) -> None:
    assert api.chat(name, HELLO).message.content == "hello"
    assert api.generate(name, "hi").response == "hi"
    assert api.show(name).details is not None
    assert web.get(f"/v1/models/{name}").json()["id"] == "echo"
    calls: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "hello"},
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {"messages": HELLO, "max_tokens": 9},
        "/v1/embeddings": {"input": "hello"},
        "/api/embed": {"input": "hello"},
        "/v1/inferd/sessions": {},
    }
    for path, fields in calls.items():
        response = web.post(path, json={"model": name, **fields})
        assert response.status_code == 200, (path, response.text)
    refused = web.post("/v1/chat/completions", json={"model": "Ekho:latest", "messages": HELLO})
    assert refused.status_code == 404 and "did you mean 'echo'?" in refused.text
