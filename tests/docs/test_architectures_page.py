"""docs/architectures.md has a row for each kind of memory that the tests have, and no failure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architectures.checks import CHECKS
from tests.architectures.served import AFTER_A_RESTART, SERVED
from tools.architectures.models import CHOSEN

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "architectures.md").read_text()
ROWS = {
    (architecture, weights): passed
    for architecture, weights, passed in re.findall(
        r"^\| `([\w-]+)` \| (with experts|dense) \|.*?\| (\d+ of \d+) \|", PAGE, re.M
    )
}


@pytest.mark.parametrize("name", CHOSEN)
def test_each_tested_architecture_has_a_row(name: str) -> None:
    architecture, _, weights = name.rpartition("-")
    assert ROWS[architecture, "with experts" if weights == "moe" else "dense"]


def test_nine_of_ten_checks_pass_and_no_other_fails() -> None:
    [share] = re.findall(r"checks pass \(([\d.]+) %\)", PAGE)
    assert float(share) >= 90
    assert "None fails, and none ends a worker's process." in " ".join(PAGE.split())
    assert len(ROWS) >= 128


def test_each_check_is_described() -> None:
    found = set(re.findall(r"^- \*\*(.+?)\*\*: .+", PAGE, re.M))
    assert found == {"load", "estimate", *CHECKS, *SERVED, *AFTER_A_RESTART}
