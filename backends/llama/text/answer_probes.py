"""The form of a model's answers, found by rendering probe conversations with its chat template.

An answer is the text that the template writes for a message of the assistant. Two probes that
differ in one value show where it stands, and the text around it gives the marks. llama.cpp finds
marks in the same way (`common/chat-diff-analyzer.cpp`). A form counts only if it writes the probes
as the template does. The functions are pure; the caller renders.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from string import ascii_letters, digits
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...answer_form import (
    MARK_CHARACTERS_MAX,
    PLAIN_ANSWERS,
    THINK,
    AnswerForm,
    ArgumentsForm,
    Block,
    CallForm,
    defects_of,
    is_strong,
)
from ...base import Message
from ...tool_formats import MarkedForm, marked_form, marked_reasoning
from .template_form import Render, TemplateForm, form_values

ANSWER_CHARACTERS_MAX = 16 << 10
"""Of the text after the user's in a probe. The longest of llama.cpp's templates has 1000."""
_USER, _CONTENT, _REASONING, _NEXT = "probe-user", "probe-content", "probe-reasoning", "probe-next"
_FIRST, _SECOND = "probe_alpha", "probe_beta"
_TEXT_KEY, _NUMBER_KEY = "text_key", "number_key"
_IDS = ("probe0001", "probe0002")
_TAG = r"(?:<[^<>\s][^<>]*>|\[/?[A-Z][A-Z_ ]*\])"
_TAG_LAST = re.compile(rf"{_TAG}\s*$")
_TAGS_LAST = re.compile(rf"({_TAG})(\s*)({_TAG}\s*)$")
_TAG_FIRST = re.compile(rf"\s*{_TAG}\s*")
_THINKS = re.compile("think|reason|thought", re.IGNORECASE)
_ON: dict[str, Any] = {"enable_thinking": True, "thinking": True, "thinking_option": "on"}
_OFF: dict[str, Any] = {"enable_thinking": False, "thinking": False, "thinking_option": "off"}
_THINKING: tuple[dict[str, Any], ...] = ({}, _ON, _OFF)
"""Arguments by which templates turn reasoning on and off."""


class _Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


_CALLS = (
    _Call(_FIRST, {_TEXT_KEY: "first-value", _NUMBER_KEY: 1701}),
    _Call(_SECOND, {_TEXT_KEY: "second-value", _NUMBER_KEY: 2903}),
)
_KIND_CHARACTERS = ascii_letters + digits + "_-"
_MARKUP = "<probe>"
_CDATA = f"<![CDATA[{_MARKUP}]]>"
_KINDS: dict[str, Any] = {
    "a_text": "kind-text",
    "a_number": 4177,
    "a_flag": True,
    "an_object": {"inner_key": "inner-value"},
    "a_list": [5231],
    "a_null": None,
}
"""Arguments of all kinds of values."""


class NotDerived(Exception):
    """The probes do not agree with any form of calls."""


class _Probes:
    """Renders probe conversations; a conversation that the template refuses is an empty text."""

    def __init__(self, render: Render, form: TemplateForm):
        self._render, self._form = render, form

    def _text(self, messages: Sequence[Message], tools: bool, names: Mapping[str, Any]) -> str:
        written, declared, own = form_values(self._form, messages, _TOOLS if tools else ())
        try:
            text = self._render(written, declared, {**own, **names})
        except ValueError:
            return ""
        _, found, rest = text.rpartition(_USER)
        return rest if found and len(rest) <= ANSWER_CHARACTERS_MAX else ""

    def prompts(self, *, tools: bool = False) -> list[str]:
        """Return the ends of prompts after the user's text, with reasoning by default, on, off."""
        user = [{"role": "user", "content": _USER}]
        return [self._text(user, tools, names) for names in _THINKING]

    def answer(
        self,
        content: str = "",
        reasoning: str = "",
        calls: Sequence[_Call] = (),
        *more: Message,
        **names: Any,
    ) -> str:
        """Return the text after the user's: the beginning of the answer, and the answer."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": call._asdict()}
                for i, call in zip(_IDS, calls, strict=False)
            ]
        messages = [{"role": "user", "content": _USER}, message, *more]
        return self._text(messages, bool(calls), {"add_generation_prompt": False, **names})


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}},
        },
    }
    for name in (_FIRST, _SECOND)
]


def derive_answer_form(render: Render, form: TemplateForm, source: str) -> AnswerForm:
    """Return the form of answers of the template that *render* renders, which takes messages in a
    *form*. Forms that a template does not show are known by marks in its *source*.

    *render* raises `ValueError` if the template refuses messages; other errors end the derivation.
    """
    known = marked_form(source)
    if known is not None and not known.gives_way:
        return known.form
    probes = _Probes(render, form)
    plain, called = probes.answer(_CONTENT), probes.answer("", "", _CALLS[:1])
    reasoning = _reasoning(probes, plain) or marked_reasoning(source) or THINK
    header = _header(plain, probes.prompts(), reasoning)
    turn_end = _cut_before(_common_suffix(_after(plain, _CONTENT), called)) if called else ""
    content = _content_block(plain, header, turn_end, reasoning)
    stop = _stop(probes, content)
    found = AnswerForm(
        reasoning=(reasoning,),
        content=() if content is None else (content,),
        stops=(stop,) if stop else (),
    )
    try:
        if form.calls != "none":
            calls = _calls(probes, called, reasoning, (turn_end, stop), single=form.single_calls)
            found = replace(found, calls=(calls,))
    except NotDerived as exc:
        found = replace(found, warnings=(f"tool calls stay text: {exc}",))
    return _checked(found if known is None else _with_known(found, known))


def _with_known(form: AnswerForm, known: MarkedForm) -> AnswerForm:
    """Return the form with the known form of a template that does not show its calls, or with
    other calls that its model writes too.
    """
    if not form.calls:
        content = form.content or known.form.content
        return replace(form, content=content, calls=known.form.calls, warnings=())
    if not known.adds:
        return form
    own = form.calls[0]
    others = (call for call in known.form.calls if _kind(call) != _kind(own))
    return replace(form, calls=(own, *others))


def _kind(form: CallForm) -> tuple[object, ...]:
    return (form.triggers, form.layout, form.id_place)


def _checked(form: AnswerForm) -> AnswerForm:
    """Return the form, or without the parts that have defects."""
    for field in ("content", "calls", "reasoning"):
        if defects := defects_of(AnswerForm(**{field: getattr(form, field)})):
            warnings = (*form.warnings, f"{field}: {defects[0]}")
            form = replace(form, **{field: getattr(PLAIN_ANSWERS, field)}, warnings=warnings)
    opens = (*(block.begin for block in form.reasoning), *form.opens)
    stops = tuple(stop for stop in form.stops if len(stop) <= MARK_CHARACTERS_MAX)
    return replace(form, opens=tuple(dict.fromkeys(opens)), stops=stops)


# Reasoning.


def _reasoning(probes: _Probes, plain: str) -> Block | None:
    """Return the marks of reasoning, if the template writes some."""
    usual = _TAG_LAST.search(_before(plain, _CONTENT))
    texts = [probes.answer(_CONTENT, _REASONING, **names) for names in ({}, _ON)] + [
        probes.answer("", _REASONING, _CALLS[:1], **names) for names in ({}, _ON)
    ]
    for text in texts:
        before, found, after = text.partition(_REASONING)
        begin, end = _TAG_LAST.search(before), _TAG_FIRST.match(after)
        if not found or begin is None or end is None:
            continue
        if usual is not None and usual.group().strip() == begin.group().strip():
            continue  # it stands before content too
        return Block(begin=begin.group(), end=end.group())
    return _prompted_reasoning(probes)


def _prompted_reasoning(probes: _Probes) -> Block | None:
    """Return the marks of reasoning that stand only at the end of prompts."""
    prompts = [p for p in (*probes.prompts(), *probes.prompts(tools=True)) if p]
    for prompt in prompts:
        both = _TAGS_LAST.search(prompt)
        if both is not None and _THINKS.search(both.group(1)) and "/" in both.group(3):
            begin, space, end = both.groups()
            half = (len(space) + 1) // 2
            return Block(begin=begin + space[:half], end=space[half:] + end)
    for prompt in prompts:
        begin = _TAG_LAST.search(prompt)
        if begin is None or not _THINKS.search(begin.group()) or "/" in begin.group():
            continue
        for other in prompts:
            rest = other.removeprefix(prompt.rstrip())
            if rest != other and (end := _TAG_FIRST.match(rest)) is not None:
                return Block(begin=begin.group(), end=end.group())
        bare = begin.group().strip()
        return Block(begin=begin.group(), end=f"{bare[0]}/{bare[1:]}")
    return None


# Content and the borders of answers.


def _header(plain: str, prompts: Sequence[str], reasoning: Block) -> str:
    """Return the text before an answer: what all prompts and answers have in common."""
    header = _prompted(_before(plain, _CONTENT), prompts)
    for mark in (reasoning.begin.strip(), reasoning.end.strip()):
        header = header.partition(mark)[0] if mark else header
    return header


def _prompted(text: str, prompts: Sequence[str]) -> str:
    """Return the beginning of a text that the prompts end with. They may have more before it."""
    prompts = [prompt for prompt in prompts if prompt]
    header = _cut_after(_common_prefix([text, *prompts]))
    rest = text[len(header) :]
    if header not in prompts:
        sizes = range(min(len(rest), MARK_CHARACTERS_MAX), 0, -1)
        header += rest[: next((n for n in sizes if prompts and prompts[0].endswith(rest[:n])), 0)]
    return header


def _content_block(plain: str, header: str, turn_end: str, reasoning: Block) -> Block | None:
    """Return the marks around content, if the template writes some."""
    before, found, after = plain.partition(_CONTENT)
    begin = _without_reasoning(before.removeprefix(header), reasoning)
    end = after.removesuffix(turn_end) if turn_end else ""
    if not found or not begin.strip() or not end.strip():
        return None
    return Block(begin=begin, end=end)


def _without_reasoning(text: str, reasoning: Block) -> str:
    """Return the text after the last mark of reasoning."""
    for mark in (reasoning.end.strip(), reasoning.begin.strip()):
        _, found, rest = text.rpartition(mark)
        if found:
            return rest.lstrip()
    return text


def _stop(probes: _Probes, content: Block | None) -> str:
    """Return the mark that follows an answer, if one does."""
    text = probes.answer(_CONTENT, "", (), {"role": "user", "content": _NEXT})
    rest = _after(_before(text, _NEXT), _CONTENT)
    if content is not None:
        rest = rest.lstrip().removeprefix(content.end.strip())
    found = _TAG_FIRST.match(rest)
    return "" if found is None else found.group().strip()


# Calls.


class _Core(NamedTuple):
    """One call in a text: from its object or its name to the end of its arguments."""

    begin: int
    end: int
    form: CallForm


def _calls(
    probes: _Probes, called: str, reasoning: Block, ends: Sequence[str], *, single: bool
) -> CallForm:
    """Return the form of calls. The answer ends before one of the *ends*. With *single*, the
    template writes one call in an answer.

    :raises NotDerived: none writes the probes as the template does.
    """
    header = _prompted(called, probes.prompts(tools=True))

    def body(text: str) -> str:
        """Return the part of a text that has the calls."""
        text = text.removeprefix(header)
        after = max(text.rfind(_FIRST), text.rfind(_SECOND), 0)
        for end in filter(None, map(str.strip, ends)):
            text = text[:after] + text[after:].partition(end)[0]
        return _without_reasoning(text, reasoning)

    one, two = body(called), "" if single else body(probes.answer("", "", _CALLS))
    core = _core(one, _CALLS[0], probes)
    before, after = one[: core.begin], one[core.end :]
    form = core.form
    if _FIRST in two and _SECOND in two:
        first, second = (_core(two, call, probes) for call in _CALLS)
        between = two[first.end : second.begin].replace(_IDS[1], _IDS[0])
        form = _around_two(form, two[: first.begin], between, two[second.end :])
        form = _with_index(form, first.form, second.form)
    elif before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        form = _in_array(form, before, after)
    else:
        form = replace(form, begin=before, end=after)
    form = _finished(form)
    for text, calls in ((one, _CALLS[:1]), (two, _CALLS)):
        if text and not _agrees(form, calls, text):
            raise NotDerived("the probes disagree")
    return form


def _agrees(form: CallForm, calls: Sequence[_Call], text: str) -> bool:
    """Return whether calls in this form are this *text*, which may lack the end of the section, or
    have one more mark after it.
    """
    written, wanted = (_bare(t).replace("'", '"') for t in (write_calls(form, calls), text))
    short = written.removesuffix(_bare(form.section_end))
    rest = wanted.removeprefix(written if wanted.startswith(written) else short)
    return rest != wanted and re.sub(_TAG, "", rest) == ""


def _core(text: str, call: _Call, probes: _Probes) -> _Core:
    """Return the place and the form of a *call* in the text."""
    at = text.find(call.name)
    if at < 0:
        raise NotDerived("the chat template does not write the name of a function")
    return _json_core(text, call) or _named_core(text, call, at, probes)


def _json_core(text: str, call: _Call) -> _Core | None:
    """Return a call that is a JSON object, if it is one."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            found, end = None, at
        form = _object_form(found, call) if isinstance(found, dict) else None
        if form is not None:
            return _Core(at, end, form)
        at = text.find("{", at + 1)
    return None


def _object_form(found: dict[str, Any], call: _Call) -> CallForm | None:
    """Return the form of a call that is this object, if it is the call."""
    if found == {call.name: call.arguments}:
        return CallForm(layout="keyed")
    path, inner = "", found
    if call.name not in inner.values():
        nested = [
            (k, v) for k, v in found.items() if isinstance(v, dict) and call.name in v.values()
        ]
        if not nested:
            return None
        path, inner = f"{nested[0][0]}.", nested[0][1]
    names = [k for k, v in inner.items() if v == call.name]
    arguments = [k for k, v in inner.items() if v == call.arguments]
    if not names or not arguments:
        return None
    others = {
        k: v for k, v in found.items() if k not in (names[0], arguments[0]) and v is not inner
    }
    ids = [k for k, v in others.items() if v in _IDS]
    order = () if list(found) in ([names[0], arguments[0]], [path[:-1]]) else tuple(found)
    return CallForm(
        name_key=sys.intern(path + names[0]),  # `omit_defaults` compares identities
        arguments_key=sys.intern(path + arguments[0]),
        id_key=ids[0] if ids else "",
        key_order=order,
        constants={k: v for k, v in others.items() if k not in ids and isinstance(v, str)},
    )


def _named_core(text: str, call: _Call, at: int, probes: _Probes) -> _Core:
    """Return a call whose name stands outside of its arguments."""
    rest = text[at + len(call.name) :]
    decoder, begin = json.JSONDecoder(), rest.find("{")
    while begin >= 0:
        try:
            found, end = decoder.raw_decode(rest, begin)
        except (ValueError, RecursionError):
            found, end = None, begin
        if found == call.arguments:
            form = CallForm(layout="named", name_end=rest[:begin])
            return _Core(at, at + len(call.name) + end, form)
        begin = rest.find("{", begin + 1)
    form, end = _written_arguments(rest, call, probes)
    return _Core(at, at + len(call.name) + end, form)


def _written_arguments(rest: str, call: _Call, probes: _Probes) -> tuple[CallForm, int]:
    """Return the form of a call whose arguments, which begin in *rest*, are not JSON; and the end
    of the arguments.
    """
    values = [str(value) for value in call.arguments.values()]
    places = [rest.find(word) for pair in zip(call.arguments, values, strict=True) for word in pair]
    if min(places) < 0 or places != sorted(places):
        raise NotDerived("the arguments stand in no known form")
    words = [word for pair in zip(call.arguments, values, strict=True) for word in pair]
    ends = [place + len(word) for place, word in zip(places, words, strict=True)]
    before, to_value, between, to_other, after = (
        rest[: places[0]],
        rest[ends[0] : places[1]],
        rest[ends[1] : places[2]],
        rest[ends[2] : places[3]],
        rest[ends[3] :],
    )
    if to_value.startswith("=") and before.endswith("("):
        arguments = ArgumentsForm(encoding="python", begin="(", end=")")
        end = ends[3] + after.find(")") + 1
        return CallForm(layout="named", name_end=before[:-1], arguments=arguments), end
    if to_value.lstrip().startswith(":") and before.endswith("{"):
        quote = to_value.lstrip()[1:].strip()
        arguments = ArgumentsForm(quote=quote, bare_keys=True)
        end = ends[3] + after.find("}") + 1
        return CallForm(layout="named", name_end=before[:-1], arguments=arguments), end
    return _tagged(before, to_value, between, to_other, after, ends[3], probes)


def _tagged(
    before: str, to_value: str, between: str, to_other: str, after: str, end: int, probes: _Probes
) -> tuple[CallForm, int]:
    """Return the form of a call with its arguments between tags."""
    value_end = _cut_after(_common_prefix([between, after]))
    key_begin = between[len(value_end) :]
    if not key_begin or not before.endswith(key_begin) or not value_end.strip():
        raise NotDerived("the arguments stand between marks that differ")
    key_end, value_begin, text_kind = to_value, "", ""
    if to_value != to_other:
        key_end = _common_prefix([to_value, to_other])
        key_end = key_end.rstrip(_KIND_CHARACTERS)
        value_begin = _common_suffix(to_value[len(key_end) :], to_other[len(key_end) :])
        value_begin = value_begin.lstrip(_KIND_CHARACTERS)
        text_kind = to_value[len(key_end) : len(to_value) - len(value_begin)]
    elif (split := re.fullmatch(rf"(.*?>)(\s*|\s*{_TAG}\s*)", to_value, re.DOTALL)) is not None:
        key_end, value_begin = split.groups()
    arguments = ArgumentsForm(
        encoding="tagged",
        key_begin=key_begin,
        key_end=key_end,
        value_begin=value_begin,
        value_end=value_end,
    )
    if text_kind:
        arguments = _with_kinds(arguments, text_kind, probes)
    elif _CDATA in probes.answer("", "", [_Call(_FIRST, {_TEXT_KEY: _MARKUP})]):
        arguments = replace(arguments, cdata=True)
    name_end = before[: len(before) - len(key_begin)]
    return CallForm(layout="named", name_end=name_end, arguments=arguments), end + len(value_end)


def _with_kinds(arguments: ArgumentsForm, text_kind: str, probes: _Probes) -> ArgumentsForm:
    """Return the form with the kinds of all values."""
    text = probes.answer("", "", [_Call(_FIRST, _KINDS)])
    kinds = []
    for key in _KINDS:
        rest = _after(text, arguments.key_begin + key + arguments.key_end)
        kind = rest.partition(arguments.value_begin)[0]
        if rest and len(kind) <= 16 and kind != text_kind and kind not in kinds:
            kinds.append(kind)
    return replace(arguments, text_kinds=(text_kind,), json_kinds=tuple(kinds))


def _around_two(form: CallForm, before: str, between: str, after: str) -> CallForm:
    """Return the form with the marks around calls, from the texts before, between and after two."""
    if before.rstrip().endswith("[") and between.strip() == "," and after.lstrip().startswith("]"):
        return _in_array(form, before, after)
    end = _cut_after(_common_prefix([between, after]))
    rest = between[len(end) :]
    begin = _cut_before(_common_suffix(rest, before))
    section_end = after[len(end) :]
    section_begin = before[: len(before) - len(begin)]
    separator = rest[: len(rest) - len(begin)]
    if not section_begin.strip():  # each call stands alone, and another mark follows the last one
        section_begin, section_end = "", ""
    return replace(
        form,
        section_begin=section_begin,
        section_end=section_end,
        begin=begin,
        end=end,
        separator=separator,
    )


def _in_array(form: CallForm, before: str, after: str) -> CallForm:
    return replace(
        form,
        array=True,
        begin="",
        end="",
        section_begin=before.rstrip()[:-1],
        section_end=after.lstrip()[1:],
    )


def _with_index(form: CallForm, first: CallForm, second: CallForm) -> CallForm:
    """Return the form with ids that are the numbers of the calls, of which two are given."""
    numbers = {"from-0": ("0", "1"), "from-1": ("1", "2")}
    for start, pair in numbers.items():
        for key, value in first.constants.items():
            if (value, second.constants.get(key)) == pair:
                constants = {k: v for k, v in form.constants.items() if k != key}
                return replace(form, id_key=key, id_index=start, constants=constants)
        if form.layout == "named" and first.name_end != second.name_end:
            parts = re.split(r"(\d+)", first.name_end), re.split(r"(\d+)", second.name_end)
            if len(parts[0]) == len(parts[1]) == 3 and (parts[0][1], parts[1][1]) == pair:
                return replace(
                    form,
                    id_place="after_name",
                    id_begin=parts[0][0],
                    id_index=start,
                    name_end=parts[0][2],
                )
    return form


def _finished(form: CallForm) -> CallForm:
    """Return the form with its ids in their places, and the marks of the name apart."""
    if form.layout == "named":
        for mark, place in (("name_end", "after_name"), ("end", "after_arguments")):
            begin, found, rest = getattr(form, mark).partition(_IDS[0])
            if found:
                form = replace(form, id_place=place, id_begin=begin, **{mark: rest})
        begin, found, rest = form.begin.partition(_IDS[0])
        if found:
            form = replace(form, id_place="before_name", begin=begin, name_begin=rest)
        elif not form.name_begin:
            begin, name_begin = _name_begin(form.begin)
            form = replace(form, begin=begin, name_begin=name_begin)
    outer = form.section_begin or form.begin or form.name_begin
    if not outer.strip():
        return replace(form, whole=True, declared=True)
    return form if is_strong(outer) else replace(form, declared=True)


def _name_begin(text: str) -> tuple[str, str]:
    """Return the marks before a call and before its name, of the text before the name."""
    tags = [match.end() for match in re.finditer(_TAG, text)]
    at = tags[-1] if tags else 0
    at += len(text[at:]) - len(text[at:].lstrip())
    return (text[:at], text[at:]) if text[:at].strip() and text[at:].strip() else (text, "")


# Texts.


def _before(text: str, word: str) -> str:
    return text.partition(word)[0] if word in text else ""


def _after(text: str, word: str) -> str:
    return text.partition(word)[2]


def _common_prefix(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    both = enumerate(zip(first, last, strict=False))
    return first[: next((at for at, (a, b) in both if a != b), min(len(first), len(last)))]


def _common_suffix(one: str, other: str) -> str:
    return _common_prefix([one[::-1], other[::-1]])[::-1]


def _cut_after(text: str) -> str:
    """Return the text without a tag at its end that is cut off."""
    at = max(text.rfind("<"), text.rfind("["))
    return text if at < 0 or _closes(text[at:]) else text[:at]


def _cut_before(text: str) -> str:
    """Return the text without a tag at its beginning that is cut off."""
    close, begin = text.find(">"), text.find("<")
    if close >= 0 and (begin < 0 or close < begin):
        return text[close + 1 :]
    return text


def _closes(tag: str) -> bool:
    return (">" if tag[0] == "<" else "]") in tag


def _bare(text: str) -> str:
    return "".join(text.split())


# Writing.


def write_calls(form: CallForm, calls: Sequence[_Call], ids: Sequence[str] = _IDS) -> str:
    """Return *calls* as a template with this form writes them."""
    written = [
        f"{form.begin}{_written_call(form, call, number, ids[number])}{form.end}"
        for number, call in enumerate(calls)
    ]
    text = (", " if form.array else form.separator).join(written)
    return form.section_begin + (f"[{text}]" if form.array else text) + form.section_end


def _written_call(form: CallForm, call: _Call, number: int, call_id: str) -> str:
    if form.id_index:
        call_id = str(number + (form.id_index == "from-1"))
    if form.layout == "keyed":
        return json.dumps({call.name: call.arguments})
    if form.layout == "json":
        return _written_object(form, call, call_id)
    written_id = f"{form.id_begin}{call_id}"
    places = {p: written_id if form.id_place == p else "" for p in _PLACES}
    return (
        f"{places['before_name']}{form.name_begin}{call.name}{places['after_name']}{form.name_end}"
        f"{_written_values(form.arguments, call)}{places['after_arguments']}"
    )


_PLACES = ("before_name", "after_name", "after_arguments")


def _written_object(form: CallForm, call: _Call, call_id: str) -> str:
    path, _, name_key = form.name_key.rpartition(".")
    values = {name_key: call.name, form.arguments_key.rpartition(".")[2]: call.arguments}
    if path:
        values = {path: values}
    values |= form.constants
    if form.id_key:
        values[form.id_key] = call_id
    return json.dumps({key: values[key] for key in form.key_order or values})


def _written_values(form: ArgumentsForm, call: _Call) -> str:
    begin, end = form.begin.replace("{name}", call.name), form.end
    if form.encoding == "python":
        return begin + ", ".join(f"{k}={json.dumps(v)}" for k, v in call.arguments.items()) + end
    if form.encoding == "tagged":
        return (
            begin + "".join(_tagged_argument(form, *item) for item in call.arguments.items()) + end
        )
    if not form.bare_keys:
        return begin + json.dumps(call.arguments) + end
    quoted = {
        k: f"{form.quote}{v}{form.quote}" if isinstance(v, str) else json.dumps(v)
        for k, v in call.arguments.items()
    }
    return begin + "{" + ",".join(f"{k}:{v}" for k, v in quoted.items()) + "}" + end


def _tagged_argument(form: ArgumentsForm, key: str, value: Any) -> str:
    kinds = form.text_kinds if isinstance(value, str) else form.json_kinds
    text = value if isinstance(value, str) else json.dumps(value)
    end = form.value_end.replace("{key}", key)
    return f"{form.key_begin}{key}{form.key_end}{''.join(kinds[:1])}{form.value_begin}{text}{end}"
