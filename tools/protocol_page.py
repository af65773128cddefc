"""The page docs/protocol.md, whose tables of fields come from their structs, and its tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from inferd.ipc import messages as w
from tools.documented_fields import STRUCTS, Field, fields_of

__all__ = ("PAGE", "Table", "page", "tables")

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
_MARK = "<!-- `make docs` writes this table -->\n"
_TABLE = re.compile(f"^{_MARK}\\| ([\\w ]+) \\| .*\\n(\\|.*\\n)*", re.MULTILINE)
_NAMES = {"Unix"}
"""Words with a capital at the beginning of a field's documentation."""


def page() -> str:
    """Return the text of docs/protocol.md with current tables of fields."""
    parts = re.split(r"^(#+ .*)$", PAGE.read_text(), flags=re.MULTILINE)
    for i in range(0, len(parts), 2):
        heading = parts[i - 1] if i else ""
        parts[i] = _TABLE.sub(functools.partial(_table, heading), parts[i])
    return "".join(parts)


def _table(heading: str, old: re.Match[str]) -> str:
    """Return the current table in place of the *old* one below a *heading*."""
    column = old[1]
    found = fields_of(STRUCTS.get(column) or _message(heading, column))
    columns = (0, 1, 3) if found[0].default is None else (0, 1, 2, 3)
    lines = ["| " + " | ".join((column, "type", "default", "meaning")[i] for i in columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(row[i] for i in columns) + " |" for row in map(_row, found)]
    return _MARK + "\n".join(lines) + "\n"


def _message(heading: str, column: str) -> type:
    """Return the message of the first call in a *heading*."""
    row = w.CALLS[re.findall(r"`(\w+)`", heading)[0]]
    match column:
        case "params":
            return row.params
        case "result":
            return row.result
        case "event":
            return row.events[0]
        case _:
            return w.QueueEvent


def _row(field: Field) -> tuple[str, str, str, str]:
    default = field.default or ""
    shown = default if default == "required" else f"`{default}`"
    return f"`{field.name}`", field.type, shown, _cell(field.doc)


def _cell(doc: str) -> str:
    """Return a sentence as a phrase in a table."""
    first, text = doc.split()[0], doc.removesuffix(".").replace("|", "\\|")
    is_name = first in _NAMES or (first.isupper() and len(first) > 1)
    return text if is_name else text[0].lower() + text[1:]


class Table(NamedTuple):
    """A table of the page with the heading above it."""

    heading: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(page: str) -> Iterator[Table]:
    """Yield the tables of the page, in their order."""
    heading, lines = "", page.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|---"):
            rows = []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(_cells(row))
            yield Table(heading, _cells(lines[number - 1]), rows)


def _cells(line: str) -> tuple[str, ...]:
    """Return a row's cells. Code in cells before the last one loses its backquotes."""
    *cells, last = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))
    return *(cell.strip("`") for cell in cells), last
