"""Programs without sessions, which send the whole conversation with each request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.models import ONE_THREAD, short_smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CONFIG = ONE_THREAD + "[models.smollm2]\nslots = 2\nctx-size = 512\n"
RANDOM: dict[str, Any] = {"model": "smollm2", "temperature": 1.5, "max_completion_tokens": 24}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(short_smollm2())
    with running_daemon(CONFIG, models_dir=models) as running:
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
