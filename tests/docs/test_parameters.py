"""docs/parameters.md and its schema match the table of parameters; the table is consistent."""

from __future__ import annotations

import json
import re

import pytest

from inferd.backends.params import (
    BY_NAME,
    BY_SPELLING,
    IGNORED_KEYS,
    PARAMETERS,
    REFUSED_KEYS,
    Parameter,
    read_options,
)
from inferd.backends.params.parameter_table import json_schema
from inferd.daemon.config.access_settings import ACCESS_KEYS
from inferd.daemon.config.settings import SETTINGS
from tools.docs import pages


def test_the_pages_are_current() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"run `make docs`: {path.name} is old"


def test_no_spelling_means_two_things() -> None:
    spellings = [s for p in PARAMETERS for s in (p.name, *p.aliases)]
    assert len(spellings) == len(set(spellings)) == len(BY_SPELLING)
    assert not set(spellings) & {*IGNORED_KEYS, *REFUSED_KEYS}
    assert not set(IGNORED_KEYS) & set(REFUSED_KEYS)


def test_the_reasons_of_keys_without_effect_name_settings_that_exist() -> None:
    named = {n for why in IGNORED_KEYS.values() for n in re.findall(r"`([a-z-]+)`", why)}
    known = {*SETTINGS, *ACCESS_KEYS, *BY_NAME, "embed"}
    assert len(named) > 10 and named <= known, named - known


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: p.name)
def test_a_default_is_a_valid_value_and_in_the_schema(parameter: Parameter) -> None:
    if parameter.default is not None:
        read = read_options({parameter.name: parameter.default}, strict=True).values
        assert read == {parameter.name: parameter.default}
    schema = json_schema()["properties"][parameter.name]
    assert schema["default"] == parameter.default
    assert json.loads(json.dumps(schema)) == schema
