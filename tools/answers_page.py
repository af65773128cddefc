"""The page on the form of answers, from the structs that describe it."""

from __future__ import annotations

import json

import msgspec

from inferd.backends.answer_form import AnswerForm, ArgumentsForm, Block, CallForm
from inferd.backends.tool_formats import KNOWN_FORMS
from tools.documented_fields import docs_of

_HEAD = """# The form of answers

A model marks its reasoning, its content and its tool calls in its own way. inferd finds the marks
when it loads a model: it renders probe conversations with the chat template and compares the
results. `inferd show MODEL` prints the marks, `inferd show MODEL --template` the whole form as
data. The parser of answers, the grammars of required and strict calls, and the special tokens
that answers show come from it. Where the probes do not agree, or a mark would hide ordinary text,
answers stay text, and `inferd show` says why.

The parameter [`tool-format`](parameters.md) of a model sets another form: a name, or a table in the
configuration (in JSON also as text).

```toml
[models.my-model]
tool-format = "hermes"

[models.other.tool-format]
reasoning = [{ begin = "<think>", end = "</think>" }]
opens = ["<think>"]
calls = [{ begin = "<tool_call>", end = "</tool_call>" }]
```

A name whose reasoning is the usual one (`<think>`) keeps the reasoning that was found. Marks are
written with their white space, as grammars write them; where answers are read, white space around
marks is optional. Up to 8 blocks, forms of calls and marks of each kind are possible, and marks
of up to 256 characters.

## Known forms

Forms that no chat template shows, and those whose names clients see in `tool_format`:

| name | reasoning | calls |
|---|---|---|
"""
_PARTS = (
    ("answer", "The form of answers", AnswerForm),
    ("block", "A block of `reasoning` or `content`", Block),
    ("call", "A form of `calls`", CallForm),
    ("arguments", "The `arguments` of a call", ArgumentsForm),
)


def page() -> str:
    """Return docs/answers.md."""
    rows = "".join(map(_row, KNOWN_FORMS.values()))
    parts = [_part(*part) for part in _PARTS]
    return _HEAD + rows + "".join(parts)


def _row(form: AnswerForm) -> str:
    reasoning = ", ".join(f"{_code(b.begin)} … {_code(b.end)}" for b in form.reasoning)
    calls = dict.fromkeys(next(iter(call.triggers), "a JSON object") for call in form.calls)
    shown = ", ".join(text if text == "a JSON object" else _code(text) for text in calls)
    return f"| `{form.name}` | {reasoning} | {shown} |\n"


def _code(mark: str) -> str:
    text = _cell(mark.strip())
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _part(column: str, title: str, struct: type[msgspec.Struct]) -> str:
    docs = docs_of(struct)
    rows = (
        f"| `{field.name}` | {_default(field)} | {_cell(docs[field.name])} |\n"
        for field in msgspec.structs.fields(struct)
    )
    return f"\n## {title}\n\n| {column} | default | meaning |\n|---|---|---|\n{''.join(rows)}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if value is msgspec.NODEFAULT:
        return "`{}`"
    if isinstance(value, msgspec.Struct):
        return "JSON"
    return f"`{json.dumps(value)}`"
