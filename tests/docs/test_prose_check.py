"""The check of prose finds its patterns, and nothing in text that follows the rules."""

from __future__ import annotations

import pytest

from tools.check_prose import markdown_findings, python_findings

WRONG = {
    "headless": '"""What a worker is told."""',
    "opening verb": 'def f():\n    """Tell whether it runs."""',
    "negation": 'raise ValueError(f"{name} is no model of the registry")',
    "comment over two lines": "# Memory that is reckoned\n# before a load.\nx = 1",
    "name of a function": "def reckon_size() -> int: ...",
    "name of an attribute": "class A:\n    def f(self):\n        self.former = 1",
    "person": '"""Return the user\'s quota, if he has one."""',
}
RIGHT = [
    '"""Admission of requests to models that share memory."""',
    'def f():\n    """Return whether the model is loaded. There is no limit."""',
    'text = "What is the weather?"',
    "# The worker no longer answers; `what` is a name.\nx = 1",
]


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_a_pattern_of_the_rules_is_found(source: str) -> None:
    assert list(python_findings("x.py", source))


@pytest.mark.parametrize("source", RIGHT)
def test_text_that_follows_the_rules_passes(source: str) -> None:
    assert not list(python_findings("x.py", source))


def test_markdown_is_read_outside_code_and_cell_by_cell() -> None:
    page = "# Title\n\nGood text.\n\n```\nWhat is code\n```\n\n| name | What it is |\n"
    assert [f.line for f in markdown_findings("x.md", page)] == [9]
