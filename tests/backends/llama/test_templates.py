"""The values of a chat template (tools, its own arguments), and configured templates."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from inferd.backends import ModelSpec, Rendering, load_model
from inferd.backends.errors import Cancelled, InferdError, InvalidArgument, LoadFailed
from inferd.backends.llama.text.renderer import Renderer
from inferd.backends.llama.text.template import SOURCE_BYTES_MAX, ChatTemplate, configured_renderer
from inferd.backends.params import read_options
from inferd.backends.params.chat_options import (
    ARGUMENTS_BYTES_MAX,
    ARGUMENTS_MAX,
    DEPTH_MAX,
    TOOLS_BYTES_MAX,
    TOOLS_MAX,
)
from tests.backends.driving import load_language_model
from tests.tiny_gguf import write_tiny

USER = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}\n{% endif %}"
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}[{{ call.function.name }}"
    " {{ call.function.arguments | tojson }}]{% endfor %}{{ '\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{%- endif %}"
)


def render(messages: list[dict[str, Any]] = USER, **values: Any) -> str:
    renderer = Renderer(TEMPLATE)
    with closing(ChatTemplate(renderer, bos="<s>", eos="</s>", strip_bos=True)) as template:
        return template.render(messages, Rendering(**values))


@pytest.mark.process
def test_tools_and_their_calls_reach_the_template() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
    ]}  # fmt: skip
    result = {"role": "tool", "content": "sunny"}

    text = render([*USER, called, result], tools=[TOOL])

    assert text == (
        json.dumps([TOOL]) + "\n<user>Hi\n"
        '<assistant>[weather {"place": "Rome"}]\n<tool>sunny\n<assistant>'
    )


@pytest.mark.process
def test_arguments_of_its_own_reach_the_template() -> None:
    assert render().endswith("<assistant>")
    assert render(arguments={"enable_thinking": False}).endswith("<assistant><think></think>")
    assert render(arguments={"enable_thinking": True}).endswith("<assistant>")


@pytest.mark.process
def test_without_a_generation_prompt_it_ends_with_the_last_message() -> None:
    assert render(add_generation_prompt=False) == "<user>Hi\n"


@pytest.mark.process
def test_arguments_do_not_replace_the_values_that_are_always_set() -> None:
    arguments = {"messages": [], "bos_token": "x", "add_generation_prompt": False}
    assert render(arguments=arguments) == render()


# Parameters


def read(name: str, value: Any) -> Any:
    return read_options({name: value}, strict=True).values[name]


def refusal(name: str, value: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read(name, value)
    return caught.value.message


def test_tools_are_a_list_or_its_json_text() -> None:
    assert read("tools", [TOOL]) == [TOOL] == read("tools", json.dumps([TOOL]))
    assert read("tools", []) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ({}, "not a list"),
        ("[", "is not valid JSON"),
        ([1], "Expected `object`"),
        ([{"type": "function"}], "field `function`"),
        ([{"type": "custom", "function": {"name": "f"}}], "type"),
        ([{"type": "function", "function": {}}], "field `name`"),
        ([{"type": "function", "function": {"name": "two words"}}], "function.name"),
        ([{"type": "function", "function": {"name": "x" * 129}}], "function.name"),
        ([{"type": "function", "function": {"name": "f", "description": 1}}], "description"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "parameters"),
    ],
)
def test_tools_of_another_shape_are_refused(tools: Any, why: str) -> None:
    assert why in refusal("tools", tools)


def nested(depth: int) -> Any:
    """Return a value that nests *depth* deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.process
def test_tools_are_bounded() -> None:
    assert len(read("tools", [TOOL] * TOOLS_MAX)) == TOOLS_MAX
    assert str(TOOLS_MAX) in refusal("tools", [TOOL] * (TOOLS_MAX + 1))
    long = {"type": "function", "function": {"name": "f", "description": "x" * TOOLS_BYTES_MAX}}
    assert str(TOOLS_BYTES_MAX) in refusal("tools", [long])
    deep = {
        "type": "function",
        "function": {"name": "f", "parameters": {"x": nested(DEPTH_MAX - 4)}},
    }
    assert read("tools", [deep]) == [deep]
    deep["function"] = {"name": "f", "parameters": {"x": nested(DEPTH_MAX - 3)}}
    assert str(DEPTH_MAX) in refusal("tools", [deep])


def test_arguments_are_a_map_or_its_json_text() -> None:
    assert read("chat-template-kwargs", {"enable_thinking": False}) == {"enable_thinking": False}
    assert read("chat-template-kwargs", '{"a":[1]}') == {"a": [1]}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "not a map"),
        ({"messages": []}, "is always set"),
        ({"no name": 1}, "no name"),
        ({f"a{i}": 1 for i in range(ARGUMENTS_MAX + 1)}, str(ARGUMENTS_MAX)),
        ({"a": "x" * ARGUMENTS_BYTES_MAX}, str(ARGUMENTS_BYTES_MAX)),
        ({"a": nested(DEPTH_MAX)}, str(DEPTH_MAX)),
    ],
)
def test_arguments_of_another_shape_are_refused(arguments: Any, why: str) -> None:
    assert why in refusal("chat-template-kwargs", arguments)


def test_an_unknown_reasoning_format_is_refused() -> None:
    assert read("reasoning-format", "DeepSeek") == "deepseek"
    assert "none, auto, deepseek" in refusal("reasoning-format", "openai")
    assert "none, auto, deepseek" in refusal("reasoning-format", 1)


# The configuration


@pytest.mark.process
def test_a_configured_template_precedes_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("file {{ messages[0].content }}")
    model = write_tiny("llama", tmp_path)
    spec = ModelSpec(name="t", path=str(model))
    inline = "inline {{ messages[0].content }}"
    for configured, text in (
        (msgspec.structs.replace(spec, chat_template=inline), "inline Hi"),
        (msgspec.structs.replace(spec, chat_template_file=str(file)), "file Hi"),
        (spec, "<user>Hi\n"),
    ):
        loaded = load_language_model(configured)
        assert loaded.render(USER) == text
        loaded.close()


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8"),
        (b" \n", "empty"),
        (b"{% if %}", "line 1"),
        (b"\n{{ x", "line 2"),
        (b"x" * (SOURCE_BYTES_MAX + 1), str(SOURCE_BYTES_MAX)),
    ],
    ids=["none", "no text", "empty", "no end", "no template", "too long"],
)
def test_an_invalid_template_file_fails_the_load(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(LoadFailed) as caught:
        configured_renderer(ModelSpec(name="t", chat_template_file=str(file)))
    assert why in caught.value.message and str(file) in caught.value.message
    assert caught.value.hint


def test_a_template_and_a_template_file_together_are_refused() -> None:
    with pytest.raises(LoadFailed, match="both"):
        configured_renderer(ModelSpec(name="t", chat_template="x", chat_template_file="y"))


@pytest.mark.process
def test_a_bad_template_fails_before_the_model_is_read(tmp_path: Path) -> None:
    spec = ModelSpec(name="t", path=str(tmp_path / "none.gguf"), chat_template="{% if %}")
    with pytest.raises(InferdError, match="chat template"):
        load_language_model(spec)


@pytest.mark.process
def test_the_process_of_a_model_that_renders_starts_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    spec = ModelSpec(name="t", path=str(write_tiny("llama", tmp_path)), slots=1, ctx_size=256)
    others = psutil.Process().children()
    started: list[psutil.Process] = []

    def progress(_: float) -> bool:
        started.extend(p for p in psutil.Process().children() if p not in others)
        return not started

    with pytest.raises(Cancelled):
        load_model(spec, progress, renders=True)
    assert len(started) == 1 and not started[0].is_running()
    started.clear()
    with closing(load_model(spec, progress)):
        assert not started
