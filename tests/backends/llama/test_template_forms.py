"""The form in which each of the chat templates that llama.cpp tests takes messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jinja2
import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.text import sandbox
from inferd.backends.llama.text.renderer import Renderer
from inferd.backends.llama.text.template import ChatTemplate
from inferd.backends.llama.text.template_form import TemplateForm, derive_form, form_values
from tools.get_templates import MISSING, folder

FORMS: dict[str, dict[str, Any]] = {
    "ByteDance-Seed-OSS": {"needs_properties": True},
    "CohereForAI-c4ai-command-r-plus-tool_use": {"lists_no_tools": True},
    "GigaChat3-10B-A1.8B": {"single_calls": True},
    "GigaChat3.1-10B-A1.8B": {"single_calls": True},
    "HuggingFaceTB-SmolLM3-3B": {"calls": "none"},
    "LFM2-8B-A1B": {"calls": "none"},
    "LFM2.5-8B-A1B": {"reasoning": ("thinking",)},
    "LFM2.5-Instruct": {"calls": "none"},
    "Mistral-Small-3.2-24B-Instruct-2506": {"short_ids": True},
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": {"lists_no_tools": True},
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": {"lists_no_tools": True},
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {
        "calls": "text", "null_content": True, "needs_properties": True,
    },
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"needs_properties": True},
    "deepseek-ai-DeepSeek-V3.1": {"needs_properties": True},
    "fireworks-ai-llama-3-firefunction-v2": {"names_functions": True},
    "google-gemma-2-2b-it": {"system": False, "calls": "none", "results": False},
    "ibm-granite-granite-3.3-2B-Instruct": {"calls": "none"},
    "llama-cpp-rwkv-world": {"calls": "none", "results": False},
    "meetkai-functionary-medium-v3.2": {"calls": "text"},
    "meta-llama-Llama-3.1-8B-Instruct": {"single_calls": True},
    "meta-llama-Llama-3.2-3B-Instruct": {"single_calls": True},
    "meta-llama-Llama-3.3-70B-Instruct": {"single_calls": True},
    "microsoft-Phi-3.5-mini-instruct": {"calls": "none", "results": False},
    "mistralai-Ministral-3-14B-Reasoning-2512": {"reasoning": ("parts",)},
    "mistralai-Mistral-Nemo-Instruct-2407": {"short_ids": True},
    "openai-gpt-oss-120b": {
        "single_calls": True, "reasoning": ("thinking",), "reasoning_excludes_content": True,
    },
    "upstage-Solar-Open-100B": {"reasoning": ("reasoning",)},
}  # fmt: skip
"""By template, the properties that differ from most templates'."""
TOOL = {"type": "function", "function": {"name": "weather"}}
IDS = ("call_0a1b2c3d4e5f", "call_0a1b2c3d4e60")
LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rome or Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": IDS[0],
                "type": "function",
                "function": {"name": "weather", "arguments": '{"place": "Rome <b>"}'},
            },
            {
                "id": IDS[1],
                "type": "function",
                "function": {"name": "weather", "arguments": {"place": "Oslo"}},
            },
        ],
    },
    {"role": "tool", "tool_call_id": IDS[0], "name": "weather", "content": "sunny"},
    {"role": "tool", "tool_call_id": IDS[1], "name": "weather", "content": "snow"},
    {"role": "assistant", "content": "Rome is sunny."},
    {"role": "user", "content": "And tomorrow?"},
]
TEXTS = ("Be brief.", "Rome or Oslo?", "Oslo", "sunny", "snow", "Rome is sunny.", "And tomorrow?")


def templates() -> list[Path]:
    found = folder()
    return [] if found is None else sorted(found.glob("*.jinja"))


def renderer_of(template: Path) -> Callable[..., str]:
    compiled = sandbox._compile(template.read_text())

    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        names: Mapping[str, Any],
    ) -> str:
        values = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **names}
        try:
            return compiled.render(messages=messages, tools=tools, **values)
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as exc:
            raise ValueError(str(exc)) from None

    return render


def test_all_templates_are_there() -> None:
    assert len(templates()) == 70, MISSING


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.stem)
def test_a_loop_of_tools_reaches_each_template_whole(template: Path) -> None:
    render = renderer_of(template)

    form = derive_form(render)
    text = render(*form_values(form, LOOP, [TOOL]))

    assert form == TemplateForm(**FORMS.get(template.stem, {}))
    assert [t for t in TEXTS if t not in text] == []
    assert '\\"place' not in text, "the arguments are not JSON within JSON"
    if form.calls != "none":
        assert "Rome <b>" in text or "Rome \\u003cb" in text


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.stem)
def test_both_forms_of_arguments_give_each_template_the_same_text(template: Path) -> None:
    render = renderer_of(template)
    form = derive_form(render)

    def text(arguments: Any) -> str:
        function = {"name": "weather", "arguments": arguments}
        call = {"id": IDS[0], "type": "function", "function": function}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        return render(*form_values(form, [LOOP[1], called, LOOP[3]], [TOOL]))

    assert text({"place": "Rome", "days": 2}) == text('{"place": "Rome", "days": 2}')


def test_values_that_no_object_can_hold_stay_texts() -> None:
    def arguments_of(text: str) -> Any:
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        [message], _, _ = form_values(TemplateForm(), messages, [])
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments_of("") == {}
    for text in ("[1]", "{", '{"a": 99999999999999999999}', "[" * 100_000):
        assert arguments_of(text) == text


def test_calls_of_one_message_are_divided_before_their_results() -> None:
    form = TemplateForm(single_calls=True)

    messages, _, _ = form_values(form, LOOP, [])

    assert [m["role"] for m in messages[2:7]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [len(m["tool_calls"]) for m in (messages[2], messages[4])] == [1, 1]
    assert [messages[n]["content"] for n in (3, 5)] == ["sunny", "snow"]


def test_system_messages_and_results_become_messages_of_the_user() -> None:
    form = TemplateForm(system=False, calls="none", results=False)

    messages, _, _ = form_values(form, LOOP, [])

    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[0]["content"] == "Be brief.\n\nRome or Oslo?"
    assert messages[2]["content"] == "sunny\n\nsnow"
    assert set(form.notes) == {"system", "tool_calls", "tool"}


def test_short_ids_are_the_same_for_a_call_and_its_result() -> None:
    messages, _, _ = form_values(TemplateForm(short_ids=True), LOOP, [])

    ids = [call["id"] for call in messages[2]["tool_calls"]]
    assert ids == [m["tool_call_id"] for m in messages[3:5]]
    assert all(len(i) == 9 and i.isalnum() for i in ids) and ids[0] != ids[1]


@pytest.mark.process
def test_a_template_that_does_not_compile_is_named_with_its_line() -> None:
    source = "{{ 1 }}\n{% unknown %}"
    with (
        closing(ChatTemplate(Renderer(source), bos="", eos="", strip_bos=False)) as template,
        pytest.raises(InvalidArgument, match=r"cannot be used: line 2: .*unknown tag") as caught,
    ):
        template.render([{"role": "user", "content": "Hi"}])
    assert "chat-template-file" in caught.value.hint and "roles" not in caught.value.hint
