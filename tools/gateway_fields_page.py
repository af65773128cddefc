"""The page docs/gateway-fields.md, from the tables by which the gateway reads requests."""

from __future__ import annotations

from typing import Any

from inferd.backends.params import BY_SPELLING
from inferd.gateways.http.apis import APIS
from inferd.gateways.http.fields import Field, FieldTable, Use
from inferd.gateways.http.limits import BODY_BYTES_MAX, BODY_BYTES_MAX_BY_PATH

__all__ = ("page",)

_HEAD = """# Fields of the HTTP gateway's requests

`make docs` writes this page from the tables in `gateways/http/`. [gateway.md](gateway.md)
describes the gateway.

- **honoured**: the field has its effect; a name in parentheses is the [parameter](parameters.md)
  that it sets.
- **refused**: a request with the field gets 400 and the field's name, unless its value asks for
  nothing.
- **ignored**: the field has no effect on the answer.

A field with the value null counts as absent. A field that a table does not list is refused by name
or, where the table says so, a parameter of docs/parameters.md such as `top_k` or `grammar`.

## Bodies

A longer body gets 413. `--body-bytes-max` lowers these limits. On paths with lists of texts, each
text has the limit of the other paths.

| path | bytes |
|---|---|
"""


def page() -> str:
    """Return the page."""
    limits = {
        **{f"`{path}`": size for path, size in BODY_BYTES_MAX_BY_PATH.items()},
        "others": BODY_BYTES_MAX,
    }
    parts = [_HEAD, *(f"| {path} | {size} |\n" for path, size in limits.items())]
    for api in filter(lambda api: api.tables, APIS):
        parts.append(f"\n## {api.title}\n")
        parts += [_section(table) for table in api.tables if table.fields]
    return "".join(parts)


def _section(table: FieldTable[Any]) -> str:
    rows = [_row(field) for field in table.fields]
    if table.parameters:
        rows.append("| others | honoured | parameters of [parameters.md](parameters.md) |")
    head = "| field | | meaning |\n|---|---|---|\n"
    path = table.path.replace(":path}", "}")
    title = f"`GET {path}`, in the query" if table.method == "GET" else f"`{path}`"
    return f"\n### {title}\n\n{head}" + "\n".join(rows) + "\n"


def _row(field: Field) -> str:
    note = field.note
    if field.option.replace("_", "-") in BY_SPELLING:
        note = f"{note} (`{field.option}`)".strip()
    if field.use is Use.REFUSED and field.permitted:
        values = ", ".join(f"`{value!r}`".replace("'", '"') for value in field.permitted)
        note = f"{note}; {values} is accepted"
    return f"| `{field.name}` | {field.use} | {note} |"
