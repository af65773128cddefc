"""Programs without sessions, which send the whole conversation with each request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.test_tool_turns import EACH, FORMS, MESSAGES, TOOLS, grammar_of
from tests.models import ONE_THREAD, short_smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CONFIG = ONE_THREAD + "[models.smollm2]\nslots = 2\nctx-size = 512\n"
RANDOM: dict[str, Any] = {"model": "smollm2", "temperature": 1.5, "max_completion_tokens": 24}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    for name in ("smollm2", "tools"):
        (models / f"{name}.gguf").symlink_to(short_smollm2())
    template = models / "hermes.jinja"
    template.write_text(MESSAGES.replace("CALL", FORMS["hermes"][0]).replace("START", ""))
    tools = f'[models.tools]\nctx-size = 512\nchat-template-file = "{template}"\n'
    with running_daemon(CONFIG + tools, models_dir=models) as running:
        yield running


def test_no_token_of_an_old_answer_is_computed_again(api: openai.OpenAI) -> None:
    """The model writes random tokens, which the tokenizer would not choose for their text."""
    messages: list[Any] = [{"role": "user", "content": "Write words."}]
    known = 0
    for turn in range(4):
        done = api.chat.completions.create(**RANDOM, seed=turn, messages=messages)
        usage, answer = done.usage, done.choices[0].message
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= known
        known = usage.prompt_tokens + usage.completion_tokens - 1
        messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "More."}]


def test_a_loop_of_tools_computes_only_results(api: openai.OpenAI) -> None:
    """The model writes its calls without spaces, which the chat template would add."""
    answer = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    loop: dict[str, Any] = {"model": "tools", "tools": TOOLS, "max_completion_tokens": 40}
    loop["extra_body"] = {"grammar": grammar_of(answer)} | EACH
    messages: list[Any] = [{"role": "user", "content": "What is two and two?"}]
    known = 0
    for turn in range(3):
        done = api.chat.completions.create(**loop, messages=messages)
        usage, message = done.usage, done.choices[0].message
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= known
        known = usage.prompt_tokens + usage.completion_tokens - 3
        assert message.tool_calls, "the answer is a call"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"{turn}"}
        messages += [message.model_dump(exclude_none=True), result]


def test_a_changed_answer_is_read_as_it_was_sent(api: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Write words."}]
    first = api.chat.completions.create(**RANDOM, seed=9, messages=messages)
    changed = [
        *messages,
        {"role": "assistant", "content": "Words."},
        {"role": "user", "content": "More."},
    ]

    done = api.chat.completions.create(**RANDOM, seed=9, messages=changed)

    assert first.usage is not None and done.usage is not None
    assert done.usage.prompt_tokens < first.usage.prompt_tokens + first.usage.completion_tokens


def test_a_conversation_that_does_not_fit_is_refused_as_one_input(api: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 250}]
    first = api.chat.completions.create(**RANDOM, seed=1, messages=messages)
    answer = first.choices[0].message.model_dump(exclude_none=True)
    messages += [answer, {"role": "user", "content": "more " * 250}]

    with pytest.raises(openai.BadRequestError, match="context"):
        api.chat.completions.create(**RANDOM, seed=1, messages=messages)
