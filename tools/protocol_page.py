"""The tables and sections of docs/protocol.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ("PAGE", "Field", "Table", "sections", "tables")

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"


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
