"""The tables of keys in docs/wasi-nn.md, made from the rows of `tools/reference_keys`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tools.reference_keys import TOPICS, Row, places_of

__all__ = ("PAGE", "page")

PAGE = Path(__file__).parent.parent / "docs" / "wasi-nn.md"
_BEGIN, _END = "<!-- keys: written by `make docs` -->\n", "<!-- end of keys -->\n"


def page() -> str:
    """Return the text of docs/wasi-nn.md with current tables of keys."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"{PAGE.name} has no place for the keys"
    return "".join((before, _BEGIN, "\n", "\n".join(_tables()), _END, after))


def _tables() -> Iterator[str]:
    for topic, rows in TOPICS.items():
        yield f"### {topic}\n"
        yield "| key | of | value | here | deviation | test |"
        yield "|---|---|---|---|---|---|"
        for name, row in rows.items():
            cells = _key(name), _systems(name), _code(row.value), _here(row), row.deviation
            yield f"| {' | '.join(cells)} | `test_a_key[{name}]` |"
        yield ""


def _key(name: str) -> str:
    """Return a key as the first system that has it writes it, or its name within an object."""
    _, place, key = places_of(name)[0]
    return f"`{key}`" if "." not in place else f"`{place}.{key}`"


def _systems(name: str) -> str:
    found = []
    for system, places in groupby(places_of(name), key=lambda place: place[0]):
        objects = ", ".join(place for _, place, _ in places)
        found.append(f"{system}: {objects}" if system == "B" else system)
    return ", ".join(found)


def _here(row: Row) -> str:
    if row.effect in ("ignored", "refused"):
        return row.effect
    return (
        row.effect
        + " "
        + ", ".join(
            f"`{name}`" if value == row.value else f"`{name}`: {_code(value)}"
            for name, value in row.used.items()
        )
    )


def _code(value: object) -> str:
    if isinstance(value, float):
        value = round(value, 4)
    return f"`{json.dumps(value, ensure_ascii=False)}`"
