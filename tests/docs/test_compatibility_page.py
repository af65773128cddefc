"""The page of programs that were run with the gateway has all of them, with their results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.compatibility.environments import PROGRAMS, SCRIPTS, Program

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_each_program_has_a_row_for_each_check(program: Program) -> None:
    [script] = SCRIPTS.glob(f"{program.name}.{'mjs' if program.node else 'py'}")
    rows = re.findall(rf"^\| {re.escape(program.title)} \| [\d.]+ \| (.*?) \| (\w+)", PAGE, re.M)
    assert len(rows) >= 3 and {result for _, result in rows} == {"works"}
    text = script.read_text()
    assert all(check in text for check, _ in rows)


def test_no_other_script_waits_to_be_run() -> None:
    scripts = {path.name for path in SCRIPTS.iterdir() if path.is_file()}
    names = {f"{p.name}.{'mjs' if p.node else 'py'}" for p in PROGRAMS}
    assert scripts == names | {"checks.py", "checks.mjs"}
