"""The page docs/protocol.md, whose tables of results come from their structs; its tables and
sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.documented_fields import RESULTS, fields_of

__all__ = ("PAGE", "Field", "Table", "page", "sections", "tables")

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
_MARK = "<!-- `make docs` writes this table -->\n"
_TABLE = re.compile(f"^{_MARK}(\\| (\\w+) .*\n)(\\|.*\n)*", re.MULTILINE)
_NAMES = {"Unix"}
"""Words with a capital at the beginning of a field's documentation."""


def page() -> str:
    """Return the text of docs/protocol.md with current tables of results."""
    return _TABLE.sub(lambda found: _MARK + found[1] + _rows(found[2]), PAGE.read_text())


def _rows(column: str) -> str:
    rows = (
        f"| `{field.name}` | {field.type} | {_cell(field.doc)} |\n"
        for field in fields_of(RESULTS[column])
    )
    return "|---|---|---|\n" + "".join(rows)


def _cell(doc: str) -> str:
    """Return a sentence as a phrase in a table."""
    first, text = doc.split()[0], doc.removesuffix(".").replace("|", "\\|")
    is_name = first in _NAMES or (first.isupper() and len(first) > 1)
    return text if is_name else text[0].lower() + text[1:]


class Field(NamedTuple):
    """A row of a table: a field of a map."""

    name: str
    type: str
    default: str
    meaning: str


class Table(NamedTuple):
    """A table of the page with the heading above it."""

    heading: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def fields(self) -> list[Field]:
        """Return the rows as fields; those without a default are required."""
        return [
            Field(row[0], row[1], row[2] if len(row) == 4 else "required", row[-1])
            for row in self.rows
        ]


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


def sections(page: str) -> dict[str, str]:
    """Return the text of each call's section, by the call's name."""
    parts = re.split(r"^#### (.*)\n", page, flags=re.MULTILINE)
    return {
        name: re.split(r"^##", text, flags=re.MULTILINE)[0]
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
        for name in re.findall(r"`(\w+)`", heading)
    }
