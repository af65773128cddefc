"""Answers in every kind of form: whole, in every split into two, and in single characters."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from inferd.backends.answer_form import AnswerForm, ArgumentsForm, Block, CallForm
from inferd.backends.tool_formats import KNOWN_FORMS
from inferd.sessions.answers.calls import ToolCall, join_parts
from inferd.sessions.answers.parser import AnswerParser
from inferd.sessions.answers.source import SPACE_CHARACTERS_MAX

FUNCTIONS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "text": {"type": "string"},
            "list": {"$ref": "#/$defs/numbers"},
            "object": {
                "type": "object",
                "properties": {
                    "deep": {"type": "boolean"},
                    "names": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
        "$defs": {"numbers": {"type": "array", "items": {"type": "integer"}}},
    },
    "now": {},
}
THINK = Block(begin="<think>\n", end="\n</think>\n\n")
TAGS = ArgumentsForm(
    encoding="tagged",
    key_begin="<parameter=",
    key_end=">",
    value_begin="\n",
    value_end="\n</parameter>\n",
)
QWEN_CODER = AnswerForm(
    reasoning=(THINK,),
    opens=("<think>\n",),
    calls=(
        CallForm(
            begin="<tool_call>\n",
            layout="named",
            name_begin="<function=",
            name_end=">\n",
            end="</function>\n</tool_call>",
            separator="\n",
            arguments=TAGS,
        ),
    ),
)
GLM = AnswerForm(
    reasoning=(Block(begin="\n<think>", end="</think>\n"),),
    calls=(
        CallForm(
            begin="\n<tool_call>",
            layout="named",
            name_end="\n",
            end="</tool_call>",
            arguments=ArgumentsForm(
                encoding="tagged",
                key_begin="<arg_key>",
                key_end="</arg_key>\n",
                value_begin="<arg_value>",
                value_end="</arg_value>\n",
            ),
        ),
    ),
)
KIMI_2 = AnswerForm(
    calls=(
        CallForm(
            section_begin="<|tool_calls_section_begin|>",
            section_end="<|tool_calls_section_end|>",
            begin="<|tool_call_begin|>",
            end="<|tool_call_end|>",
            layout="named",
            name_begin="functions.",
            id_place="after_name",
            id_begin=":",
            id_index="from-0",
            arguments=ArgumentsForm(begin="<|tool_call_argument_begin|>"),
        ),
    )
)
DEEPSEEK_R1 = AnswerForm(
    reasoning=(Block(begin="<think>\n", end="</think>"),),
    opens=("<think>\n",),
    calls=(
        CallForm(
            section_begin="<｜tool▁calls▁begin｜>",
            section_end="<｜tool▁calls▁end｜>",
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            layout="named",
            name_end="\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
            separator="\n",
        ),
    ),
)
DEEPSEEK_V32 = AnswerForm(
    calls=(
        CallForm(
            section_begin="\n\n<｜DSML｜function_calls>\n",
            section_end="</｜DSML｜function_calls>",
            layout="named",
            begin='<｜DSML｜invoke name="',
            name_end='">\n',
            end="</｜DSML｜invoke>\n",
            arguments=ArgumentsForm(
                encoding="tagged",
                key_begin='<｜DSML｜parameter name="',
                key_end='" string="',
                value_begin='">',
                value_end="</｜DSML｜parameter>\n",
                text_kinds=("true",),
                json_kinds=("false",),
            ),
        ),
    )
)
APERTUS = AnswerForm(
    reasoning=(Block(begin="<|inner_prefix|>", end="<|inner_suffix|>"),),
    calls=(
        CallForm(
            section_begin="<|tools_prefix|>",
            section_end="<|tools_suffix|>",
            array=True,
            layout="keyed",
        ),
    ),
)
COMMAND = AnswerForm(
    reasoning=(Block(begin="<|START_THINKING|>", end="<|END_THINKING|>"),),
    content=(Block(begin="<|START_RESPONSE|>", end="<|END_RESPONSE|>"),),
    calls=(
        CallForm(
            section_begin="<|START_ACTION|>",
            section_end="<|END_ACTION|>",
            array=True,
            name_key="tool_name",
            arguments_key="parameters",
            id_key="tool_call_id",
            id_index="from-0",
            key_order=("tool_call_id", "tool_name", "parameters"),
        ),
    ),
)
NESTED_OBJECT = AnswerForm(
    calls=(
        CallForm(
            begin="<call>",
            end="</call>",
            name_key="function.name",
            arguments_key="function.arguments",
            constants={"type": "function"},
        ),
    )
)
MINICPM = AnswerForm(
    calls=(
        CallForm(
            begin='<function name="',
            layout="named",
            name_end='">',
            end="</function>",
            arguments=ArgumentsForm(
                encoding="tagged",
                key_begin='<param name="',
                key_end='">',
                value_end="</param>",
                cdata=True,
            ),
        ),
    )
)
ALL: dict[str, Any] = {"a": -1, "text": "x", "list": [1, 2], "object": {"deep": True}}
MARKS = 'say "</parameter>" \\ <tool_call>'


class Case(NamedTuple):
    form: AnswerForm
    answer: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    prompt: str = ""


def tags(**values: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=add>\n{inner}</function>\n</tool_call>"


NOW = ("now", dict[str, Any]())
KNOWN = KNOWN_FORMS
CASES = {
    "tags": Case(
        QWEN_CODER,
        "<think>\nhm\n</think>\n\nSure.\n"
        + tags(a="-1", text="x", list="[1, 2]", object="{'deep': True}"),
        "Sure.",
        "hm",
        (("add", ALL),),
    ),
    "tags, prompt opens reasoning": Case(
        QWEN_CODER, "hm\n</think>\n\n" + tags(a="1"), "", "hm", (("add", {"a": 1}),), "<think>\n"
    ),
    "tags, marks in a value": Case(
        QWEN_CODER, tags(text=MARKS + "\n"), calls=(("add", {"text": MARKS + "\n"}),)
    ),
    "tags, without arguments": Case(
        QWEN_CODER, "<tool_call>\n<function=now>\n</function>\n</tool_call>" * 2, calls=(NOW, NOW)
    ),
    "tags, JSON instead": Case(
        QWEN_CODER,
        '<tool_call><function=add>{"a": 1}</function></tool_call>',
        calls=(("add", {"a": 1}),),
    ),
    "tags, without an end": Case(
        QWEN_CODER, tags(a="1").split("</function>")[0], calls=(("add", {"a": 1}),)
    ),
    "keys and values": Case(
        GLM,
        "\n<think>hm</think>\nOh.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>text</arg_key>\n<arg_value> é\n</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>",
        "Oh.",
        "hm",
        (("add", {"a": 1, "text": " é\n"}), NOW),
    ),
    "sections": Case(
        KIMI_2,
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Hm.",
        calls=(("add", {"a": 1}), NOW),
    ),
    "sections, outer mark missing": Case(
        KIMI_2,
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        calls=(NOW,),
    ),
    "code fences": Case(
        DEEPSEEK_R1,
        "why</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "why",
        (("add", {"a": 1}), NOW),
        "<think>\n",
    ),
    "section without calls": Case(
        DEEPSEEK_R1,
        "a</think>b<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "b",
        "a",
        prompt="<think>\n",
    ),
    "kinds": Case(
        DEEPSEEK_V32,
        'Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter '
        'name="text" string="true">1\n</｜DSML｜parameter>\n<｜DSML｜parameter name="b" '
        'string="false">{"c": 1}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Hm.",
        calls=(("add", {"text": "1\n", "b": {"c": 1}}),),
    ),
    "names as keys": Case(
        APERTUS,
        '<|inner_prefix|>a b<|inner_suffix|><|tools_prefix|>[{"add": {"a": 1}}, {"now": {}}]'
        "<|tools_suffix|>",
        "",
        "a b",
        (("add", {"a": 1}), NOW),
    ),
    "content in marks": Case(
        COMMAND,
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>",
        "yes",
        "hm",
    ),
    "own keys": Case(
        COMMAND,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}},'
        '\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        calls=(("add", {"a": 1}), NOW),
    ),
    "object in an object": Case(
        NESTED_OBJECT,
        '<call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</call>',
        calls=(("add", {"a": 1}),),
    ),
    "character data": Case(
        MINICPM,
        '<function name="add"><param name="a">1</param><param name="text"><![CDATA[<b>\n</param>]]>'
        "</param></function>",
        calls=(("add", {"a": 1, "text": "<b>\n</param>"}),),
    ),
    "literals of Python": Case(
        KNOWN["lfm2"],
        "<|tool_call_start|>[add(a=-1, text='it\\'s \"x\", (so)', list=[1, 2], "
        "object={'deep': True, 'names': [\"n\", None]}), now()]<|tool_call_end|>ok",
        "ok",
        calls=(
            (
                "add",
                ALL
                | {"text": 'it\'s "x", (so)', "object": {"deep": True, "names": ["n", None]}},
            ),
            NOW,
        ),
    ),
    "own quotes": Case(
        KNOWN["gemma-4"],
        '<|channel>thought\nhm\n<channel|><|tool_call>call:add{a:-1,text:<|"|>say "x", {so}<|"|>,'
        'list:[1,2],object:{<|"|>deep<|"|>:true}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "",
        "hm\n",
        (("add", ALL | {"text": 'say "x", {so}'}), NOW),
    ),
    "nested tags": Case(
        KNOWN["minimax-m3"],
        "<mm:think>hm</mm:think>N<tool_call>\nN<invoke name=\"add\">N<a>-1N</a>N<text>xN</text>"
        "N<list>N<item>1N</item>N<item>2N</item>N</list>N<object>N<deep>trueN</deep>N<names>"
        "N<item>1N</item>N</names>N</object>N</invoke>\nN</tool_call>".replace(
            "N<", "]<]minimax[>[<"
        ),
        "",
        "hm",
        (("add", ALL | {"object": {"deep": True, "names": ["1"]}}),),
    ),
    "kinds of values, text": Case(
        KNOWN["kimi-k3"],
        "hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
        '<|open|>argument key="text" type="string"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "Yes.",
        "hm",
        (("add", {"a": 1, "text": "1"}),),
        "<|open|>think<|sep|>",
    ),
    "channels": Case(
        KNOWN["harmony"],
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Look.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
        '<|message|>{"a": 1}<|call|>',
        "Look.",
        "hm",
        (("add", {"a": 1}),),
        "<|start|>assistant",
    ),
    "channels, recipient first": Case(
        KNOWN["harmony"],
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        calls=(NOW,),
        prompt="<|start|>assistant",
    ),
    "channels, without calls": Case(
        KNOWN["harmony"],
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>final<|message|>Yes, to=functions.x",
        "Yes, to=functions.x",
        "ab",
        prompt="<|start|>assistant",
    ),
    "channels, ids": Case(
        KNOWN["solar"],
        "<|think|>hm<|end|><|begin|>assistant<|content|>Oh.<|end|><|begin|>assistant<|tool_calls|>"
        '<|tool_call:begin|>abc1<|tool_call:name|>add<|tool_call:args|>{"a": 1}<|tool_call:end|>'
        "<|calls|>",
        "Oh.",
        "hm",
        (("add", {"a": 1}),),
        "<|begin|>assistant",
    ),
    "recipients": Case(
        KNOWN["muse"],
        " to=self<|message|>hm<|eom|><|start|>assistant to=add<|message|><atem:function_calls>\n"
        '<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        "",
        "hm",
        (("add", {"a": 1}),),
        "<|start|>assistant",
    ),
}  # fmt: skip


def read(case: Case, *pieces: str, **options: Any) -> tuple[str, str, list[ToolCall]]:
    parser = AnswerParser(case.form, FUNCTIONS, prompt=case.prompt, reasoning=True, **options)
    found = [*map(parser.parse, pieces), parser.finish()]
    calls = join_parts(part for one in found for part in one.parts)
    return "".join(f.text for f in found), "".join(f.reasoning for f in found), calls


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read_whole_and_in_any_pieces(name: str) -> None:
    case = CASES[name]
    text, reasoning, calls = whole = read(case, case.answer)
    assert (text, reasoning) == (case.text, case.reasoning)
    assert tuple((call.name, json.loads(call.arguments)) for call in calls) == case.calls
    assert read(case, *case.answer) == whole
    for place in range(1, len(case.answer)):
        assert read(case, case.answer[:place], case.answer[place:]) == whole


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].calls])
def test_a_call_that_a_limit_cuts_has_a_part_of_its_arguments(name: str) -> None:
    """From the name on it stays a call; its marks never become text."""
    case = CASES[name]
    whole = read(case, case.answer)[2][0]
    names = set()
    for place in range(1, len(case.answer)):
        parser = AnswerParser(case.form, FUNCTIONS, prompt=case.prompt, reasoning=True)
        first, last = parser.parse(case.answer[:place]), parser.finish(cut=True)
        if calls := join_parts([*first.parts, *last.parts]):
            names.add(calls[0].name)
            assert whole.arguments.startswith(calls[0].arguments)
            assert case.text.startswith((first.text + last.text).strip())
        else:
            assert not names, "a call that was begun stays one"
    assert names == {whole.name}


def test_a_call_keeps_the_id_that_stands_before_its_arguments() -> None:
    assert read(CASES["channels, ids"], CASES["channels, ids"].answer)[2][0].id == "abc1"
    assert read(CASES["sections"], CASES["sections"].answer)[2][1].id == "1", "only a number: ours"


def test_stray_marks_beside_a_call_disappear() -> None:
    call = tags(a="1")
    for answer in (call + "</tool_call>", "<tool_call>\n" + call, f"{call}</function> <tool_call>"):
        text, _, calls = read(CASES["tags"], answer)
        assert (text, len(calls)) == ("", 1)
    assert read(CASES["tags"], f"{call}\nDone.</tool_call>")[0] == "Done.</tool_call>"


def test_without_parsing_only_marks_of_content_are_removed() -> None:
    case = CASES["channels"]
    parser = AnswerParser(case.form, FUNCTIONS, prompt=case.prompt, finds_calls=False)
    text = parser.parse(case.answer).text + parser.finish().text
    assert text.startswith("<|channel|>analysis<|message|>hm<|end|>Look.")
    assert text.endswith('to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>')


def test_calls_that_the_model_gives_the_same_id_have_different_ones() -> None:
    case = CASES["channels, ids"]
    calls = read(case, case.answer + case.answer)[2]
    assert [call.id for call in calls[:2]] != [calls[0].id] * 2
    assert calls[0].id == "abc1"


def test_a_place_for_arguments_ends_with_the_line_in_any_pieces() -> None:
    case = Case(KNOWN["harmony"], "", "")
    answer = "<|channel|>commentary to=functions.add\n<|channel|>final<|message|>yes"
    assert read(case, *answer) == read(case, answer)


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("function-tags", "<function=add>\n<parameter=a>\n1\n</parameter>"),
        (
            "minimax-m3",
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<a>',
        ),
        ("lfm2", "<|tool_call_start|>[add(a='x'"),
    ],
)
def test_white_space_in_a_call_is_not_read_again_with_each_piece(name: str, begin: str) -> None:
    """Otherwise the time would grow with the square of the answer's length."""
    parser = AnswerParser(KNOWN[name], FUNCTIONS)
    parser.parse(begin)
    for _ in range(2_000):
        parser.parse(" ")
    assert len(parser._source.buffer) <= 512


@pytest.mark.parametrize("after", ["<parameter=b>", "</function>", "x</parameter></function>"])
def test_long_white_space_in_a_call_is_read_alike_in_any_pieces(after: str) -> None:
    for size in (SPACE_CHARACTERS_MAX, SPACE_CHARACTERS_MAX + 1):
        answer = "<function=add>\n<parameter=text>\n1\n</parameter>" + " " * size + after
        case = Case(KNOWN["function-tags"], answer)
        assert read(case, *answer) == read(case, answer)


@pytest.mark.parametrize("after", [", b=1)]", "x', b=1)]", ")]"])
def test_long_white_space_after_a_quote_is_read_alike_in_any_pieces(after: str) -> None:
    for size in (SPACE_CHARACTERS_MAX, SPACE_CHARACTERS_MAX + 1):
        answer = f"<|tool_call_start|>[add(a='x'{' ' * size}{after}<|tool_call_end|>"
        case = Case(KNOWN["lfm2"], answer)
        assert read(case, *answer) == read(case, answer)


def test_words_that_are_marks_stay_text_beside_calls() -> None:
    call = CallForm(begin="call ", layout="named", end=";", declared=True)
    form = AnswerForm(calls=(call,))
    answer = 'call add {"a": 1}; call! You can call. call'
    assert read(Case(form, answer), answer)[0] == "call! You can call. call"
