"""Checks of instructor: objects from answers."""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # this file has the name of the package
import instructor
from checks import KEY, MODEL, URL, run_checks
from openai import OpenAI
from pydantic import BaseModel

KEYWORDS = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Paris is in France."}],
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 0,
}


class City(BaseModel):
    """A city in a country."""

    name: str
    country: str


def found_by(mode: instructor.Mode, **more: object) -> object:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)
    found = client.chat.completions.create(**KEYWORDS, response_model=City, **more)
    assert isinstance(found, City)
    return found


def by_tool() -> object:
    """object by a call of a tool"""
    return found_by(instructor.Mode.TOOLS)


def by_schema() -> object:
    """object by a JSON schema"""
    return found_by(instructor.Mode.JSON_SCHEMA)


def partial() -> object:
    """streamed object, part by part"""
    client = instructor.from_openai(
        OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(client.chat.completions.create_partial(**KEYWORDS, response_model=City))
    assert len(parts) > 1
    return f"{len(parts)} parts, the last one {parts[-1]!r}"


run_checks(by_tool, by_schema, partial)
