"""Answers as models write them: the texts that chat templates render, and their parsing.

A template shows a model in training what to write. So the text between the prompt of an answer and
the end of the rendered answer is what the model writes for a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from inferd.backends.llama.text import sandbox
from inferd.backends.llama.text.answer_probes import derive_answer_form
from inferd.backends.llama.text.template_form import derive_form, form_values
from inferd.scheduler.prefix import common_prefix
from inferd.sessions.answers.calls import ToolUse, join_parts
from inferd.sessions.answers.parser import AnswerParser
from inferd.sessions.answers.splitter import AnswerParts, AnswerSplitter
from tests.sessions.answers.answer_messages import TOOLS, AnswerMessage, functions

BOS, EOS = "<s>", "</s>"
USER = {"role": "user", "content": "Rome or Oslo?"}
NEXT = "and-after-that"
"""The text of the next message, whose place shows where the answer ends."""
_OTHER_ENDS = ("<|call|>", "<|calls|>", "<|end|>", "<|eom_id|>", "<|tool_response>")
"""Tokens at which models stop besides the template's usual one, as llama.cpp knows them by name."""
_MARKS_ONLY = re.compile(r"(<[^<>]+>|[a-z]+|\s)*")
OPENED_CHARACTERS_MAX = 64
_OTHER_OPENED = {"Here are my reasoning steps:": "\n[BEGIN FINAL RESPONSE]\n"}
NO_ARGUMENTS: Mapping[str, Any] = {}
_THINKING = {
    "enable_thinking": True,
    "thinking": True,
    "add_thoughts": True,
    "reasoning_effort": "high",
}


class Unwritable(Exception):
    """The template does not write a message; the text is the reason. It is *expected* if the
    template has no such messages, and otherwise the message is valid.
    """

    def __init__(self, reason: str, *, expected: bool = False):
        super().__init__(reason)
        self.expected = expected


class Parsed(NamedTuple):
    """A parsed answer. Calls are names with the JSON of their arguments, canonical if whole."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WrittenAnswer:
    """The text that a model writes after a prompt, and the message that it stands for."""

    prompt: str
    text: str
    expected: Parsed


class WrittenAnswers:
    """A chat template, and the answers that it writes. A template renders only what it is given, so
    this needs no process.
    """

    def __init__(self, path: Path):
        self.name = path.stem
        self.source = path.read_text()
        self._compiled = sandbox._compile(self.source)
        self.form = derive_form(self._rendered)
        self.answers = derive_answer_form(self._rendered, self.form, self.source)

    @property
    def form_name(self) -> str:
        """The name of the form of answers, as clients see it."""
        return self.answers.shown_name

    @property
    def reasoning_marks(self) -> str:
        """The marks around reasoning, as text."""
        block = next(iter(self.answers.reasoning), None)
        return "" if block is None else f"{block.begin.strip()}…{block.end.strip()}"

    @property
    def tool_use(self) -> ToolUse:
        """The calls that answers may have, as a session keeps this."""
        return ToolUse(form=self.answers)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        names: Mapping[str, Any],
    ) -> str:
        values = {"add_generation_prompt": True, **names, "bos_token": BOS, "eos_token": EOS}
        try:
            return self._compiled.render(messages=messages, tools=tools, **values)
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError) as exc:
            raise ValueError(str(exc)) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True, **arguments: Any
    ) -> str:
        """Return the text of messages with the tools, and with the prompt of an answer.

        :raises Unwritable: the template refuses the messages.
        """
        written, tools, names = form_values(self.form, messages, TOOLS)
        try:
            return self._rendered(
                written, tools, {**names, "add_generation_prompt": prompt, **arguments}
            )
        except ValueError as exc:
            raise Unwritable(f"the template refuses the message: {exc}") from None

    @cached_property
    def end_mark(self) -> str:
        """The mark behind an answer, at which a model stops; empty if the template has none. Some
        templates write none behind a last message.
        """
        last = self._end([])
        followed = self._end([{"role": "user", "content": NEXT}])
        return last_mark(last.removesuffix(self._trailer)) or first_mark(followed)

    @cached_property
    def _trailer(self) -> str:
        """The text with which some templates begin the next answer even if no prompt is wanted."""
        prompt, end = self.render([USER]), self._end([])
        same = common_prefix(prompt[::-1], end[::-1])
        at = end.find("<", len(end) - same)
        trailer = end[at:] if at >= 0 else ""
        asked = str(USER["content"])
        return trailer.removeprefix(first_mark(prompt[prompt.rfind(asked) + len(asked) :]))

    def _end(self, after: list[dict[str, Any]]) -> str:
        """Return the text that follows the text of an answer."""
        answers = [{"role": "assistant", "content": text} for text in ("Ash", "Ivy 7")]
        one, other = (self.render([USER, answer, *after], prompt=False) for answer in answers)
        same = common_prefix(one[::-1], other[::-1])
        return one[len(one) - same :]

    # Written texts.

    def written(
        self,
        message: AnswerMessage,
        before: Sequence[Mapping[str, Any]] = (USER,),
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> list[WrittenAnswer]:
        """Return the texts that a model may write for *message*: as the last message, and as one
        that others follow, of which templates may leave out reasoning. The messages *before* it
        are its conversation. The template gets the *arguments*, or those that make models reason
        if a message has reasoning.

        :raises Unwritable: it writes none.
        """
        if message.calls and self.form.calls == "none":
            raise Unwritable("the template has no calls", expected=True)
        if len(message.calls) > 1 and self.form.single_calls:
            raise Unwritable("the template has one call a message", expected=True)
        found: dict[tuple[str, str], WrittenAnswer] = {}
        texts = list(self._texts(message, before, arguments))
        if not texts:
            raise Unwritable("the rendered answer does not continue the prompt")
        for prompt, text in texts:
            if not _has_calls(text, message):
                continue
            found.setdefault((prompt, text), self._answer(message, prompt, text))
        if not found:
            raise Unwritable("the template has not all of such calls", expected=True)
        return list(found.values())

    def _texts(
        self,
        message: AnswerMessage,
        before: Sequence[Mapping[str, Any]],
        given_arguments: Mapping[str, Any],
    ) -> Iterator[tuple[str, str]]:
        thinks = message.reasoning and not given_arguments
        for arguments in ({}, _THINKING) if thinks else (given_arguments,):
            prompt = self.render(before, **arguments)
            close = _closing_mark(last_mark(prompt)).strip()
            for given in self._given(message):
                last = self.render([*before, given], prompt=False, **arguments)
                text = self._answer_text(prompt, self._without_end(prompt, last))
                if text is None or (arguments and message.reasoning.strip() not in text):
                    continue
                if close in text:  # else the template has not ended the reasoning of the prompt
                    yield prompt, self._stopped(text, message) + message.after
            followed = self.render([*before, message.message(), *self._next(message)], **arguments)
            text = self._answer_text(prompt, self._before_next(prompt, followed))
            if text is not None:
                yield prompt, self._stopped(text, message) + message.after

    def _stopped(self, text: str, message: AnswerMessage) -> str:
        """Return a text up to the first mark after a call, at which the model stops."""
        begin = text.find(message.calls[0][0]) if message.calls else -1
        at = text.find(self.end_mark, begin) if begin >= 0 and self.end_mark else -1
        return text if at < 0 else text[:at]

    def _given(self, message: AnswerMessage) -> list[dict[str, Any]]:
        """Return the message as the template gets it. One that reads no reasoning gets it within
        the text, as the model has written it.
        """
        if not message.reasoning or "text" not in self.form.reasoning:
            return [message.message()]
        text = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
        return [message.message(), {**message.message(), "content": text}]

    def _next(self, message: AnswerMessage) -> list[dict[str, Any]]:
        if not message.calls:
            return [{"role": "user", "content": NEXT}]
        calls = message.message()["tool_calls"]
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": NEXT,
            }
            for call in calls
        ]

    @property
    def _ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.end_mark, EOS, *_OTHER_ENDS)))

    def _without_end(self, prompt: str, text: str) -> str:
        """Return the text of a last answer without the marks at which the model stops, and without
        the beginning of a next answer, which some templates write in any case.
        """
        begin = common_prefix(prompt, text)
        while True:
            at = text.rfind(self.end_mark or EOS)
            if at >= begin and _MARKS_ONLY.fullmatch(text, at):
                text = text[:at]
                continue
            bare = text.rstrip()
            mark = next(filter(bare.endswith, self._ends), None)
            if mark is None or len(bare) <= begin:
                return text
            text = bare.removesuffix(mark)

    def _before_next(self, prompt: str, text: str) -> str:
        """Return a text up to the end of the answer before the next message."""
        before = text[: max(0, text.find(NEXT))]
        at = max(before.rfind(mark) for mark in self._ends)
        found = at >= common_prefix(prompt, text)
        return self._without_end(prompt, before[:at]) if found else ""

    def _answer_text(self, prompt: str, answered: str) -> str | None:
        """Return the text that continues *prompt* to *answered*, or None. A template may have
        written the end of the prompt in front of the answer before instructions.
        """
        found = answer_text(prompt, answered) if answered else None
        if found is not None or not self.end_mark:
            return found
        header = prompt[prompt.rfind(self.end_mark) + len(self.end_mark) :]
        at = answered.find(header, common_prefix(prompt, answered) - len(header))
        if not header or at < 0:
            return None
        text = answered[at + len(header) :].partition(self.end_mark)[0]
        return text.partition(first_mark(header) or self.end_mark)[0]

    def _answer(self, message: AnswerMessage, prompt: str, text: str) -> WrittenAnswer:
        """Return the answer. A template may leave out reasoning, and text beside calls."""
        bare = message.content.strip()
        shown = not message.calls or bare in text
        reasoning = message.reasoning.strip()
        calls = tuple((name, canonical(arguments)) for name, arguments in message.calls)
        expected = Parsed(
            (bare if shown else "") + message.after, reasoning if reasoning in text else "", calls
        )
        return WrittenAnswer(prompt, text, expected)

    # Parsing.

    def parse(self, prompt: str, pieces: Iterable[str]) -> Parsed:
        """Return the message that an answer of these *pieces* to *prompt* gives."""
        splitter = self._splitter(prompt)
        found = [splitter.split(piece.encode()) for piece in pieces]
        return _joined([*found, splitter.split_last(b"")])

    def parse_cut(self, prompt: str, text: str) -> Parsed:
        """Return the message that a stream has sent after *text*, the beginning of an answer."""
        return _joined([self._splitter(prompt).split(text.encode())], whole=False)

    def _splitter(self, prompt: str) -> AnswerSplitter:
        parser = AnswerParser(self.answers, functions(), prompt=prompt, reasoning=True)
        return AnswerSplitter(parser)


def last_mark(text: str) -> str:
    """Return the mark at the end of *text*, or an empty text."""
    bare = text.rstrip()
    begins = {">": "<", "]": "["}.get(bare[-1:])
    at = bare.rfind(begins) if begins else -1
    return bare[at:] if at >= 0 else (bare.split() or [""])[-1]


def _has_calls(text: str, message: AnswerMessage) -> bool:
    """Return whether a text has the names and the keys of all calls of a message, and nulls."""
    names = [name for name, _ in message.calls]
    keys = {key for _, arguments in message.calls for key in arguments}
    nulls = "null" not in canonical(message.calls) or "null" in text or "None" in text
    whole = all(text.count(name) >= names.count(name) for name in names)
    return whole and nulls and all(key in text for key in keys)


def first_mark(text: str) -> str:
    """Return the mark at the beginning of *text*, or an empty text."""
    return text[: text.find(">") + 1] if text.startswith("<") else ""


def _joined(found: Sequence[AnswerParts], *, whole: bool = True) -> Parsed:
    calls = join_parts(part for piece in found for part in piece.calls)
    return Parsed(
        b"".join(piece.text for piece in found).decode().strip(),
        b"".join(piece.reasoning for piece in found).decode().strip(),
        tuple((c.name, canonical_text(c.arguments) if whole else c.arguments) for c in calls),
    )


def canonical_text(arguments: str) -> str:
    """Return the canonical form of a JSON text, or the text if it is another one."""
    try:
        return canonical(json.loads(arguments))
    except ValueError:
        return arguments


def canonical(value: object) -> str:
    """Return a JSON text that two values share only if they are equal, types included."""
    return json.dumps(value, sort_keys=True)


def answer_text(prompt: str, answered: str) -> str | None:
    """Return the text that continues *prompt* to *answered*, or None. If the prompt opens a block
    of reasoning that the rendered answer lacks, the model closes it at once.
    """
    if answered.startswith(prompt):
        return answered[len(prompt) :]
    shared = common_prefix(prompt, answered)
    for begin, end in ("<>", "[]"):  # two marks can begin alike
        if (mark := prompt.rfind(begin, 0, shared)) > prompt.rfind(end, 0, shared):
            shared = mark
    for opening in filter(prompt.rstrip().endswith, _OTHER_OPENED):
        shared = min(shared, prompt.rindex(opening))
    opened = prompt[shared:].strip()
    rest = answered[shared:]
    if not opened:
        return rest
    if len(opened) > OPENED_CHARACTERS_MAX:
        return None
    if opened.count("<") > 1:
        for mark in re.findall(r"<[^<>]+>", opened):  # the prompt has closed the block too
            rest = rest.removeprefix(mark)
        return rest.lstrip()
    if not (close := _closing_mark(opened)):
        return None
    return rest if close.strip() in rest else close + rest.lstrip()


def _closing_mark(opening: str) -> str:
    """Return the mark that closes a block of reasoning, or an empty text for another mark."""
    if re.fullmatch(r"<[\w:]+>|\[[A-Z]+\]", opening):
        return f"{opening[0]}/{opening[1:]}"
    if opening in _OTHER_OPENED:
        return _OTHER_OPENED[opening]
    return opening.replace("START", "END") if "START" in opening else ""


def splits(text: str, most: int) -> Iterator[tuple[str, ...]]:
    """Yield *text* whole, in single characters, and in two pieces at up to *most* places, which are
    spread over the text.
    """
    yield (text,)
    yield tuple(text)
    places = range(1, len(text))
    step = max(1, -(-len(places) // most)) if most else 1
    for at in places[::step]:
        yield text[:at], text[at:]


def failures(answers: WrittenAnswers, message: AnswerMessage, splits_max: int = 0) -> list[str]:
    """Return how the parsed answers differ from *message*; *splits_max* 0 tries all splits.

    :raises Unwritable: the template does not write it.
    """
    found = []
    for written in answers.written(message):
        for pieces in splits(written.text, splits_max):
            try:
                parsed = answers.parse(written.prompt, pieces)
            except Exception as exc:
                found.append(f"{exc!r} for {pieces[:2]!r}")
                break
            if parsed != written.expected:
                cut = "" if len(pieces) == 1 else f" in {len(pieces)} pieces {pieces[0][-20:]!r}…"
                found.append(f"{parsed} of {written.text!r}{cut}, not {written.expected}")
                break
    return found
