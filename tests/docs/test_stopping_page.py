"""The page on stop conditions names the calls whose text differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.params import read_options

PAGE = Path(__file__).parents[2] / "docs" / "stopping.md"


def test_the_page_names_the_outputs_that_end_with_a_special_tokens_name() -> None:
    """`tests/daemon/test_real_models.py` shows the difference between `get_output` and a chat."""
    [rule] = re.findall(r"^- \*\*The delivery[^-]*(?:\n  .*)*", PAGE.read_text(), re.MULTILINE)
    [sentence] = [s for s in rule.split(". ") if "append" in s]
    assert {"get_output", "get_output_single", "compute"} <= set(re.findall(r"`(\w+)`", sentence))


@pytest.mark.process
@pytest.mark.parametrize("threshold", [0, 1, -0.1, 1.5, 0.5])
def test_a_threshold_is_accepted_within_the_bounds_of_the_page(threshold: float) -> None:
    text = PAGE.read_text()
    kinds = set(re.findall(r'`semantic_conditions: \[\{type: "(\w+)"', text))
    assert len(kinds) == 4 and "greater than 0 and less than 1" in text
    for kind in kinds:
        condition = {"type": kind, "text": "a", "threshold": threshold}
        document = {"stopping": {"semantic_conditions": [condition]}}
        if 0 < threshold < 1:
            assert read_options(document, strict=True).ignored == []
        else:
            with pytest.raises(InvalidArgument, match="between 0 and 1"):
                read_options(document)
