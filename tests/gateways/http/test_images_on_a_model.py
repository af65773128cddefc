"""Images over HTTP on a tiny model with a tiny projector."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.models import ONE_THREAD
from tests.pictures import png
from tests.tiny_projector import write_pair

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
IMAGE_TOKENS = 4
"""Of the tiny projector of the kind gemma3."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    model, _ = write_pair("gemma3", models)
    with running_daemon(
        f"{ONE_THREAD}[models.{model.stem}]\nctx-size = 512\n", models_dir=models
    ) as running:
        yield running


def asked(color: tuple[int, int, int], text: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{b64encode(png(16, 16, color)).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def test_a_chat_that_is_sent_again_computes_its_image_no_more(api: openai.OpenAI) -> None:
    [model] = [each.id for each in api.models.list()]
    keywords: Any = {"model": model, "temperature": 0, "max_tokens": 8}
    messages: list[Any] = [asked((200, 0, 0), "What is this?")]
    first = api.chat.completions.create(**keywords, messages=messages)
    assert first.usage is not None
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "And now?"})
    second = api.chat.completions.create(**keywords, messages=messages)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens
    messages.append({"role": "assistant", "content": second.choices[0].message.content})
    messages.append(asked((0, 0, 200), "Another one?"))
    third = api.chat.completions.create(**keywords, messages=messages)
    assert third.usage is not None and third.usage.prompt_tokens_details is not None
    assert (third.usage.prompt_tokens_details.cached_tokens or 0) >= second.usage.prompt_tokens
    assert third.usage.prompt_tokens > second.usage.total_tokens + IMAGE_TOKENS


def test_the_image_decides_the_answer_and_not_its_name(api: openai.OpenAI) -> None:
    """The same image gives the same answer, with any text about it beside."""
    [model] = [each.id for each in api.models.list()]
    keywords: Any = {"model": model, "temperature": 0, "max_tokens": 8, "logprobs": True}

    def logprobs(color: tuple[int, int, int]) -> list[float]:
        message: Any = asked(color, "x")
        done = api.chat.completions.create(**keywords, messages=[message])
        assert done.choices[0].logprobs is not None
        return [each.logprob for each in done.choices[0].logprobs.content or ()]

    red, again, blue = logprobs((200, 0, 0)), logprobs((200, 0, 0)), logprobs((0, 0, 200))
    assert red == pytest.approx(again, abs=1e-3)
    assert red != pytest.approx(blue, abs=1e-3)
