"""The forms of answers that most tests of parsers and grammars use, by name."""

from __future__ import annotations

from enum import StrEnum


class ToolFormat(StrEnum):
    NONE = "none"
    HERMES = "hermes"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral-args"
    LLAMA = "llama"
    FUNCTIONARY = "functionary"
    FUNCTION_TAGS = "function-tags"
    JSON = "json"
