"""Upper bounds of the texts that a grammar forces.

llguidance finds all the text that is forced at one place in one call, at 40 ns a byte. With a
literal of 4 kB that is repeated 100 000 times this takes 12 s, in which a worker computes nothing
else. Grammars with such texts are matched without forcing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from .json_schema.document import Schema, resolve

__all__ = ("ForcedText", "forced_by_lark", "forced_by_schema", "together", "with_bounded_texts")

FORCED_BYTES_MAX = 32 << 10
"""Bytes that are forced together, which takes 20 ms if all of them are new."""
LEXEME_BYTES_MAX = 64
"""Bytes of a lexeme where rules contain themselves. Such rules seldom force anything, and
`step_max_items` bounds the text that they force, in 50 ms.
"""
_DEPTH_MAX = 200
"""Rules or schemas within each other; deeper ones count as recursive."""
_REPEATED = re.compile(r"(\\?.)\{(\d{1,6})(?:,(\d{0,6}))?\}")
"""A repetition in a regular expression, with the last character of what is repeated."""
_NUMBERS = re.compile(r"[{~][ \t]*(\d{1,6})(?:(?:,|\.\.)(\d{0,6}))?")
"""A repetition in Lark."""
_STATEMENT = re.compile(r"^[ \t]*[!?]*(_?[a-zA-Z][\w-]*+)[^\s\"/:]*+[ \t]*+:", re.MULTILINE)
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?:\#|//)[^\n]*|_?[a-zA-Z][\w-]*|%\w+', re.ASCII
)
_ANY = (".", "]", "\\d", "\\w", "\\s", "\\D", "\\W", "\\S")


class ForcedText(NamedTuple):
    """The most bytes that can be forced together, and those of the longest lexeme."""

    total: float
    longest: float

    @property
    def bounded(self) -> bool:
        """Whether llguidance finds all of it in a time that other turns can wait."""
        if self.total == math.inf:
            return self.longest <= LEXEME_BYTES_MAX
        return self.total <= FORCED_BYTES_MAX

    def times(self, count: float) -> ForcedText:
        """Return the text repeated *count* times."""
        return ForcedText(self.total * count, self.longest)


NO_FORCED_TEXT = ForcedText(0, 0)
_ENDLESS = ForcedText(math.inf, 0)
_SYMBOLS = ForcedText(8, 8)
"""The text of a value beside its names and constants: brackets and separators, or `null`."""
_UNKNOWN = ForcedText(math.inf, math.inf)
_OWN_TEXTS = frozenset(("$defs", "$ref", "const", "definitions", "pattern"))
"""Keywords whose text is never `_SYMBOLS`, whatever their values are."""
_CONTAINERS = (dict, list)
_encode = msgspec.json.Encoder().encode


def together(parts: Iterable[ForcedText]) -> ForcedText:
    """Return the texts of *parts*, one after the other."""
    total = longest = 0.0
    for part in parts:
        total += part.total
        if part.longest > longest:
            longest = part.longest
    return ForcedText(total, longest)


def _one_of(parts: Iterable[ForcedText]) -> ForcedText:
    """Return an upper bound of the text of one of *parts*, whichever it is."""
    total = longest = 0.0
    for part in parts:
        total, longest = max(total, part.total), max(longest, part.longest)
    return ForcedText(total, longest)


def with_bounded_texts(grammar: str, forced: ForcedText) -> str:
    """Return *grammar*, in llguidance's form; if finding *forced*, the text that it forces, could
    take too long, let it force nothing.
    """
    if forced.bounded:
        return grammar
    option = '\n%llguidance {"no_forcing": true}\n'
    if not grammar.startswith("{"):  # Lark
        return grammar + option
    document = json.loads(grammar)
    first, *others = document["grammars"]
    if first.get("lark_grammar"):
        first["lark_grammar"] += option
    else:
        whole = {"lark_grammar": f"start: @whole{option}"}
        document["grammars"] = [whole, first | {"name": "whole"}, *others]
    return json.dumps(document)


def _lexeme(size: float) -> ForcedText:
    return ForcedText(size, size)


def forced_by_regex(regex: str) -> ForcedText:
    """Return the text that a regular expression forces."""
    size, factor = len(regex.encode()), 1
    for before, least, most in _REPEATED.findall(regex):
        count = max(int(least), int(most or 0))
        if before == ")":
            factor *= max(1, count)
        elif before not in _ANY:
            size += 4 * count
    return _lexeme(size * factor)


def forced_by_schema(document: Schema) -> ForcedText:
    """Return the text that the grammar of a schema forces."""
    return _SchemaTexts(document).of(document)


class _SchemaTexts:
    """The texts that the parts of *document* force."""

    def __init__(self, document: Schema):
        self._document = document
        self._known: dict[int, ForcedText] = {}

    def of(self, schema: object, depth: int = 0) -> ForcedText:
        if not isinstance(schema, dict):
            return _SYMBOLS
        if depth > _DEPTH_MAX:
            return _UNKNOWN
        found = self._known.get(id(schema))
        if found is None:
            self._known[id(schema)] = _ENDLESS  # if it contains itself
            found = self._known[id(schema)] = self._together(schema, depth + 1)
        return found

    def _together(self, schema: Schema, depth: int) -> ForcedText:
        """Return the text of all keywords, as `together` does, but without a call for each one."""
        total, longest = _SYMBOLS
        for keyword, value in schema.items():
            if keyword not in _OWN_TEXTS and not isinstance(value, _CONTAINERS):
                found = _SYMBOLS
            else:
                found = self._of_keyword(schema, keyword, value, depth)
            total += found.total
            if found.longest > longest:
                longest = found.longest
        return ForcedText(total, longest)

    def _of_keyword(self, schema: Schema, keyword: str, value: Any, depth: int) -> ForcedText:
        match keyword, value:
            case (("properties" | "patternProperties" | "dependentSchemas"), dict()):
                return together((_values(value), *[self.of(v, depth) for v in value.values()]))
            case "$ref", _:
                return self.of(resolve(self._document, value), depth)
            case (("items" | "additionalProperties"), dict()):
                counts = schema.get("minItems", 1), schema.get("minProperties", 1)
                numbers = [n for n in counts if isinstance(n, int | float)]
                return self.of(value, depth).times(max([1, *numbers]))
            case "required", list():
                return _values(value)
            case "enum", list():
                return _one_of(map(_value, value))
            case "const", _:
                return _value(value)
            case (("anyOf" | "oneOf"), list()):
                return _one_of([self.of(part, depth) for part in value])
            case "pattern", str():
                return forced_by_regex(value)
            case (("$defs" | "definitions"), _):
                return NO_FORCED_TEXT
            case _, list():
                return together([self.of(part, depth) for part in value])
        return self.of(value, depth)


def _value(value: Any) -> ForcedText:
    """Return the text of a constant; each text within it is a lexeme of its own."""
    if isinstance(value, dict):
        return together(_value(part) for item in value.items() for part in item)
    if isinstance(value, list):
        return together(map(_value, value))
    return _lexeme(len(msgspec.json.encode(value)) + 2)


def _values(values: Iterable[Any]) -> ForcedText:
    """Return the text of several constants; most are names."""
    total = longest = 0.0
    for value in values:
        if isinstance(value, str):
            size: float = len(_encode(value)) + 2
            total += size
        else:
            found = _value(value)
            total, size = total + found.total, found.longest
        if size > longest:
            longest = size
    return ForcedText(total, longest)


def forced_by_lark(lark: str, inner: Iterable[ForcedText]) -> ForcedText:
    """Return the text that a Lark grammar forces; *inner* are the texts that its schemas force."""
    begins = [*_STATEMENT.finditer(lark)]
    rules: dict[str, str] = {}
    for found, after in zip_longest(begins, begins[1:]):
        end = len(lark) if after is None else after.start()
        rules[found[1]] = rules.get(found[1], "") + lark[found.end() : end]
    schemas = together(inner)
    return _LarkTexts(rules, schemas if "%lark" not in lark else _UNKNOWN).of("start", 0)


class _LarkTexts:
    """The texts that *rules* force; each rule may contain the text of *schemas*."""

    def __init__(self, rules: dict[str, str], schemas: ForcedText):
        self._rules, self._schemas = rules, schemas
        self._known: dict[str, ForcedText] = {}

    def of(self, name: str, depth: int) -> ForcedText:
        if name not in self._rules:  # a terminal of `common`, or an option
            return NO_FORCED_TEXT
        if depth > _DEPTH_MAX:
            return _UNKNOWN
        if name not in self._known:
            self._known[name] = _ENDLESS  # if it contains itself
            body = self._rules[name]
            counts = _NUMBERS.findall(re.sub(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/', "", body))
            factor = math.prod(max(1, int(least), int(most or 0)) for least, most in counts)
            found = together(self._part(part, depth) for part in _PARTS.findall(body)).times(factor)
            terminal = name.strip("_").isupper()
            self._known[name] = _lexeme(found.total) if terminal else found
        return self._known[name]

    def _part(self, part: str, depth: int) -> ForcedText:
        match part[0]:
            case '"':
                return _lexeme(len(part.encode()))
            case "/":
                return NO_FORCED_TEXT if part.startswith("//") else forced_by_regex(part)
            case "%":
                return self._schemas
            case "#":
                return NO_FORCED_TEXT
        return self.of(part, depth + 1)
