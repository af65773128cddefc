"""Fields of the three APIs whose effect shows in a prompt or in the queue.

The chat template of the model turns its arguments into numbers of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.models import ONE_THREAD, short_smollm2
from tests.waiting import wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
EFFORTS = {"none": 1, "low": 2, "medium": 3, "high": 4}
THINKING = {True: 20, False: 40}
EFFORT = f"{{{{ ' x' * {EFFORTS}[reasoning_effort] }}}}"
THOUGHT = f"{{{{ ' x' * {THINKING}[enable_thinking] }}}}"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    f"{{% if reasoning_effort is defined %}}{EFFORT}{{% endif %}}"
    f"{{% if enable_thinking is defined %}}{THOUGHT}{{% endif %}}"
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(short_smollm2())
    own = f'[models.smollm2]\nctx-size = 512\nslots = 2\nchat-template = """{TEMPLATE}"""\n'
    config = ONE_THREAD + own + echo_model("slow", step_ms=50)
    with running_daemon(config, models_dir=models) as running:
        yield running


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_reasoning_effort_of_openai_is_an_argument_of_the_template(
    api: openai.OpenAI, effort: Any
) -> None:
    def prompt_tokens(**keywords: Any) -> int:
        done = api.chat.completions.create(
            model="smollm2", messages=HELLO, max_completion_tokens=1, **keywords
        )
        assert done.usage is not None
        return int(done.usage.prompt_tokens)

    more = EFFORTS[effort] + THINKING[effort != "none"]
    assert prompt_tokens(reasoning_effort=effort) - prompt_tokens() == more
    response = api.responses.create(
        model="smollm2", input="hello", max_output_tokens=1, reasoning={"effort": effort}
    )
    assert response.usage is not None
    assert response.usage.input_tokens - prompt_tokens() == more


def test_thinking_of_anthropic_is_an_argument_of_the_template(http: RunningGateway) -> None:
    with anthropic.Anthropic(base_url=http.url, api_key="none", timeout=CALL_S_MAX) as own:

        def tokens(**keywords: Any) -> int:
            counted = own.messages.count_tokens(model="smollm2", messages=HELLO, **keywords)
            done = own.messages.create(model="smollm2", messages=HELLO, max_tokens=1, **keywords)
            used = done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0)
            assert counted.input_tokens == used
            return int(used)

        plain = tokens()
        enabled = {"type": "enabled", "budget_tokens": 1024}
        assert tokens(thinking=enabled) - plain == THINKING[True]
        assert tokens(thinking={"type": "disabled"}) - plain == THINKING[False]
        assert tokens(output_config={"effort": "high"}) - plain == EFFORTS["high"]
        assert tokens(cache_control={"type": "ephemeral"}) == plain


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"enable_thinking": True}, THINKING[True]),
        ({"enable_thinking": False}, THINKING[False]),
        ({"think": True}, THINKING[True]),
        ({"think": False}, THINKING[False]),
        ({"think": "high"}, THINKING[True] + EFFORTS["high"]),
        ({"think": "high", "enable_thinking": False}, THINKING[False] + EFFORTS["high"]),
        ({"think": None, "enable_thinking": None}, 0),
    ],
)
def test_fields_of_other_servers_that_turn_reasoning_on_are_arguments_of_the_template(
    http: RunningGateway, fields: dict[str, Any], more: int
) -> None:
    def tokens(path: str, **body: Any) -> int:
        found = httpx.post(
            f"{http.url}{path}", json={"model": "smollm2", **body}, timeout=CALL_S_MAX
        )
        assert "inferd-ignored" not in found.headers
        usage = found.json().get("usage", found.json())
        read = usage.get("prompt_tokens", usage.get("input_tokens"))
        return int(read + usage.get("cache_read_input_tokens", 0))

    if "think" not in fields and fields.get("enable_thinking") is not None:
        kind = {"type": "enabled" if fields["enable_thinking"] else "disabled"}
        chat: dict[str, Any] = {"messages": HELLO, "max_tokens": 1}
        plain = tokens("/v1/chat/completions", **chat)
        assert tokens("/v1/chat/completions", **chat, thinking=kind) - plain == more
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1, "store": False}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
    ):
        assert tokens(path, **body, **fields) - tokens(path, **body) == more


def test_think_of_ollama_is_an_argument_of_the_template(http: RunningGateway) -> None:
    with ollama.Client(host=http.url, timeout=CALL_S_MAX) as own:

        def tokens(**keywords: Any) -> int:
            done = own.chat("smollm2", HELLO, options={"num_predict": 1}, **keywords)
            return done.prompt_eval_count or 0

        plain = tokens()
        assert tokens(think=True) - plain == THINKING[True]
        assert tokens(think=False) - plain == THINKING[False]
        assert tokens(think="low") - plain == THINKING[True] + EFFORTS["low"]


def test_the_progress_of_a_prompt_and_its_times_are_those_of_the_engine(
    http: RunningGateway,
) -> None:
    messages = [{"role": "user", "content": "A long prompt. " * 40}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 2, "stream": True}
    wanted = {"return_progress": True, "timings_per_token": True}
    url = f"{http.url}/v1/chat/completions"
    text = httpx.post(url, json={**body, **wanted}, timeout=CALL_S_MAX).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "data: {" in line]
    chunks = [json.loads(line) for line in lines]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    timings = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    first, last = progress[0], progress[-1]
    assert first["processed"] == first["cache"] < last["processed"] == last["total"] > 100
    assert {each["cache_n"] for each in timings} == {first["cache"]}
    assert {each["prompt_n"] for each in timings} == {first["total"] - first["cache"]}
    # On a busy machine two tokens can arrive together, and are then one chunk.
    assert [each["predicted_n"] for each in timings] in ([1, 2, 2], [2, 2])
    assert last["time_ms"] == int(timings[-1]["prompt_ms"]) > 0


@pytest.mark.parametrize(
    ("tier", "priority", "shown"),
    [
        ("flex", "low", "flex"),
        ("default", "normal", "default"),
        ("auto", "normal", "default"),
        ("priority", "normal", "default"),  # the caller's highest class without a key
    ],
)
def test_a_service_tier_is_the_class_of_a_turn(
    api: openai.OpenAI, client: Client, tier: Any, priority: str, shown: str
) -> None:
    stream = api.chat.completions.create(
        model="slow",
        messages=[{"role": "user", "content": "x" * 500}],
        service_tier=tier,
        stream=True,
    )
    with stream:
        assert next(iter(stream)).service_tier == shown
        [turn] = [task for task in client.queue() if task["model"] == "slow"]
        assert turn["priority"] == priority
    wait_until(lambda: not client.queue())
