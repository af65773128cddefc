"""The priority classes have the same names, in the same order, everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from inferd.gateways.fleet.routing.loads import CLASSES, NONE, ByClass
from inferd.gateways.http.fields import PRIORITY_FIELD
from inferd.ipc.names import Priority as PriorityName
from inferd.scheduler import Priority

ROOT = Path(__file__).parents[2]
NAMES = tuple(priority.label for priority in sorted(Priority))
OTHER_LANGUAGES = {
    "clients/typescript/src/types.ts": r"type Priority = (.*);",
    "gateways/http/web_page/files/settings.js": r"const PRIORITIES = \[(.*)\];",
}
"""By file, the line with all names."""


def test_the_protocol_has_the_schedulers_classes() -> None:
    assert get_args(PriorityName) == NAMES


def test_a_fleet_counts_each_class() -> None:
    assert CLASSES == NAMES
    assert len(get_args(ByClass)) == len(NONE) == len(NAMES)


def test_the_gateways_fields_name_each_class() -> None:
    assert tuple(re.findall("`(.*?)`", PRIORITY_FIELD.note)) == NAMES


@pytest.mark.parametrize("file", OTHER_LANGUAGES)
def test_programs_in_other_languages_name_each_class(file: str) -> None:
    (line,) = re.findall(OTHER_LANGUAGES[file], (ROOT / file).read_text())
    assert tuple(re.findall('"(.*?)"', line)) == NAMES
