"""What is made of the table for readers: a JSON schema, and the page docs/parameters.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .ignored_keys import OUTSIDE
from .table import PARAMETERS, SAMPLERS, Kind, Parameter

_TYPES: dict[Kind, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "text": {"type": "string"},
    "texts": {"type": ["string", "array"], "items": {"type": "string"}},
    "samplers": {"type": ["string", "array"], "items": {"enum": list(SAMPLERS)}},
    "biases": {"type": ["array", "object"]},
    "shares": {"type": ["string", "array"], "items": {"type": "number"}},
    "tokens": {"type": ["integer", "array"], "items": {"type": "integer", "minimum": 0}},
    "triggers": {"type": ["string", "array", "object"]},
    "schema": {"type": ["object", "boolean", "string"]},
    "choice": {"type": "string"},
    "tools": {"type": ["string", "array"], "items": {"type": "object"}},
    "arguments": {"type": ["string", "object"]},
    "scales": {"type": ["object", "array", "null"]},
}
_WORDS: dict[Kind, str] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "text": "text",
    "texts": "text, or array of texts",
    "samplers": "array of names, or letters",
    "biases": "array of pairs, or map",
    "shares": "array of numbers, or text as 3,2",
    "tokens": "int, or array of ints",
    "triggers": "text, or array of texts, pairs and objects",
    "schema": "object, or its JSON text",
    "choice": "name",
    "tools": "array of tools, or text",
    "arguments": "map, or text",
    "scales": "map of numbers, or array",
}


def json_schema(parameters: Sequence[Parameter] = PARAMETERS) -> dict[str, Any]:
    """Return a JSON schema of parameters by their names; other spellings and keys are not in it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "parameters of inferd",
        "type": "object",
        "properties": {p.name: _property(p) for p in parameters},
    }


def _property(p: Parameter) -> dict[str, Any]:
    bounds = {"minimum": p.low, "maximum": p.high}
    finite = {key: _plain(value) for key, value in bounds.items() if math.isfinite(value)}
    named = {"enum": list(p.choices)} if p.choices else {}
    return {**_TYPES[p.kind], **named, **finite, "default": p.default, "description": p.doc}


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def page() -> str:
    """Return docs/parameters.md."""
    return "\n".join([*_INTRODUCTION, *_tables(), *_OUTSIDE_INTRODUCTION, *_outside(), ""])


_INTRODUCTION = """\
# Parameters

Made by `make docs` from the table in `backends/params/table.py`; as a JSON schema:
[parameters.schema.json](parameters.schema.json).

Read from the configuration (`[defaults]`, `[models.NAME]`), from JSON (`set_input` at index 1,
`config`, `builders[1]`) and from `options`. `_` and `-` are the same, and so are the spellings in
the second column: llama-server's, WasmEdge's and those of apuslabs/wasi_nn_backend, whose nested
objects are read too (`model`, `sampling`, `stopping`, `memory`, `memory_policy`,
`memory_management`, `performance`, `backend`, `logging`; `sampling.dynatemp.range` is
`dynatemp-range`). In JSON an unknown key is returned as `ignored`, unless the
JSON also has `"strict": true`; everywhere else it is rejected, with the nearest known key. A value
out of its range is rejected with the range and the nearest valid value; all errors are reported
together. [stopping.md](stopping.md) describes the conditions that end a turn, and further forms.

**Precedence**: the value of the turn, else of the session, of the graph, of the model in the
configuration, of the GGUF file (`general.sampling.*`), else the built-in default. The call
`parameters` returns each value in force with its origin. If values contradict each other, that call
and the metadata (`adjusted`) return the values used instead.

*Model* parameters are the operator's; of those a client may ask for a smaller `ctx-size`. *Context*
ones hold for a context, *request* ones for a context or a turn.
""".splitlines()

_OUTSIDE_INTRODUCTION = """\
## Keys that have no effect

Other runtimes know them. They are told as `ignored`, or refused with the reason where keys are
strict.

| keys | why |
|---|---|""".splitlines()


def _tables() -> Iterator[str]:
    for level in ("model", "context", "request"):
        yield f"## {level.capitalize()}"
        yield ""
        yield "| parameter | also | type | default | range | meaning |"
        yield "|---|---|---|---|---|---|"
        yield from (_line(p) for p in PARAMETERS if p.level == level)
        yield ""


def columns(p: Parameter) -> tuple[str, str, str, str, str, str, str]:
    """Return name, level, other spellings, type, default, range and meaning as texts."""
    bounds = f"{p.low:.10g} … {p.high:.10g}" if p.kind in ("int", "float") else ""
    default = json.dumps(p.default)
    return p.name, p.level, ", ".join(p.aliases), _WORDS[p.kind], default, bounds, p.doc


def _line(p: Parameter) -> str:
    name, _, _, kind, default, bounds, meaning = columns(p)
    shown = f"`{default}`".replace("|", "\\|")
    return f"| `{name}` | {_code(p.aliases)} | {kind} | {shown} | {bounds} | {meaning} |"


def _outside() -> Iterator[str]:
    for reason in dict.fromkeys(OUTSIDE.values()):
        yield f"| {_code(k for k, why in OUTSIDE.items() if why == reason)} | {reason} |"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
