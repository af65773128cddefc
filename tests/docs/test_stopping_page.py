"""The page on stop conditions names the calls whose text differs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "stopping.md"


def test_the_page_names_the_outputs_that_end_with_a_special_tokens_name() -> None:
    """`tests/daemon/test_real_models.py` shows the difference between `get_output` and a chat."""
    [rule] = re.findall(r"^- \*\*The delivery[^-]*(?:\n  .*)*", PAGE.read_text(), re.MULTILINE)
    [sentence] = [s for s in rule.split(". ") if "append" in s]
    assert {"get_output", "get_output_single", "compute"} <= set(re.findall(r"`(\w+)`", sentence))
