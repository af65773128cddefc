"""Tool calls parsed out of answers, in every form and however the answer is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.params.json_texts import CONTAINERS_MAX
from inferd.backends.tool_formats import KNOWN_FORMS
from inferd.sessions.answers.calls import (
    ANSWER_CALLS_MAX,
    ARGUMENTS_LEVELS_MAX,
    ID_CHARACTERS,
    ToolCall,
    ToolCallPart,
    call_id,
    join_parts,
    merge_parts,
    template_arguments,
)
from inferd.sessions.answers.parser import AnswerParser, ParsedText
from inferd.sessions.answers.source import CALL_CHARACTERS_MAX, HELD_CHARACTERS_MAX
from tests.sessions.answers.form_names import ToolFormat

FUNCTIONS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "note": {"type": "string"},
            "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"type": ["array", "null"]},
            "kind": {"enum": ["x", 1]},
            "one": {"const": 1},
        },
    },
    "now": {},
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = [("add", '{"a": 1}')]
NOW = ("now", "{}")
F = ToolFormat


def parser(
    form: ToolFormat, *, opened: bool = False, opens_reasoning: bool = False, **options: Any
) -> AnswerParser:
    prompt = "<think>\n" if opens_reasoning else ">>>" if opened else ""
    form_data = KNOWN_FORMS[form.value]
    return AnswerParser(form_data, FUNCTIONS, lambda i: f"id{i}", prompt=prompt, **options)


def parse(form: ToolFormat, *pieces: str, **options: Any) -> ParsedText:
    parsing = parser(form, **options)
    found = [*map(parsing.parse, pieces), parsing.finish()]
    return ParsedText("".join(f.text for f in found), [part for one in found for part in one.parts])


def calls(found: ParsedText) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in join_parts(found.parts)]


@pytest.mark.parametrize(
    ("form", "answer", "text", "expected"),
    [
        (F.HERMES, HERMES, "", ADD),
        (F.HERMES, "Sure.\n" + HERMES, "Sure.", ADD),
        (F.HERMES, f"\n\n{HERMES}\n{HERMES}\n", "", ADD * 2),
        (F.HERMES, f"a {HERMES} b ", "ab ", ADD),
        (F.HERMES, HERMES.removesuffix("\n</tool_call>"), "", ADD),
        (F.HERMES, HERMES.removesuffix("call>"), "", ADD),
        (F.HERMES, '<tool_call>{"arguments":{"a":1},"name":"add"}', "", [("add", '{"a":1}')]),
        (F.HERMES, '<tool_call>{"name":"now"}</tool_call>', "", [NOW]),
        (F.HERMES, '<tool_call>{"name":"now","id":"x","more":[{}]}', "", [NOW]),
        (F.HERMES, r'<tool_call>{"name":"add","arguments":"{\"a\": 1}"}', "", ADD),
        (F.HERMES, r'<tool_call>{"name":"add","arguments":{"a":"}\"{"}}', "",
         [("add", r'{"a":"}\"{"}')]),
        (F.HERMES, '<tool_call>{"name":"other","arguments":{}}', "", [("other", "{}")]),
        (F.HERMES, f"<tool_call>oops{HERMES}", "<tool_call>oops", ADD),
        (F.HERMES, f"<tool_call>{HERMES}", "", ADD),
        (F.MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", ADD),
        (F.MISTRAL, '[TOOL_CALLS][{"name":"now"}, {"name":"add","arguments":{"a": 1},"id":"1"}]',
         "", [NOW, *ADD]),
        (F.MISTRAL, 'I see.[TOOL_CALLS]{"name": "add", "arguments": {"a": 1}}', "I see.", ADD),
        (F.MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "", [*ADD, NOW]),
        (F.MISTRAL, '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}', "", ADD),
        (F.MISTRAL, '[TOOL_CALLS]add {"a": 1}', "", ADD),
        (F.MISTRAL, '[TOOL_CALLS] [{"name":"now"}, x]', ", x]", [NOW]),
        (F.LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", ADD),
        (F.LLAMA, ' {"type":"function","name": "add", "parameters": {"a": 1}}\n', "", ADD),
        (F.LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", ADD),
        (F.LLAMA, 'Hm. <|python_tag|>{"name": "x", "arguments": {}}', "Hm.", [("x", "{}")]),
        (F.LLAMA, '{"name":"add","parameters":{"a": 1}}; {"name":"now","parameters":{}}', "",
         [*ADD, NOW]),
        (F.FUNCTIONARY, 'all\nHello >>>add\n{"a": 1}', "Hello", ADD),
        (F.FUNCTIONARY, 'add\n{"a": 1}>>>now\n{}', "", [*ADD, NOW]),
        (F.FUNCTIONARY, "all\nUse >>> print(1)", "Use >>> print(1)", []),
        (F.FUNCTION_TAGS, '<function=add>{"a": 1}</function>', "", ADD),
        (F.FUNCTION_TAGS, '<function=add>{"a": 1}</function><function=now>{}</function>', "",
         [*ADD, NOW]),
        (F.FUNCTION_TAGS, "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW]),
        (F.JSON, '{"name": "add", "arguments": {"a": 1}}', "", ADD),
    ],
)  # fmt: skip
def test_calls_are_parsed(
    form: ToolFormat, answer: str, text: str, expected: list[tuple[str, str]]
) -> None:
    found = parse(form, answer, opened=form is F.FUNCTIONARY)
    assert (found.text, calls(found)) == (text, expected)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (F.NONE, HERMES),
        (F.HERMES, "plain text \n"),
        (F.HERMES, "<tool_call>"),
        (F.HERMES, "<tool_call>{}"),
        (F.HERMES, HERMES[:40]),
        (F.HERMES, '<tool_call>{"name": "add", "arguments": {"a": nonsense}}</tool_call>'),
        (F.HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1]}</tool_call>'),
        (F.HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (F.HERMES, '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>'),
        (F.HERMES, '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        (F.HERMES, '<tool_call>{"name": "add", "arguments": {}, "parameters": {}}</tool_call>'),
        (F.HERMES, '<tool_call>{"name": "add", "name": "now"}</tool_call>'),
        (F.HERMES, '<tool_call>{"name": "add" "arguments": {}}</tool_call>'),
        (F.HERMES, "<think>" + HERMES),
        (F.HERMES, '<tool_call>{"name":"%s"}' % ("x" * 129)),
        (F.HERMES, '<tool_call>{"name":"now","arguments":{"a":%s}}' % ("[" * ARGUMENTS_LEVELS_MAX)),
        (F.HERMES, '<tool_call>{"name":"now","arguments":{"a":"\udcff"}}'),
        (F.MISTRAL, "[TOOL_CALLS] []"),
        (F.MISTRAL, "[TOOL_CALLS]add[CALL_ID]x{}"),
        (F.LLAMA, '{"name": "Bob", "parameters": {}}'),
        (F.LLAMA, '{"name": "add"}'),
        (F.LLAMA, '{"name": "add", "age": 3, "parameters": {}}'),
        (F.LLAMA, 'See {"name": "add", "parameters": {}}'),
        (F.LLAMA, '<|python_tag|>brave_search.call(query="x")'),
        (F.FUNCTIONARY, "Tom\n{}"),
        (F.FUNCTIONARY, "text"),
        (F.FUNCTION_TAGS, "<function=add>1</function>"),
        (F.FUNCTION_TAGS, "<function=add><parameter=a>1</function>"),
        (F.FUNCTION_TAGS, "<tool_call>{}</tool_call>"),
        (F.JSON, '[{"name": "add"}]'),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_parse_stays_text(form: ToolFormat, answer: str) -> None:
    found = parse(form, answer, opened=form is F.FUNCTIONARY)
    assert (found.text, calls(found)) == (answer, [])


def test_values_in_tags_have_the_types_of_the_schema() -> None:
    values = {"a": "1", "note": "1", "any": "null", "list": "[1]", "kind": "1", "one": "1"}
    tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    tags += "<parameter=unknown>\n\ntwo\nlines\n</parameter>\n<parameter=a2>true</parameter>"
    found = parse(
        F.FUNCTION_TAGS, f"Hm.\n<tool_call>\n<function=add>\n{tags}</function></tool_call>"
    )
    [(name, arguments)] = calls(found)
    assert (found.text, name) == ("Hm.", "add")
    assert json.loads(arguments) == {
        "a": 1, "note": "1", "any": None, "list": [1], "kind": "1", "one": 1,
        "unknown": "\ntwo\nlines", "a2": "true",
    }  # fmt: skip
    wrong = parse(F.FUNCTION_TAGS, "<function=add><parameter=a>one</parameter></function>")
    assert calls(wrong) == [("add", '{"a": "one"}')]


def test_a_call_in_reasoning_is_text() -> None:
    found = parse(F.HERMES, f" <think>{HERMES}</think>\n\n{HERMES}")
    assert (found.text, calls(found)) == (f" <think>{HERMES}</think>", ADD)
    opened = parse(F.HERMES, f"{HERMES}</think>{HERMES}", opens_reasoning=True)
    assert (opened.text, calls(opened)) == (f"{HERMES}</think>", ADD)
    assert calls(parse(F.HERMES, f"<thinking>{HERMES}")) == ADD


def test_a_name_is_sent_at_once_and_arguments_in_parts() -> None:
    parsing = parser(F.HERMES)
    assert parsing.parse('Yes. <tool_call>{"name": "ad') == ParsedText("Yes.", [])
    assert parsing.parse('d"').parts == [ToolCallPart(0, "id0", "add")]
    assert parsing.parse(', "arguments": {"no').parts == [ToolCallPart(0, arguments='{"no')]
    assert parsing.parse('te": "x"}').parts == [ToolCallPart(0, arguments='te": "x"}')]
    assert parsing.parse("}</tool").parts == []
    assert parsing.finish() == ParsedText("", []), "the beginning of a mark after a call"


def test_a_call_that_is_broken_off_is_dropped_and_its_source_is_text() -> None:
    parsing = parser(F.HERMES)
    begun = parsing.parse('<tool_call>{"name": "add", "arguments": {"a"')
    assert calls(begun) == [("add", '{"a"')]
    rest = parsing.finish()
    assert rest.parts == [ToolCallPart(0, dropped=True)]
    assert rest.text == '<tool_call>{"name": "add", "arguments": {"a"'
    assert join_parts([*begun.parts, *rest.parts]) == []


def test_calls_and_their_lengths_are_bounded() -> None:
    found = parse(F.HERMES, HERMES * (ANSWER_CALLS_MAX + 1))
    assert (found.text, len(calls(found))) == (HERMES, ANSWER_CALLS_MAX)
    one = parse(F.HERMES, f"{HERMES}\n{HERMES}", calls_max=1)
    assert (one.text, calls(one)) == (HERMES, ADD)
    for form, answer in (
        (F.LLAMA, '{"name":"now","parameters":{}};{"name":"now","parameters":{}}'),
        (F.MISTRAL, '[TOOL_CALLS][{"name":"now"}, {"name":"now"}]'),
    ):
        found = parse(form, answer, calls_max=1)
        assert calls(found) == [NOW] and found.text.strip()
    long = '<tool_call>{"name":"now","arguments":{"a":"' + "x" * CALL_CHARACTERS_MAX
    assert parse(F.HERMES, long + '"}}').text == long + '"}}'
    assert calls(parse(F.HERMES, long.replace("x" * 100, "") + '"}}'))


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *(">>>", ">>>all\n", "<function=add>", "</function>", "<parameter=a>", "</parameter>"),
    *('{"name": "add", ', '"arguments": ', '"parameters": ', '{"a": 1}', "}", "{", "[", "]", ","),
    *("now", "add", ";", '"', "\\", "\n", " ", "é", "<", "<think>", "</think>", "1", ":"),
    *(HERMES, '{"name":"now","parameters":{}}', "now\n{}"),
)
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)
CUTS = st.lists(st.integers(0, 120), max_size=8)
FORMS = st.sampled_from(list(ToolFormat))


def pieces_of(answer: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(answer), *(c for c in cuts if c < len(answer))})
    return [answer[a:b] for a, b in pairwise(places)]


@given(FORMS, ANSWERS, CUTS, st.booleans(), st.booleans())
def test_the_result_at_every_place_is_the_same_for_every_split(
    form: ToolFormat, answer: str, cuts: list[int], opened: bool, thinks: bool
) -> None:
    def results(pieces: list[str]) -> dict[int, tuple[str, list[ToolCall]]]:
        """Return text and calls so far by the number of characters; -1: at the end."""
        parsing = parser(form, opened=opened, opens_reasoning=thinks)
        text, parts, at, found = "", list[ToolCallPart](), 0, {}
        for piece in pieces:
            more = parsing.parse(piece)
            text, parts, at = text + more.text, [*parts, *more.parts], at + len(piece)
            found[at] = text, join_parts(parts)
        more = parsing.finish()
        found[-1] = text + more.text, join_parts([*parts, *more.parts])
        return found

    by_character, cut = results(list(answer)), results(pieces_of(answer, cuts))
    assert {at: by_character[at] for at in cut} == cut


@given(FORMS, ANSWERS, st.booleans())
def test_nothing_is_lost(form: ToolFormat, answer: str, opened: bool) -> None:
    found = parse(form, answer, opened=opened)
    parsed = join_parts(found.parts)
    assert all(isinstance(json.loads(call.arguments), dict) for call in parsed)
    if form is ToolFormat.FUNCTIONARY:  # its texts have a mark
        answer = answer.replace("all\n", "").replace(">>>", "")
        found = found._replace(text=found.text.replace("all\n", "").replace(">>>", ""))
    if not parsed:
        assert found.text == answer


def test_text_that_is_no_call_is_read_once_for_each_form_of_calls() -> None:
    """Otherwise a text with many marks would be read again from each of them."""
    failed = '<function=add>{"a": "<function=now>{}</function>"]'
    found = parse(F.FUNCTION_TAGS, failed + " <function=now>{}</function>")
    assert (found.text, calls(found)) == (failed, [NOW])


def test_space_that_is_held_back_before_a_call_is_bounded() -> None:
    for size, kept in ((HELD_CHARACTERS_MAX, 0), (HELD_CHARACTERS_MAX + 1, 1)):
        answer = "a" * 10_000 + " " * size + HERMES
        for pieces in ([answer], list(answer)):
            found = parse(F.HERMES, *pieces)
            assert (found.text, calls(found)) == ("a" * 10_000 + " " * size * kept, ADD)


def test_space_that_waits_for_a_mark_is_bounded() -> None:
    parsing = parser(F.FUNCTION_TAGS)
    parsing.parse("<tool_call><function=add><parameter=note>x</parameter>")
    for _ in range(200):
        parsing.parse(" ")
    assert len(parsing.held) < CALL_CHARACTERS_MAX
    assert len(parsing._source.buffer) <= 100, "the rest was read"


def test_parts_of_one_call_are_joined() -> None:
    first, more = ToolCallPart(0, "i", "f"), ToolCallPart(0, arguments="{")
    assert merge_parts([first, more, more]) == [ToolCallPart(0, "i", "f", "{{")]
    dropped, other = ToolCallPart(0, dropped=True), ToolCallPart(1, "j", "g")
    assert merge_parts([first, dropped, first, other]) == [first, dropped, first, other]


def test_ids_depend_on_the_context_and_the_number_only() -> None:
    ids = [call_id(b"x", 0), call_id(b"x", 1), call_id(b"y", 0)]
    assert ids == [call_id(b"x", 0), call_id(b"x", 1), call_id(b"y", 0)]
    assert len(set(ids)) == 3
    assert all(len(i) == ID_CHARACTERS and i.isalnum() for i in ids)


def test_arguments_that_messages_cannot_have_stay_text_for_the_template() -> None:
    assert template_arguments('{"a": [1]}') == {"a": [1]}
    many = ",".join(["[]"] * (CONTAINERS_MAX + 1))
    for text in ('{"a": ' + "9" * 30 + "}", '{"a": [' + many + "]}"):
        assert template_arguments(text) == text
