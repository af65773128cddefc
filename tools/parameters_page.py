"""The page docs/parameters.md, made from the table of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from inferd.backends.params.other_runtimes import IGNORED_KEYS, REFUSED_KEYS
from inferd.backends.params.parameter_table import PARAMETERS, Parameter, columns

__all__ = ("page",)


def page() -> str:
    """Return the text of docs/parameters.md."""
    ignored = *_IGNORED_INTRODUCTION, *_rows(IGNORED_KEYS)
    refused = *_REFUSED_INTRODUCTION, *_rows(REFUSED_KEYS)
    return "\n".join([*_INTRODUCTION, *_tables(), *ignored, *refused, ""])


_INTRODUCTION = """\
# Parameters

`make docs` writes this page from the table in `backends/params/parameter_table.py`, and the same
parameters as a JSON schema: [parameters.schema.json](parameters.schema.json).

Parameters are set in the configuration (`[defaults]`, `[models.NAME]`), in JSON (`set_input` at
index 1, `config`, `builders[1]`) and in `options`. `_` and `-` are equivalent. The second column
has other spellings that are read: those of llama-server, WasmEdge and apuslabs/wasi_nn_backend. The
nested objects of the latter are read too (`model`, `sampling`, `stopping`, `memory`,
`memory_policy`, `memory_management`, `performance`, `backend`, `logging`;
`sampling.dynatemp.range` is `dynatemp-range`).

In JSON an unknown key has no effect and is reported as `ignored`, unless `"strict": true` stands
beside it; everywhere else it is refused, and the error names the nearest known key. A value out of
its range is refused with the range and the nearest valid value. In JSON that is not strict, another
value is used and reported as `adjusted`: for −1 the configured default, for an `n-predict` of −2
the rest of the context (without `ctx-shift`), for an `n-gpu-layers` of −2 as many as fit, else the
nearest valid one. That includes the numbers in `logit-bias`, `tensor-split` and `lora`. There
`pooling-type`, `cache-type-k`, `cache-type-v`, `numa` and `rope-scaling-type` may be llama.cpp's
numbers, and `flash-attn` may be `enabled` or `disabled`. Everywhere, a `seed` is taken modulo 2^32,
and all errors are reported at once. Tokens outside the vocabulary are left out of `logit-bias`, and
`adjusted` names them. In `run_inference`, as in wasi_nn_backend, −1 means the configured default of
every number, also where the table has another meaning.
[stopping.md](stopping.md) describes what ends a turn, and the further forms that are read.

**Precedence**: the turn's value, then the session's, the graph's, the model's in the configuration,
the recommendation of the GGUF file (`general.sampling.*`), the built-in default. The call
`parameters` returns each value in force and where it was set. If values contradict each other, it
and the metadata (`adjusted`) have the value that is used instead.

The operator sets *model* parameters. A client may request a smaller `ctx-size`, and `keep-alive`.
A larger `ctx-size`, `n-gpu-layers`, `main-gpu`, `tensor-split` and `mmproj` (a file in the models
directory, or beside the model's) hold if its call loads the model and the configuration does not
set them.
*Context* parameters apply to a context, *request* parameters to a context or a turn.

""".splitlines()

_IGNORED_INTRODUCTION = """\
## Keys that have no effect

Other runtimes have these keys. They are reported as `ignored`, or refused with the reason where
`strict` is set.

| keys | why |
|---|---|""".splitlines()


_REFUSED_INTRODUCTION = """
## Keys that are refused

An answer would be wrong without the values of these keys. They are refused with
`UnsupportedOperation`, unless the value is false or empty.

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


def _line(p: Parameter) -> str:
    name, _, _, kind, default, bounds, meaning = columns(p)
    shown = f"`{default}`".replace("|", "\\|")
    return f"| `{name}` | {_code(p.aliases)} | {kind} | {shown} | {bounds} | {meaning} |"


def _rows(keys: Mapping[str, str]) -> Iterator[str]:
    for reason in dict.fromkeys(keys.values()):
        yield f"| {_code(k for k, why in keys.items() if why == reason)} | {reason} |"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
