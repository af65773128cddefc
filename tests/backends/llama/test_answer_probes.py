"""The form of answers, derived from the chat templates that llama.cpp tests and from bad ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.backends.answer_form import (
    MARK_CHARACTERS_MAX,
    PLAIN_ANSWERS,
    AnswerForm,
    CallForm,
    defects_of,
    read_answer_form,
)
from inferd.backends.llama.text import sandbox
from inferd.backends.llama.text.answer_probes import derive_answer_form
from inferd.backends.llama.text.renderer import Renderer
from inferd.backends.llama.text.template import ChatTemplate
from inferd.backends.llama.text.template_form import derive_form
from inferd.backends.tool_formats import KNOWN_FORMS, configured_form, with_name
from tests.backends.llama.test_template_forms import renderer_of, templates

NAMES = {
    "apriel": ("Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"),
    "function-tags": (
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash",
        "meetkai-functionary-medium-v3.1",
    ),
    "functionary": ("meetkai-functionary-medium-v3.2",),
    "gemma-4": ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    "granite-3": ("ibm-granite-granite-3.3-2B-Instruct",),
    "harmony": ("openai-gpt-oss-120b",),
    "hermes": (
        "Bielik-11B-v3.0-Instruct", "MiMo-VL", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Reka-Edge", "ibm-granite-granite-4.0",
        "ibm-granite-granite-4.1",
    ),
    "kimi-k3": ("Kimi-K3",),
    "lfm2": ("LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct"),
    "llama": (
        "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
    ),
    "minimax-m3": ("MiniMax-M3",),
    "mistral": ("mistralai-Mistral-Nemo-Instruct-2407",),
    "mistral-args": (
        "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512",
        "unsloth-mistral-Devstral-Small-2507",
    ),
    "muse": ("muse-glimmer",),
    "none": (
        "HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "llama-cpp-rwkv-world",
        "microsoft-Phi-3.5-mini-instruct",
    ),
    "solar": ("upstage-Solar-Open-100B",),
}  # fmt: skip
"""The templates whose form has a name, or no calls; all others are derived."""
DERIVED: dict[str, dict[str, Any]] = {
    "Apertus-8B-Instruct": {
        "section_begin": "<|tools_prefix|>", "section_end": "<|tools_suffix|>", "array": True,
        "layout": "keyed",
    },
    "Cohere2MoE": {
        "section_begin": "<|START_ACTION|>", "section_end": "<|END_ACTION|>", "array": True,
        "name_key": "tool_name", "arguments_key": "parameters", "id_key": "tool_call_id",
        "key_order": ("tool_call_id", "tool_name", "parameters"), "id_index": "from-0",
    },
    "GLM-4.6": {
        "begin": "<tool_call>", "end": "</tool_call>", "separator": "\n", "layout": "named",
        "name_end": "\n",
        "arguments": {
            "encoding": "tagged", "key_begin": "<arg_key>", "key_end": "</arg_key>",
            "value_begin": "\n<arg_value>", "value_end": "</arg_value>\n",
        },
    },
    "GigaChat3.1-10B-A1.8B": {"begin": "<|function_call|>"},
    "Kimi-K2-Thinking": {
        "section_begin": "<|tool_calls_section_begin|>",
        "section_end": "<|tool_calls_section_end|>",
        "begin": "<|tool_call_begin|>", "end": "<|tool_call_end|>", "layout": "named",
        "name_begin": "functions.", "name_end": "<|tool_call_argument_begin|>",
        "id_place": "after_name", "id_begin": ":", "id_index": "from-0",
    },
    "MiniMax-M2": {
        "section_begin": "<minimax:tool_call>\n", "section_end": "</minimax:tool_call>",
        "begin": '<invoke name="', "end": "</invoke>\n", "layout": "named", "name_end": '">\n',
        "arguments": {
            "encoding": "tagged", "key_begin": '<parameter name="', "key_end": '">',
            "value_end": "</parameter>\n",
        },
    },
    "deepseek-ai-DeepSeek-V3.1": {
        "section_begin": "<｜tool▁calls▁begin｜>", "section_end": "<｜tool▁calls▁end｜>",
        "begin": "<｜tool▁call▁begin｜>", "end": "<｜tool▁call▁end｜>", "layout": "named",
        "name_end": "<｜tool▁sep｜>",
    },
    "deepseek-ai-DeepSeek-V3.2": {
        "section_begin": "\n\n<｜DSML｜function_calls>\n",
        "section_end": "</｜DSML｜function_calls>",
        "begin": '<｜DSML｜invoke name="', "end": "</｜DSML｜invoke>\n", "layout": "named",
        "name_end": '">\n',
        "arguments": {
            "encoding": "tagged", "key_begin": '<｜DSML｜parameter name="',
            "key_end": '" string="', "value_begin": '">', "value_end": "</｜DSML｜parameter>\n",
            "text_kinds": ("true",), "json_kinds": ("false",),
        },
    },
    "fireworks-ai-llama-3-firefunction-v2": {
        "section_begin": " functools", "array": True, "declared": True,
    },
    "openbmb-MiniCPM5-1B": {
        "begin": '<function name="', "end": "</function>", "separator": "\n", "layout": "named",
        "name_end": '">',
        "arguments": {
            "encoding": "tagged", "key_begin": '<param name="', "key_end": '">',
            "value_end": "</param>", "cdata": True,
        },
    },
}  # fmt: skip
"""The form of calls of some of them."""
REASONING = {
    "Cohere2MoE": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "ByteDance-Seed-OSS": ("<seed:think>", "</seed:think>\n"),
    "GLM-4.7-Flash": ("<think>", "</think>"),
    "Qwen-Qwen3-0.6B": ("<think>\n", "\n</think>\n\n"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("<think>\n", "</think>"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("[THINK]", "[/THINK]"),
    "tencent-Hy3": ("<think:opensource>", "</think:opensource>"),
}
CALLS = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}BEGIN{"name": {{ call.function.name | tojson }},
 "arguments": {{ call.function.arguments | tojson }}}END{% endfor %}</s>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def derived(render: Callable[..., str], source: str) -> AnswerForm:
    return with_name(derive_answer_form(render, derive_form(render), source))


def derived_from(source: str) -> AnswerForm:
    compiled = sandbox._compile(source)

    def render(messages: Any, tools: Any, names: Any) -> str:
        values = {"add_generation_prompt": True, **names}
        try:
            return compiled.render(messages=messages, tools=tools, **values)
        except Exception as exc:  # as the sandbox reports any
            raise ValueError(str(exc)) from None

    return derived(render, source)


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.stem)
def test_the_form_of_answers_is_found_for_each_template(template: Path) -> None:
    form = derived(renderer_of(template), template.read_text())

    named = {stem: name for name, stems in NAMES.items() for stem in stems}
    assert form.shown_name == named.get(template.stem, "derived")
    assert form.warnings == ()
    assert defects_of(form) == [] or form.name == "apriel", "its prompt ends with ordinary text"
    if template.stem in DERIVED:
        assert form.calls[0] == msgspec.convert(DERIVED[template.stem], CallForm)
    if template.stem in REASONING:
        [block] = form.reasoning
        assert (block.begin, block.end) == REASONING[template.stem]


def test_a_form_survives_its_way_through_json() -> None:
    for form in KNOWN_FORMS.values():
        assert msgspec.json.decode(msgspec.json.encode(form), type=AnswerForm) == form


def test_marks_that_could_be_text_are_refused() -> None:
    source = CALLS.replace("BEGIN", "[[MARK]]").replace("END", "")
    assert derived_from(source.replace("[[MARK]]", "<call>")).calls[0].begin == "<call>"

    words = derived_from(source.replace("[[MARK]]", "Call "))
    assert words.calls[0].declared, "only names of functions count after an ordinary word"
    no_mark = derived_from(source.replace("[[MARK]]", ""))
    assert no_mark.calls[0].whole, "only at the beginning of an answer"


@pytest.mark.parametrize(
    "call",
    [
        "{{ call.function.name }} with {{ call.function.arguments }}",
        "{{ call.function.arguments | tojson }} to {{ call.function.name }}",
        "{{ call.function.name }}({{ call.function.arguments.text_key }})",
    ],
)
def test_answers_stay_text_where_probes_do_not_agree(call: str) -> None:
    source = CALLS.replace(CALLS[CALLS.index("BEGIN") : CALLS.index("END")], call)

    form = derived_from(source)

    assert form.calls == () and form.shown_name == "none"
    assert "calls" in form.warnings[0]


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "the object of the call": (
        "<call>{{ call | tojson }}</call>",
        {
            "begin": "<call>", "end": "</call>", "name_key": "function.name",
            "arguments_key": "function.arguments", "id_key": "id",
            "key_order": ("id", "type", "function"), "constants": {"type": "function"},
        },
    ),
    "a name between tags": (
        "<call><name>{{ f.name }}</name>{{ f.arguments | tojson }}</call>",
        {
            "begin": "<call><name>", "end": "</call>", "layout": "named", "name_end": "</name>",
        },
    ),
    "Python after a mark": (
        ("{% if loop.first %}<py>[{% endif %}{{ f.name }}({% for k, v in f.arguments.items() %}"
        "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last else ']</py>' }}"),
        {
            "section_begin": "<py>", "section_end": "</py>", "array": True, "layout": "named",
            "arguments": {"encoding": "python", "begin": "(", "end": ")"},
        },
    ),
    "Python alone": (
        ("{{ '[' if loop.first }}{{ f.name }}({% for k, v in f.arguments.items() %}"
        "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last else ']' }}"),
        {
            "array": True, "layout": "named", "whole": True, "declared": True,
            "arguments": {"encoding": "python", "begin": "(", "end": ")"},
        },
    ),
    "code in a section": (
        ("{{ '<calls>' if loop.first }}<call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}"
        "\n```</call>\n{{ '</calls>' if loop.last }}"),
        {
            "section_begin": "<calls>", "section_end": "</calls>", "begin": "<call>",
            "end": "\n```</call>\n", "layout": "named", "name_end": "\n```json\n",
        },
    ),
}  # fmt: skip
"""Calls as templates of other models write them, and their form."""


@pytest.mark.parametrize("name", OTHERS)
def test_forms_of_other_templates_are_found(name: str) -> None:
    call, expected = OTHERS[name]
    source = CALLS.replace(CALLS[CALLS.index("BEGIN") : CALLS.index("END") + 3], call)
    source = source.replace(
        "{%- for call in m.tool_calls or [] %}",
        "{%- for call in m.tool_calls or [] %}{% set f = call.function %}",
    )

    form = derived_from(source)

    assert form.warnings == ()
    assert form.calls == (msgspec.convert(expected, CallForm),)


PIECES = st.sampled_from(
    [
        "{{ call.function.name }}", "{{ call.function.arguments | tojson }}", "{{ call.id }}",
        "{{ call.function.arguments.text_key }}", "{{ call.function.arguments.number_key }}",
        "text_key", "number_key", "<call>", "</call>", "[TOOL]", "{{ '{' }}", "}", "[", "]", "(",
        ")", "=", ":", '"', ",", "\n", "<think>", "</think>", "{{ loop.index }}", "x",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12), st.lists(PIECES, max_size=3), st.lists(PIECES, max_size=3))
@settings(deadline=None, max_examples=60)
def test_any_template_has_a_form_without_defects(
    call: list[str], before: list[str], after: list[str]
) -> None:
    source = CALLS.replace(CALLS[CALLS.index("BEGIN") : CALLS.index("END")], "".join(call))
    source = source.replace("{{ m.content }}", "{{ m.content }}" + "".join(before))
    source = source.replace("</s>", "".join(after))

    form = derived_from(source)

    assert defects_of(form) == []
    assert form.reasoning


@pytest.mark.parametrize("filler", ["'[' * 9000", "'{\"a\":' * 2600", "'<' * 99999"])
def test_the_analysis_of_hostile_answers_is_short(filler: str) -> None:
    filler = f"{{{{ {filler} }}}}"
    source = CALLS.replace("BEGIN", filler).replace("END", filler)
    began = time.monotonic()

    form = derived_from(source)

    assert time.monotonic() - began < 5
    assert defects_of(form) == [] and all(len(m) <= MARK_CHARACTERS_MAX for m in form.marks)


def test_an_operator_sets_a_form_by_name_or_as_data() -> None:
    derived_form = msgspec.structs.replace(PLAIN_ANSWERS, stops=("<end>",))
    assert configured_form("", derived_form) is derived_form
    by_name = configured_form("mistral", derived_form)
    assert by_name.calls == KNOWN_FORMS["mistral"].calls and by_name.stops == ("<end>",)
    data = {"calls": [{"begin": "<c>", "end": "</c>"}]}
    assert configured_form(data, derived_form).calls == (CallForm(begin="<c>", end="</c>"),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"calls": [{"begin": "a"}]}, "would hide ordinary text"),
        ({"content": [{"begin": "<response>", "end": "."}]}, "would hide ordinary text"),
        ({"calls": [{"layout": "named"}]}, "no mark"),
        ({"reasoning": [{"begin": "<t>", "end": " "}]}, "would hide ordinary text"),
        ({"calls": [{"begin": "<c>", "finish": ""}]}, "unknown key 'finish'"),
        ({"calls": [{"begin": 1}]}, "Expected `str`"),
        ({"dropped": ["<x>"] * 9}, "more than 8"),
        ({"dropped": ["<" * 300]}, "more than 256"),
        ({"calls": [{"begin": "<\0>"}]}, "a mark with a NUL"),
        ([], "Expected `object`"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_answer_form(data)


@pytest.mark.process
def test_a_slow_template_leaves_answers_plain() -> None:
    source = "{% for n in range(9000) %}{{ n | string | upper | lower }}{% endfor %}"
    loops = "{% for k in range(40) %}" + source + "{% endfor %}{{ messages[0].content }}"
    with closing(ChatTemplate(Renderer(loops), bos="", eos="", strip_bos=False)) as template:
        template.prepare()
        assert template.answer_form == PLAIN_ANSWERS


def stems(groups: Sequence[Sequence[str]]) -> list[str]:
    return [stem for group in groups for stem in group]


def test_each_template_is_listed_once() -> None:
    listed = stems(list(NAMES.values()))
    assert len(listed) == len(set(listed))
    assert {*listed, *DERIVED, *REASONING} <= {path.stem for path in templates()}
