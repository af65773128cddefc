"""Generator of the Python client's typed maps: results, from the structs that the daemon builds,
and parameters, from their table.
"""

from __future__ import annotations

import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from inferd.backends.errors import ErrorFields
from inferd.backends.gguf import FileFacts
from inferd.backends.params.parameter_table import PARAMETERS, Kind, Parameter
from inferd.ipc.names import Priority
from inferd.wire.metadata import Metadata
from tools.documented_fields import RESULTS, fields_of

__all__ = ("sources",)

WIDTH = 100
HEADER = '''"""{}

`make docs` writes this file from {}; do not edit it.
"""
'''
"""Without `from __future__ import annotations`, a typed map need not compile its types, which would
take more than a millisecond of each import of the client.
"""
NAMES: dict[type, tuple[str, str]] = {
    Metadata: ("Metadata", "The metadata of a turn that has ended; a plain empty map before."),
    FileFacts: ("FileInfo", "Facts in the header of a model's file."),
    ErrorFields: ("ErrorFields", "An error as the protocol sends it."),
}
"""The names and docstrings of typed maps that differ from those of their structs."""
PRESENT = {"parks"}
"""Keys that a turn's metadata lacks only before its end."""
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
    "efforts": "Mapping[str, int]",
    "answer-form": "str | Mapping[str, Any]",
    "scales": "Mapping[str, float] | Sequence[Any] | None",
}
FUNCTIONS = "tools"
"""The parameter that the client takes as functions too, and therefore declares itself."""


def sources() -> dict[str, str]:
    """Return the generated modules by name."""
    return {"results.py": _results(), "parameters.py": _parameters()}


def _results() -> str:
    lines = [
        HEADER.format("The maps that calls return.", "the structs of the daemon's results"),
        "from typing import Any, NotRequired, TypedDict\n",
        "from ...backends.errors import ErrorFields",
        "from ..names import Priority",
    ]
    for struct in RESULTS.values():
        if struct is ErrorFields:
            continue
        [base, *_] = struct.__bases__
        base_name = _name(base) if base in RESULTS.values() else "TypedDict"
        lines.append(f'\n\nclass {_name(struct)}({base_name}):\n    """{_about(struct)}"""\n')
        for field in fields_of(struct):
            kind = _type_source(field.kind)
            if field.optional and field.name not in PRESENT:
                kind = f"NotRequired[{kind}]"
            lines += [f"    {field.name}: {kind}", *_doc(field.doc.removesuffix("."))]
    return "\n".join(lines) + "\n"


def _name(struct: type) -> str:
    return NAMES[struct][0] if struct in NAMES else struct.__name__


def _about(struct: type) -> str:
    return NAMES[struct][1] if struct in NAMES else str(struct.__doc__)


def _type_source(kind: Any) -> str:
    """Return the source text of a type."""
    if kind == Priority:
        return "Priority"
    if kind in RESULTS.values():
        return _name(kind)
    arguments = [_type_source(argument) for argument in typing.get_args(kind)]
    match typing.get_origin(kind):
        case types.UnionType | typing.Union:
            return " | ".join(arguments)
        case None:
            return "Any" if kind is Any else "None" if kind is types.NoneType else kind.__name__
        case origin:
            return f"{origin.__name__}[{', '.join(arguments)}]"


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
