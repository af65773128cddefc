"""The scenarios of the bench, in the order of the page."""

from __future__ import annotations

from . import decode, long_prompt, pipeline, prefix, returning, sessions, swap, urgent
from .base import Scenario

__all__ = ("SCENARIOS", "Scenario")

SCENARIOS: dict[str, Scenario] = {
    module.SCENARIO.name: module.SCENARIO
    for module in (decode, prefix, urgent, long_prompt, sessions, returning, swap, pipeline)
}
