"""The number of repetitions and random examples of tests.

`INFERD_TESTS_FACTOR` multiplies it, for a long run whose random examples also differ each time.
"""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ("FACTOR", "load_profile", "repetitions")

FACTOR = int(os.environ.get("INFERD_TESTS_FACTOR", 1))
EXAMPLES = 100


def repetitions(count: int) -> int:
    """Return *count*, or more in a long run."""
    return count * FACTOR


def load_profile() -> None:
    """Let hypothesis choose the same examples in each run, except in a long one."""
    settings.register_profile("ci", derandomize=True, database=None, deadline=None)
    settings.register_profile("long", max_examples=EXAMPLES * FACTOR, deadline=None)
    settings.load_profile("ci" if FACTOR == 1 else "long")
