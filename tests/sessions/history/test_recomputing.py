"""Chat templates and a history: unchanged text is kept, rewritten text is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from inferd.backends import Rendering
from inferd.scheduler import messages as m
from inferd.sessions.history.history import NOT_RECOMPUTED, History, Recomputed
from tests.sessions.history.test_history import ChatClient, ended, ids, said, text_of, turn_on, user

pytestmark = pytest.mark.asyncio

Template = Callable[[Sequence[dict[str, Any]], Rendering], str]


class TemplateClient(ChatClient):
    """Renders by the template that it is given."""

    def __init__(self, template: Template):
        super().__init__()
        self._template = template

    def template(self, messages: Sequence[dict[str, Any]], rendering: Rendering) -> str:
        return self._template(messages, rendering)


def trims(messages: Sequence[dict[str, Any]], rendering: Rendering) -> str:
    """Trim every content, as Gemma's template does."""
    return text_of([x | {"content": x["content"].strip()} for x in messages])


def forgets_reasoning(messages: Sequence[dict[str, Any]], rendering: Rendering) -> str:
    """Leave reasoning out of earlier answers, as Qwen's and DeepSeek's templates do."""
    return text_of([x | {"content": x["content"].split("</think>")[-1]} for x in messages])


def names_tools(messages: Sequence[dict[str, Any]], rendering: Rendering) -> str:
    names = [tool["function"]["name"] for tool in rendering.tools]
    return f"[{','.join(names)}]{text_of(messages)}"


async def answered(client: ChatClient, answer: str, *reports: m.Report) -> History:
    history = History()
    await history.add_messages(client, user("q"))
    return history.after(turn_on(history, said(answer), *(reports or (ended(),))))


async def test_what_a_template_only_adds_to_stands() -> None:
    client = ChatClient()
    history = await answered(client, "one")
    await history.add_messages(client, user("r"))

    assert history.recomputed == NOT_RECOMPUTED


async def test_an_answer_whose_white_space_a_template_trims_keeps_its_tokens() -> None:
    client = TemplateClient(trims)
    history = await answered(client, " one \n")
    await history.add_messages(client, user("r"))

    assert history.prompt == ids("<u>q\n<a> one \n\n<u>r\n<a>")
    assert history.recomputed == NOT_RECOMPUTED
    history = history.after(turn_on(history, said("two "), ended()))
    await history.add_messages(client, user("s"))
    assert history.prompt == ids("<u>q\n<a> one \n\n<u>r\n<a>two \n<u>s\n<a>")


async def test_text_that_a_template_rewrites_is_computed_again_and_reported() -> None:
    client = TemplateClient(forgets_reasoning)
    history = await answered(client, "<think>hm</think>one")
    await history.add_messages(client, user("r"))

    assert history.prompt == ids("<u>q\n<a>one\n<u>r\n<a>")
    assert history.recomputed.tokens == len("<think>hm</think>one")
    assert "'one" in history.recomputed.why and "'<think>hm" in history.recomputed.why


async def test_other_tools_are_the_reported_reason() -> None:
    client = TemplateClient(names_tools)
    history = await answered(client, "one")
    tool = {"type": "function", "function": {"name": "now"}}
    await history.add_messages(client, user("r"), Rendering(tools=[tool]))

    assert history.prompt == ids("[now]<u>q\n<a>one\n<u>r\n<a>")
    assert history.recomputed.tokens == len("]<u>q\n<a>one")
    assert history.recomputed.why.startswith("tools")
    history = history.after(turn_on(history, said("two"), ended()))
    await history.add_messages(client, user("s"), Rendering(tools=[tool]))
    assert history.recomputed == NOT_RECOMPUTED


async def test_an_answer_cut_at_a_stop_text_is_the_reported_reason() -> None:
    client = ChatClient()
    history = History()
    await history.add_messages(client, user("q"))
    history = history.after(turn_on(history, m.Tokens(1, ids("yes."), b"yes"), ended("stop")))
    await history.add_messages(client, user("r"))

    assert history.recomputed.tokens == 1
    assert "stop text" in history.recomputed.why


async def test_a_chat_after_raw_text_begins_anew_and_says_so() -> None:
    history = History()
    history.replace_tokens(ids("raw"))
    await history.add_messages(ChatClient(), user("q"))

    assert history.recomputed == Recomputed(3, "a chat after raw text begins a new history")


async def test_the_report_on_a_turn_is_not_repeated_for_the_next() -> None:
    client = TemplateClient(forgets_reasoning)
    history = await answered(client, "<think>hm</think>one")
    await history.add_messages(client, user("r"))
    history = history.after(turn_on(history, said("two"), ended()))
    history.append_tokens([7])

    assert history.recomputed == NOT_RECOMPUTED


async def test_the_templates_arguments_are_stored_with_the_history() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    history = History()
    await history.add_messages(TemplateClient(names_tools), user("q"), Rendering(tools=[tool]))
    again = History.from_entry(history.entry())

    await again.retokenize(TemplateClient(names_tools), b"")
    sent = ids("[now]<u>q\n<a>")
    assert again.prompt[: len(sent)] == sent
