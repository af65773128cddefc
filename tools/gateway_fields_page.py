"""The page docs/gateway-fields.md, from the tables by which the gateway reads requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inferd.backends.params import BY_SPELLING
from inferd.gateways.http.fields import IN_QUERY, OTHER_SERVERS, Field, FieldTable
from inferd.gateways.http.limits import (
    BODY_BYTES_MAX,
    BODY_BYTES_MAX_BY_PATH,
    TENSORS_BYTES_MAX,
)
from inferd.gateways.http.server import APIS

__all__ = ("page",)

_HEAD = """# Fields of the HTTP gateway's requests

`make docs` writes this page from the tables in `gateways/http/`. [gateway.md](gateway.md)
describes the gateway.

- **honoured**: the field has its effect; a name in parentheses is the [parameter](parameters.md)
  that it sets.
- **refused**: the field would change the answer, and the request gets 400 with the field's name.
- **ignored**: the field has no effect on the answer; the header `inferd-ignored` names it.

A null counts as absent, also within a field, and so do the values that a table names as neutral.
A whole number may be written as a float. A field that a table does not list is, where the table
says so, a parameter of docs/parameters.md such as `top_k` or `grammar`, or one of the
[fields of other servers](#fields-of-other-servers). Any other field is ignored. With
`--unknown-fields refuse` it is refused by name, as are the ignored fields of other servers. On the
paths of `/v1/inferd/` unknown fields are always refused.

## Bodies

A longer body gets 413. `--body-bytes-max` lowers these limits. On paths with lists of texts, each
text has the limit of the other paths. On paths with images and sounds, the rest of the request has
it.

| path | bytes |
|---|---|
"""

_OTHERS = """
## Fields of other servers

The paths that generate text for OpenAI's and Anthropic's clients know these fields of llama-server,
vLLM, SGLang and other servers, unless their own table has one of the same name.

"""


def page() -> str:
    """Return the page."""
    limits = {
        **{f"`{path}`": size for path, size in BODY_BYTES_MAX_BY_PATH.items()},
        "`/v2/models/{model}/infer`, also of a version": TENSORS_BYTES_MAX,
        "others": BODY_BYTES_MAX,
    }
    parts = [_HEAD, *(f"| {path} | {size} |\n" for path, size in limits.items())]
    for api in filter(lambda api: api.tables, APIS):
        parts.append(f"\n## {api.title}\n")
        parts += [_section(table) for table in api.tables if table.fields]
    parts.append(_OTHERS + _rows(OTHER_SERVERS))
    return "".join(parts)


def _section(table: FieldTable[Any]) -> str:
    rest = "| others | honoured | parameters of [parameters.md](parameters.md) |\n"
    path = table.path.replace(":path}", "}")
    title = f"`{path}`" if table.method == "POST" else f"`{table.method} {path}`"
    title += ", in the query" if table.method in IN_QUERY else ""
    return f"\n### {title}\n\n{_rows(table.fields)}" + (rest if table.parameters else "")


def _rows(fields: Sequence[Field]) -> str:
    head = "| field | | meaning |\n|---|---|---|\n"
    return head + "".join(_row(field) + "\n" for field in fields)


def _row(field: Field) -> str:
    note = field.note
    if field.option.replace("_", "-") in BY_SPELLING:
        note = f"{note} (`{field.option}`)".strip()
    if field.neutral:
        values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.neutral)
        note = f"{note}; neutral: {values}"
    return f"| `{field.name}` | {field.use} | {note} |"
