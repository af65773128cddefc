"""The JSON schema of the parameters, and the page docs/parameters.md, made from the table."""

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
_WORDS: dict[str, str] = {
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
    """Return a JSON schema of parameters by name; it does not allow for other spellings."""
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
    """Return the text of docs/parameters.md."""
    return "\n".join([*_INTRODUCTION, *_tables(), *_OUTSIDE_INTRODUCTION, *_outside(), ""])


_INTRODUCTION = """\
# Parameters

`make docs` writes this page from the table in `backends/params/table.py`, and the same parameters
as a JSON schema: [parameters.schema.json](parameters.schema.json).

Parameters are set in the configuration (`[defaults]`, `[models.NAME]`), in JSON (`set_input` at
index 1, `config`, `builders[1]`) and in `options`. `_` and `-` are equivalent. The second column
has other spellings that are read: those of llama-server, WasmEdge and apuslabs/wasi_nn_backend. The
nested objects of the latter are read too (`model`, `sampling`, `stopping`, `memory`,
`memory_policy`, `memory_management`, `performance`, `backend`, `logging`;
`sampling.dynatemp.range` is `dynatemp-range`).

In JSON an unknown key has no effect and is reported as `ignored`, unless `"strict": true` stands
beside it; everywhere else it is refused, and the error names the nearest known key. A value out of
its range is refused with the range and the nearest valid value. All errors are reported at once.
[stopping.md](stopping.md) describes what ends a turn, and the further forms that are read.

**Precedence**: the turn's value, then the session's, the graph's, the model's in the configuration,
the recommendation of the GGUF file (`general.sampling.*`), the built-in default. The call
`parameters` returns each value in force and where it was set. If values contradict each other, it
and the metadata (`adjusted`) have the value that is used instead.

Only the operator sets *model* parameters, except that a client may request a smaller `ctx-size`.
*Context* parameters apply to a context, *request* parameters to a context or a turn.
""".splitlines()

_OUTSIDE_INTRODUCTION = """\
## Keys that have no effect

Other runtimes have these keys. They are reported as `ignored`, or refused with the reason where
`strict` is set.

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
    kind = _WORDS.get(p.kind, p.kind)
    return p.name, p.level, ", ".join(p.aliases), kind, default, bounds, p.doc


def _line(p: Parameter) -> str:
    name, _, _, kind, default, bounds, meaning = columns(p)
    shown = f"`{default}`".replace("|", "\\|")
    return f"| `{name}` | {_code(p.aliases)} | {kind} | {shown} | {bounds} | {meaning} |"


def _outside() -> Iterator[str]:
    for reason in dict.fromkeys(OUTSIDE.values()):
        yield f"| {_code(k for k, why in OUTSIDE.items() if why == reason)} | {reason} |"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
