"""The text of a chat by its template, and the part of it that extends the text of its history."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...backends import Rendering
from ...backends.errors import InvalidArgument
from ..messages import ChatPrompt

C = TypeVar("C")
Messages = list[dict[str, Any]]


class ChatText(NamedTuple):
    """The text of a chat, and the part of it that is *appended* to the history, or None if the text
    does not begin with the history. *form* is the number of the answer's form that was rendered.
    """

    text: str
    appended: str | None
    form: int = 0


def appended_text(text: str, history: str, answer: str = "") -> str | None:
    """Return the part of *text* after *history*, which ends with *answer*; None if *text* does not
    begin with the history. White space around the answer may differ, because templates trim it.
    """
    if not history:
        return None
    before = history.removesuffix(answer)
    for answered in (history[len(before) :], answer.rstrip(), answer.lstrip(), answer.strip()):
        if text.startswith(before + answered):
            return text[len(before) + len(answered) :]
    return None


def render_chat(
    request: ChatPrompt, render: Callable[[Messages, Rendering], C]
) -> Generator[C, Any, ChatText]:
    """Yield calls of *render*, whose results are sent back; return the text.

    Of the forms of an answer, the first one is used with which the text begins with the history. If
    only the last form is left, the first one is used whose calls the template writes in another
    way than the answer; then the part after the answer is appended. The last form, the answer's
    text, is avoided because it may break the order of roles later.

    :raises InvalidArgument: the template refuses all forms.
    """
    texts = dict[int, str]()
    refusal: InvalidArgument | None = None
    for number, messages in enumerate(_forms(request)):
        if number and number == len(request.forms):
            found = yield from _after_calls(request, texts, render)
            if found is not None:
                return found
        try:
            text = yield render(messages, request.rendering)
        except InvalidArgument as exc:
            refusal = refusal or exc
            continue
        appended = appended_text(text, request.history, request.answer)
        if appended is not None:
            return ChatText(text, appended, number)
        texts[number] = text
    if not texts:
        assert refusal is not None
        raise refusal
    number, text = next(iter(texts.items()))
    return ChatText(text, None, number)


def _forms(request: ChatPrompt) -> list[Messages]:
    """Return the messages with each form of the answer. The last form is the answer's text."""
    before, after = request.messages[: request.answer_at], request.messages[request.answer_at + 1 :]
    return [request.messages, *([*before, form, *after] for form in request.forms)]


def _after_calls(
    request: ChatPrompt, texts: Mapping[int, str], render: Callable[[Messages, Rendering], C]
) -> Generator[C, Any, ChatText | None]:
    """Return the first of *texts* that has the calls of its form, with the part after the answer.
    That part begins as it does in a rendering of the last form, the answer's text.
    """
    if not texts or not request.history:
        return None
    if "tool_calls" not in request.messages[request.answer_at]:
        return None  # a template may leave out reasoning on purpose
    forms, end = _forms(request), request.answer_at + 1
    ended = msgspec.structs.replace(request.rendering, add_generation_prompt=False)
    before = request.history.removesuffix(request.answer)
    try:
        raw = yield render(forms[-1][:end], ended)
        rest = _after_answer(raw, request.answer)
        if rest is None:
            return None
        for number, text in texts.items():
            known = yield render(forms[number][:end], ended)
            calls = forms[number][request.answer_at]["tool_calls"]
            extends = text.startswith(known) and known.startswith(before)
            if extends and _shows(known[len(before) :], calls):
                return ChatText(text, rest + text[len(known) :], number)
    except InvalidArgument:
        pass
    return None


def _after_answer(text: str, answer: str) -> str | None:
    """Return the part of *text* after its last *answer*, which templates trim."""
    for answered in (answer, answer.rstrip(), answer.lstrip(), answer.strip()):
        place = text.rfind(answered)
        if answered and place >= 0:
            return text[place + len(answered) :]
    return None


def _shows(text: str, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a template's *text* of an answer has the answer's *calls*."""
    for function in (call["function"] for call in calls):
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if function["name"] not in text or arguments not in text:
            return False
    return True
