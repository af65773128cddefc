"""Generator of the Python client's typed maps: results, from the tables of docs/protocol.md, and
parameters, from their table.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from inferd.backends.params.parameter_table import PARAMETERS, Kind, Parameter
from tools.protocol_page import PAGE, Field, tables

__all__ = ("sources",)

WIDTH = 100
HEADER = '''"""{}

`make docs` writes this file from {}; do not edit it.
"""

from __future__ import annotations
'''
RESULTS = {
    "error": ("ErrorFields", "An error as the protocol sends it."),
    "metadata": ("Metadata", "The metadata of a turn that has ended; a plain empty map before."),
    "file_info": ("FileInfo", "Facts in the header of a model's file."),
    "model": ("ModelInfo", "A model, as `models` describes it."),
    "shown": ("ShownModel", "A model, as `show` describes it."),
    "session": ("SessionInfo", "A session, as `sessions` describes it."),
    "task": ("TaskInfo", "A waiting or running turn, as `queue` describes it."),
    "parameter": ("ParameterInfo", "A parameter in force, as `parameters` describes it."),
    "deletion": ("DeletionInfo", "A session that the daemon has deleted by itself."),
    "state": ("StateInfo", "A named state, as `list_states` describes it."),
    "stats": ("Stats", "The daemon's statistics."),
}
"""By the first column of a table, the name of its type and the type's docstring."""
BASES = {"ShownModel": "ModelInfo"}
NAMED = {
    ("Metadata", "error"): "ErrorFields",
    ("Metadata", "lora"): "dict[str, float]",
    ("Metadata", "adjusted"): "dict[str, str]",
    ("ModelInfo", "error"): "ErrorFields | None",
    ("ShownModel", "file_info"): "FileInfo | None",
    ("SessionInfo", "priority"): "Priority",
    ("TaskInfo", "priority"): "Priority",
    ("TaskInfo", "effective_priority"): "Priority | None",
}
"""More exact types than those in the page's column."""
NODE = "    node: NotRequired[str]", '    """In a fleet, its node."""'
FLEET = {
    "ModelInfo": (
        *NODE,
        "    nodes: NotRequired[list[dict[str, Any]]]",
        '    """In a fleet, the model as each node describes it."""',
    ),
    "SessionInfo": NODE,
    "TaskInfo": NODE,
    "DeletionInfo": NODE,
    "StateInfo": NODE,
    "Stats": (
        "    nodes: NotRequired[dict[str, dict[str, Any]]]",
        '    """In a fleet, those of each node."""',
        "    unreachable: NotRequired[list[str]]",
        '    """In a fleet, the nodes that do not answer."""',
    ),
}
"""The lines of fields that only the entry of a fleet adds (docs/fleet.md)."""
SCALARS = {"int": "int", "float": "float", "bool": "bool", "str": "str", "nil": "None"} | {
    "bin": "bytes",
    "map": "dict[str, Any]",
    "any": "Any",
}
KINDS: dict[Kind, str] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "text": "str",
    "texts": "str | Sequence[str]",
    "samplers": "str | Sequence[str]",
    "biases": "Mapping[str, float | bool] | Sequence[Any]",
    "shares": "str | Sequence[float]",
    "tokens": "int | Sequence[int]",
    "triggers": "str | Mapping[str, Any] | Sequence[Any]",
    "schema": "Mapping[str, Any] | bool | str",
    "structural-tag": "Mapping[str, Any] | str",
    "tools": "Sequence[Mapping[str, Any]] | str",
    "tool-choice": 'Literal["auto", "none", "required"] | Mapping[str, Any]',
    "arguments": "Mapping[str, Any] | str",
    "scales": "Mapping[str, float] | Sequence[Any] | None",
}
FUNCTIONS = "tools"
"""The parameter that the client takes as functions too, and therefore declares itself."""


def sources() -> dict[str, str]:
    """Return the generated modules by name."""
    return {"results.py": _results(), "parameters.py": _parameters()}


def _results() -> str:
    lines = [
        HEADER.format("The maps that calls return.", "the tables of docs/protocol.md"),
        "from typing import Any, NotRequired, TypedDict\n",
        "from ..priorities import Priority",
    ]
    found = {table.columns[0]: table for table in tables(PAGE.read_text())}
    for column, (name, about) in RESULTS.items():
        lines.append(f'\n\nclass {name}({BASES.get(name, "TypedDict")}):\n    """{about}"""\n')
        for field in found[column].fields():
            lines += [f"    {field.name}: {_result_type(name, field)}", *_doc(field.meaning)]
        lines += FLEET.get(name, ())
    return "\n".join(lines) + "\n"


def _result_type(owner: str, field: Field) -> str:
    kind = NAMED.get((owner, field.name)) or " | ".join(map(_scalar, field.type.split(" or ")))
    return f"NotRequired[{kind}]" if re.search(r"\babsent\b", field.meaning, re.I) else kind


def _scalar(text: str) -> str:
    if text.startswith("array of "):
        return f"list[{_scalar(text.removeprefix('array of '))}]"
    return SCALARS[text]


def _doc(meaning: str) -> Iterator[str]:
    """Yield the lines of a field's docstring."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", meaning).replace("\\|", "|")
    if text.split()[0].isalpha():
        text = text[0].upper() + text[1:]
    text += "."
    prefix = "r" if "\\" in text else ""
    whole = f'    {prefix}"""{text}"""'
    if len(whole) <= WIDTH:
        yield whole
        return
    yield from textwrap.wrap(
        whole, WIDTH - 3, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )[:-1]
    last = textwrap.wrap(
        whole, WIDTH - 3, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )[-1]
    yield last.removesuffix('"""')
    yield '    """'


def _parameters() -> str:
    turns = [p for p in PARAMETERS if p.level in ("context", "request")]
    return "\n".join(
        [
            HEADER.format("The parameters of turns.", "the table of parameters"),
            "from collections.abc import Mapping, Sequence",
            "from typing import Any, Literal, TypedDict\n\n",
            *_keywords([p for p in turns if p.name != FUNCTIONS]),
            "\n",
            *_options(turns),
            "",
        ]
    )


def _keywords(parameters: Sequence[Parameter]) -> Iterator[str]:
    yield "class Parameters(TypedDict, total=False):"
    yield '    """The parameters of turns as keywords; docs/parameters.md describes them."""\n'
    for p in parameters:
        yield f"    {p.name.replace('-', '_')}: {_parameter_type(p)}"
        yield from _doc(p.doc)


def _options(parameters: Sequence[Parameter]) -> Iterator[str]:
    yield 'Options = TypedDict(\n    "Options",\n    {'
    for p in parameters:
        yield f'        "{p.name}": {_parameter_type(p)},'
    yield "    },\n    total=False,\n)"
    yield '"""The parameters of turns by their names in llama.cpp, as the keyword `options`."""'


def _parameter_type(p: Parameter) -> str:
    if p.kind == "choice":
        return f"Literal[{_quoted(p.choices)}]"
    return KINDS[p.kind] + (" | None" if p.default is None and p.kind != "scales" else "")


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(f'"{text}"' for text in texts)
