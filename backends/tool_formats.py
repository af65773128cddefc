"""The forms in which models write tool calls, recognised by marks in their chat templates."""

from __future__ import annotations

from enum import StrEnum

__all__ = ("FUNCTION_NAME_CHARACTERS_MAX", "MARK_TOKENS", "ToolFormat", "tool_format_of")

FUNCTION_NAME_CHARACTERS_MAX = 128
"""The maximum of Anthropic and of the Model Context Protocol; OpenAI's is 64."""


class ToolFormat(StrEnum):
    """A form of tool calls, by the name that clients see."""

    NONE = "none"
    """Answers are text."""
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}]`."""
    MISTRAL_ARGS = "mistral-args"
    """`[TOOL_CALLS]name[ARGS]{…}`, of newer versions. With both Mistral formats, answers in either
    form are read.
    """
    LLAMA = "llama"
    """`{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`: Llama 3."""
    FUNCTIONARY = "functionary"
    """`>>>name`, and the arguments in the next line: functionary v3.2."""
    FUNCTION_TAGS = "function-tags"
    """`<function=name>`, and the arguments as JSON (Llama 3, functionary v3.1) or in
    `<parameter=…>` tags (Qwen3-Coder).
    """
    JSON = "json"
    """The whole answer is `{"name": …, "arguments": {…}}`. This is used where a call is required of
    a model without a form of its own.
    """


_MARKS = (
    (">>>all", ToolFormat.FUNCTIONARY),
    ("<function=", ToolFormat.FUNCTION_TAGS),
    ("[ARGS]", ToolFormat.MISTRAL_ARGS),
    ("[TOOL_CALLS]", ToolFormat.MISTRAL),
    ("<|python_tag|>", ToolFormat.LLAMA),
    ("<|start_header_id|>ipython", ToolFormat.LLAMA),
    ("<tool_call>", ToolFormat.HERMES),
)
"""In the order of the checks, because a template with an earlier mark may have later ones too."""
_OTHER_MARKS = ("<arg_key>",)
"""Marks of forms that are not supported, in templates with `<tool_call>`."""

MARK_TOKENS: dict[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.FUNCTION_TAGS: ("<tool_call>", "</tool_call>"),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolFormat.MISTRAL_ARGS: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ToolFormat.LLAMA: ("<|python_tag|>",),
}
"""Special tokens whose names an answer must show, so that its calls can be recognised."""


def tool_format_of(template: str) -> ToolFormat:
    """Return the form of tool calls of a model with this chat template."""
    found = next((form for mark, form in _MARKS if mark in template), ToolFormat.NONE)
    if found is ToolFormat.HERMES and any(mark in template for mark in _OTHER_MARKS):
        return ToolFormat.NONE
    return found
