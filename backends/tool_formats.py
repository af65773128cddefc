"""The forms of answers that are known by name, and the marks by which templates name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from .answer_form import (
    PLAIN_ANSWERS,
    THINK,
    AnswerForm,
    ArgumentsForm,
    Block,
    CallForm,
    read_answer_form,
)

__all__ = (
    "FUNCTION_NAME_CHARACTERS_MAX",
    "KNOWN_FORMS",
    "configured_form",
    "marked_form",
    "marked_reasoning",
    "named_form",
    "with_name",
)

FUNCTION_NAME_CHARACTERS_MAX = 128
"""The maximum of Anthropic and of the Model Context Protocol; OpenAI's is 64."""

_FUNCTION_PARAMETERS = ArgumentsForm(
    encoding="tagged",
    key_begin="<parameter=",
    key_end=">",
    value_begin="\n",
    value_end="\n</parameter>\n",
)
_MISTRAL_LIST = CallForm(section_begin="[TOOL_CALLS]", array=True, id_key="id")
_MISTRAL_ARGS = CallForm(
    begin="[TOOL_CALLS]", layout="named", arguments=ArgumentsForm(begin="[ARGS]")
)
_MISTRAL_ID = CallForm(
    begin="[TOOL_CALLS]",
    layout="named",
    id_place="after_name",
    id_begin="[CALL_ID]",
    arguments=ArgumentsForm(begin="[ARGS]"),
)
_FUNCTION_JSON = CallForm(begin="<function=", layout="named", name_end=">", end="</function>")
_FUNCTION_TAGS = CallForm(
    begin="<tool_call>\n",
    layout="named",
    name_begin="<function=",
    name_end=">\n",
    end="</function>\n</tool_call>",
    separator="\n",
    arguments=_FUNCTION_PARAMETERS,
)
_HARMONY_CALL = CallForm(
    begin="<|channel|>commentary to=functions.",
    layout="named",
    name_end=" <|constrain|>json",
    skips_to_arguments=True,
    end="<|call|>",
    arguments=ArgumentsForm(begin="<|message|>"),
)


def _with_calls(name: str, *calls: CallForm) -> AnswerForm:
    return replace(PLAIN_ANSWERS, name=name, calls=calls)


_KNOWN = (
    replace(PLAIN_ANSWERS, name="none"),
    _with_calls("hermes", CallForm(begin="<tool_call>\n", end="\n</tool_call>", separator="\n")),
    _with_calls("mistral", _MISTRAL_LIST, _MISTRAL_ARGS, _MISTRAL_ID),
    _with_calls("mistral-args", _MISTRAL_ARGS, _MISTRAL_ID, _MISTRAL_LIST),
    _with_calls(
        "llama",
        CallForm(arguments_key="parameters", whole=True, declared=True, separator="; "),
        CallForm(begin="<|python_tag|>", arguments_key="parameters", separator="; "),
    ),
    AnswerForm(
        name="functionary",
        reasoning=(THINK,),
        opens=("<think>", ">>>"),
        content=(Block(begin=">>>all\n", anywhere=True),),
        calls=(CallForm(begin=">>>", layout="named", name_end="\n", declared=True),),
    ),
    _with_calls("function-tags", _FUNCTION_JSON, _FUNCTION_TAGS),
    _with_calls("json", CallForm(whole=True, declared=True)),
    # gpt-oss; the template writes the recipient before the channel, models also after it
    AnswerForm(
        name="harmony",
        reasoning=(Block(begin="<|channel|>analysis<|message|>", end="<|end|>", anywhere=True),),
        content=(
            Block(begin="<|channel|>final<|message|>", end="<|return|>", anywhere=True),
            Block(begin="<|channel|>final<|message|>", end="<|end|>", anywhere=True),
            Block(begin="<|channel|>commentary<|message|>", end="<|end|>", anywhere=True),
        ),
        calls=(
            _HARMONY_CALL,
            replace(
                _HARMONY_CALL,
                declared=True,
                begin=" to=functions.",
                name_end="<|channel|>commentary json",
            ),
        ),
        opens=("<|start|>assistant",),
        dropped=("<|start|>assistant",),
    ),
    AnswerForm(
        name="kimi-k3",
        reasoning=(Block(begin="<|open|>think<|sep|>", end="<|close|>think<|sep|>"),),
        content=(Block(begin="<|open|>response<|sep|>", end="<|close|>response<|sep|>"),),
        calls=(
            CallForm(
                section_begin="<|open|>tools<|sep|>",
                section_end="<|close|>tools<|sep|>",
                begin='<|open|>call tool="',
                end="<|close|>call<|sep|>",
                layout="named",
                name_end='"<|sep|>',
                id_place="after_name",
                id_begin='" index="',
                id_index="from-1",
                arguments=ArgumentsForm(
                    encoding="tagged",
                    key_begin='<|open|>argument key="',
                    key_end='" type="',
                    value_begin='"<|sep|>',
                    value_end="<|close|>argument<|sep|>",
                    text_kinds=("string",),
                    json_kinds=("number", "boolean", "object", "array", "null"),
                ),
            ),
        ),
        opens=("<|open|>think<|sep|>", "<|open|>response<|sep|>"),
        dropped=("<|close|>message<|sep|>",),
    ),
    AnswerForm(
        name="minimax-m3",
        reasoning=(Block(begin="<mm:think>", end="</mm:think>"),),
        calls=(
            CallForm(
                section_begin="]<]minimax[>[<tool_call>\n",
                section_end="]<]minimax[>[</tool_call>",
                begin=']<]minimax[>[<invoke name="',
                end="]<]minimax[>[</invoke>\n",
                layout="named",
                name_end='">',
                arguments=ArgumentsForm(
                    encoding="tagged",
                    key_begin="]<]minimax[>[<",
                    key_end=">",
                    value_end="]<]minimax[>[</{key}>",
                    nested=True,
                ),
            ),
        ),
        opens=("<mm:think>",),
    ),
    AnswerForm(
        name="gemma-4",
        reasoning=(Block(begin="<|channel>thought\n", end="<channel|>", anywhere=True),),
        calls=(
            CallForm(
                begin="<|tool_call>call:",
                end="<tool_call|>",
                layout="named",
                arguments=ArgumentsForm(quote='<|"|>', bare_keys=True),
            ),
        ),
        opens=("<|channel>thought\n",),
    ),
    AnswerForm(
        name="solar",
        reasoning=(Block(begin="<|think|>", end="<|end|>", anywhere=True),),
        content=(Block(begin="<|content|>", end="<|end|>", anywhere=True),),
        calls=(
            CallForm(
                section_begin="<|tool_calls|>",
                section_end="<|calls|>",
                begin="<|tool_call:begin|>",
                end="<|tool_call:end|>",
                layout="named",
                id_place="before_name",
                name_begin="<|tool_call:name|>",
                arguments=ArgumentsForm(begin="<|tool_call:args|>"),
            ),
        ),
        opens=("<|begin|>assistant",),
        dropped=("<|begin|>assistant",),
    ),
    AnswerForm(
        name="muse",
        reasoning=(Block(begin=" to=self<|message|>", end="<|eom|>", anywhere=True),),
        content=(
            Block(begin=" to=user<|message|>", end="<|eot|>", anywhere=True),
            Block(begin=" to=user<|message|>", end="<|eom|>", anywhere=True),
        ),
        calls=(
            CallForm(
                begin=" to=",
                end="</atem:invoke>\n</atem:function_calls>",
                separator="<|eom|><|start|>assistant",
                layout="named",
                arguments=ArgumentsForm(
                    encoding="tagged",
                    begin='<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
                    key_begin='<atem:parameter name="',
                    key_end='">',
                    value_end="</atem:parameter>\n",
                ),
                declared=True,
            ),
        ),
        opens=("<|start|>assistant",),
        dropped=("<|start|>assistant", "<|eom|>"),
    ),
    AnswerForm(
        name="apriel",
        reasoning=(
            Block(begin="Here are my reasoning steps:\n", end="\n[BEGIN FINAL RESPONSE]\n"),
        ),
        calls=(CallForm(section_begin="\n<tool_calls>", section_end="</tool_calls>", array=True),),
        opens=("Here are my reasoning steps:\n",),
    ),
    _with_calls(
        "lfm2",
        CallForm(
            section_begin="<|tool_call_start|>",
            section_end="<|tool_call_end|>",
            array=True,
            layout="named",
            arguments=ArgumentsForm(encoding="python", begin="(", end=")"),
        ),
    ),
    replace(
        PLAIN_ANSWERS,
        name="granite-3",
        content=(Block(begin="<response>", end="</response>"),),
        calls=(CallForm(section_begin="<|tool_call|>", array=True),),
    ),
)
KNOWN_FORMS = {form.name: form for form in _KNOWN}
"""The forms by name."""


_MARKED_REASONING = (("<|inner_prefix|>", Block(begin="<|inner_prefix|>", end="<|inner_suffix|>")),)
"""Reasoning that templates write only of messages in their own form (Apertus)."""


def marked_reasoning(template: str) -> Block | None:
    """Return the marks of reasoning that the source of a template names, if it names some."""
    return next((block for mark, block in _MARKED_REASONING if mark in template), None)


class MarkedForm(NamedTuple):
    """A form that the source of a template names by a *mark*. A form that *gives_way* counts only
    if no form of calls can be derived; one that *adds* has more forms of calls that models write.
    """

    mark: str
    form: AnswerForm
    gives_way: bool = False
    adds: bool = False


_MARKED = (
    MarkedForm(">>>all", KNOWN_FORMS["functionary"]),
    MarkedForm("<|channel|>analysis", KNOWN_FORMS["harmony"]),
    MarkedForm("<|end_of_msg|>", KNOWN_FORMS["kimi-k3"]),
    MarkedForm("]<]minimax[>[", KNOWN_FORMS["minimax-m3"]),
    MarkedForm("<|tool_call>call:", KNOWN_FORMS["gemma-4"]),
    MarkedForm("<|tool_call:begin|>", KNOWN_FORMS["solar"]),
    MarkedForm("<atem:function_calls>", KNOWN_FORMS["muse"]),
    MarkedForm("[BEGIN FINAL RESPONSE]", KNOWN_FORMS["apriel"]),
    MarkedForm("[ARGS]", KNOWN_FORMS["mistral-args"], gives_way=True, adds=True),
    MarkedForm("[TOOL_CALLS]", KNOWN_FORMS["mistral"], gives_way=True, adds=True),
    MarkedForm("<function=", KNOWN_FORMS["function-tags"], gives_way=True, adds=True),
    MarkedForm("<|python_tag|>", KNOWN_FORMS["llama"], gives_way=True, adds=True),
    MarkedForm("<|start_header_id|>ipython", KNOWN_FORMS["llama"], gives_way=True, adds=True),
    MarkedForm("<|tool_list_start|>", KNOWN_FORMS["lfm2"], gives_way=True),
    MarkedForm("List of tools: [", KNOWN_FORMS["lfm2"], gives_way=True),
    MarkedForm("<|tool_call|>", KNOWN_FORMS["granite-3"], gives_way=True),
    MarkedForm("<tool_call>", KNOWN_FORMS["hermes"], gives_way=True),
)
"""In the order of the checks. Those without `gives_way` cannot be derived: gpt-oss has channels,
Gemma 4 its own strings, MiniMax M3 nested tags, and so on."""


def marked_form(template: str) -> MarkedForm | None:
    """Return the form that the source of a template names, if it names one."""
    return next((found for found in _MARKED if found.mark in template), None)


def named_form(name: str) -> AnswerForm:
    """Return the form of this name; an unknown name means plain text."""
    return KNOWN_FORMS.get(name, PLAIN_ANSWERS)


def configured_form(value: str | Mapping[str, Any], derived: AnswerForm) -> AnswerForm:
    """Return the form that the configuration sets by a name or as data, or else the *derived* one.
    With the name of a form whose reasoning is the usual one, the derived reasoning stays.
    """
    if not value:
        return derived
    if not isinstance(value, str):
        return read_answer_form(value)
    form = named_form(value)
    if form.reasoning != PLAIN_ANSWERS.reasoning:
        return form
    opens = tuple(dict.fromkeys((*derived.opens, *form.opens)))
    return replace(form, reasoning=derived.reasoning, opens=opens, stops=derived.stops)


def with_name(form: AnswerForm) -> AnswerForm:
    """Return a form with the name of the known form whose calls are written like its own."""
    if form.name or not form.calls:
        return form
    key = _key(form.calls[0])
    usual = [known for known in _KNOWN if known.reasoning == PLAIN_ANSWERS.reasoning]
    first = [known.name for known in usual if key in map(_key, known.calls[:1])]
    others = [known.name for known in usual if key in map(_key, known.calls[1:])]
    return replace(form, name=next(iter((*first, *others)), ""))


def _key(call: CallForm) -> tuple[object, ...]:
    outer = next(iter(call.triggers), "")
    keys = (call.name_key, call.arguments_key) if call.layout == "json" else ()
    encoding = call.arguments.encoding
    return (outer, call.name_begin, call.layout, call.array, call.whole, encoding, *keys)
