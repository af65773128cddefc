"""The status of a streamed request that is invalid, whatever the load and the held headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway
from tests.gateways.http.test_waiting import LONG, Request, begun, running
from tests.models import smollm2
from tests.waiting import wait_until

CONFIG = "".join(
    (
        echo_model("echo", ctx_size=200, tool_format="hermes"),
        echo_model("busy", step_ms=20, slots=1),
        echo_model("cold", load_ms=600_000, ctx_size=200),
        echo_model("prefill", step_ms=500, **{"batch-size": 16}),
        echo_model("lazy", tokenize_ms=100_000, ctx_size=2000),
    )
)
OPTIONS = ("--hold-headers", "0")
USER = {"role": "user", "content": "hello"}
FUNCTION = {"name": "f", "parameters": {"$ref": "#/nowhere"}}
DANGLING = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}
WITHOUT_MODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "a parameter": ("chat/completions", {"messages": [USER], "temperature": -5}),
    "two formats": ("chat/completions", {"messages": [USER], "grammar": "a", "regex": "b"}),
    "a role": ("chat/completions", {"messages": [{"role": "critic", "content": "x"}]}),
    "an empty assistant": ("chat/completions", {"messages": [USER, {"role": "assistant"}]}),
    "a reference": (
        "chat/completions",
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": DANGLING, "strict": True},
            },
        },
    ),
    "a regex": ("completions", {"prompt": "x", "regex": "(("}),
    "a grammar": ("completions", {"prompt": "x", "grammar": 'root ::= "a'}),
    "a function's schema": (
        "chat/completions",
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
        },
    ),
    "a format of responses": (
        "responses",
        {
            "input": "x",
            "text": {
                "format": {"type": "json_schema", "name": "x", "schema": DANGLING, "strict": True}
            },
        },
    ),
    "a message of Anthropic's": (
        "messages",
        {
            "messages": [USER],
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": DANGLING}},
        },
    ),
}
WITH_MODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "a long chat": ("chat/completions", {"messages": [{"role": "user", "content": "x" * 500}]}),
    "a long text": ("completions", {"prompt": "x" * 500}),
    "one long text of several": ("completions", {"prompt": ["a", "b" * 500, "c"]}),
    "a long text with several answers": ("completions", {"prompt": "x" * 500, "n": 3}),
    "an adapter": ("completions", {"prompt": "x", "lora": "nobody"}),
    "a token": ("completions", {"prompt": [97, 10**6]}),
}
ALL = {**WITHOUT_MODEL, **WITH_MODEL}


def status_of(web: httpx.Client, name: str, model: str) -> tuple[int, str]:
    """Return the status and the body of an invalid stream."""
    path, body = ALL[name]
    found = web.post(f"/v1/{path}", json={"model": model, "stream": True, **body})
    return found.status_code, found.text


@pytest.fixture(scope="module")
def loaded(daemon: RunningDaemon) -> Iterator[None]:
    """The loaded model `echo`."""
    with Client(daemon.socket) as client:
        client.load_by_name("echo")
        yield


@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("loaded")
def test_an_invalid_stream_has_a_status_without_held_headers(web: httpx.Client, name: str) -> None:
    status, text = status_of(web, name, "echo")
    assert status == 400, text
    assert json.loads(text)["error"]["message"]


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_an_error_that_needs_no_model_has_a_status_during_the_load(
    web: httpx.Client, client: Client, name: str
) -> None:
    """The load would take ten minutes."""
    status, text = status_of(web, name, "cold")
    assert status == 400, text
    assert client.show("cold")["state"] != "ready"


def test_a_valid_stream_shows_that_its_model_is_being_loaded(http: RunningGateway) -> None:
    with Request(http, {"model": "cold", "prompt": "y"}) as request:
        assert request.response.status == 200
        assert next(request.lines()) == ": waiting"


def test_an_error_that_needs_the_model_is_in_the_stream_that_waited_for_it() -> None:
    config = echo_model("late", load_ms=1500, ctx_size=200)
    with (
        running_daemon(config) as other,
        gateway(other, *OPTIONS) as own,
        Request(own, {"model": "late", "prompt": "x" * 500}) as request,
    ):
        assert request.response.status == 200
        *waiting, error = request.lines()
    assert waiting and set(waiting) == {": waiting"}
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"


@pytest.mark.usefixtures("loaded")
def test_invalid_streams_have_a_status_beside_many_others(
    http: RunningGateway, client: Client
) -> None:
    """The slot is busy, and all come at once, so that each of them takes its time."""
    names = list(ALL) * 8
    with (
        Request(http, {"model": "busy", **LONG}) as first,
        ThreadPoolExecutor(len(names)) as threads,
        httpx.Client(
            base_url=http.url, timeout=CALL_S_MAX, limits=httpx.Limits(max_connections=None)
        ) as web,
    ):
        begun(first)
        found = list(threads.map(lambda name: (name, *status_of(web, name, "echo")), names))
    assert {(name, status) for name, status, _ in found} == {(name, 400) for name in ALL}
    wait_until(lambda: not running(client, "busy"))


def test_a_turn_that_waits_for_its_slot_has_a_status_too(
    http: RunningGateway, client: Client, web: httpx.Client
) -> None:
    with Request(http, {"model": "busy", **LONG}) as first:
        begun(first)
        long = web.post(
            "/v1/completions", json={"model": "busy", "prompt": "x" * 5000, "stream": True}
        )
        assert long.status_code == 400
        with Request(http, {"model": "busy", "prompt": "y"}) as second:
            assert second.response.status == 200
            assert next(second.lines()).startswith(": waiting, place 1 of 1")
    wait_until(lambda: not running(client, "busy"))


def test_a_turn_whose_prompt_is_computed_shows_that_it_was_accepted(http: RunningGateway) -> None:
    """Its prompt takes minutes; a client would otherwise wait for headers as long."""
    with Request(http, {"model": "prefill", "prompt": "x" * 3000}) as request:
        assert request.response.status == 200
        assert next(request.lines()) == ": waiting"


def test_headers_wait_for_the_tokens_of_a_prompt(http: RunningGateway, client: Client) -> None:
    """The prompt takes two seconds to be tokenized, and is then too long for the context."""
    graph = client.load_by_name("lazy")
    with Request(http, {"model": "lazy", "prompt": "x" * 2020}) as request:
        assert request.response.status == 400
    client.unload(graph)


def test_a_turn_that_waits_for_its_place_among_the_sessions_has_a_status() -> None:
    config = "[daemon]\nsessions-max = 1\n" + echo_model("slow", step_ms=50)
    with (
        running_daemon(config) as daemon,
        gateway(daemon, *OPTIONS) as own,
        Request(own, {"model": "slow", **LONG}) as first,
    ):
        begun(first)
        with Request(own, {"model": "slow", "prompt": "x" * 5000}) as long:
            assert long.response.status == 400
        with Request(own, {"model": "slow", "prompt": ["y", "z"]}) as several:
            assert several.response.status == 200
            assert next(several.lines()) == ": waiting"
            first.connection.close()
            first.response.close()
            assert list(several.lines())[-1] == "data: [DONE]"


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("state", ["unloaded", "loaded"])
def test_the_refusal_of_a_chat_template_has_a_status(tmp_path: Path, state: str) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('no user') }}{% endif %}x"
    (tmp_path / "m.gguf").symlink_to(smollm2())
    config = f"[models.m]\nchat-template = {json.dumps(template)}\nctx-size = 256\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, gateway(daemon, *OPTIONS) as own:
        if state == "loaded":
            with Client(daemon.socket) as client:
                client.load_by_name("m")
        with (
            openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as api,
            pytest.raises(openai.BadRequestError, match="no user"),
        ):
            api.chat.completions.create(
                model="m", messages=[{"role": "system", "content": "x"}], stream=True
            )
