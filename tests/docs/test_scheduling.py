"""docs/scheduling.md names existing settings and parameters with their defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from inferd.backends.params import PARAMETERS
from inferd.daemon.config.settings import SETTINGS, Config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scheduling.md").read_text()
ROW = re.compile(r"^\| `([\w-]+)`(?: \((?:model|request)\))? \| ([^|]+) \|", re.MULTILINE)
SIZES = {"8 GiB": 8 << 30}


def defaults() -> dict[str, object]:
    """Return the default of each setting and parameter by name."""
    config = {f.name: f.default for f in dataclasses.fields(Config)}
    found: dict[str, object] = {name: config[name.replace("-", "_")] for name in SETTINGS}
    return {p.name: p.default for p in PARAMETERS} | found


def default_in(cell: str) -> object:
    """Return the text of a table's cell."""
    if cell in SIZES:
        return SIZES[cell]
    if cell == "off":
        return False
    return cell.strip("`") if cell.startswith("`") else int(cell.replace(" ", ""))


def test_every_row_is_a_setting_with_its_default() -> None:
    rows = dict(ROW.findall(PAGE))
    known = defaults()
    assert len(rows) > 15
    worded = {name for name, cell in rows.items() if cell.startswith("an eighth")}
    assert worded == {"kv-ram-bytes"} and known["kv-ram-bytes"] is dataclasses.MISSING
    assert {n: default_in(c) for n, c in rows.items() if n not in worded} == {
        name: known[name] for name in rows if name not in worded
    }
