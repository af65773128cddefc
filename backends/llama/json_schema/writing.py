"""From flat schemas to rules: what fits each of them, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ...errors import InvalidArgument
from . import numbers
from .comparing import apart, range_of, types_of_value
from .formats import FORMATS
from .keywords import TYPES, types_of
from .merging import Flat, Flattener, encode, required_of, schema_of
from .patterns import LENGTH_MAX, matched
from .rules import DEPTH_MAX, Rules, either, literal, refusal, sequence

__all__ = ("Writer",)

ITEMS_MAX = 1000
PROPERTIES_MAX = 256
_SEPARATOR = 'ws "," ws'
_KEY: list[tuple[int, int]] = [
    (0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0xA0, 0xD7FF), (0xE000, 0x10FFFF)
]  # fmt: skip
"""Characters of a key that is not named: none needs an escape."""

Body = tuple[str, frozenset[str]]
"""What an alternative says, and the rules that it cannot do without."""


def _body(text: str, *needs: str) -> Body:
    return text, frozenset(needs)


class Writer:
    """Writes the rules of one *document*'s schemas: one for each schema, however often it is
    referred to.
    """

    def __init__(self, document: Any):
        self.rules = Rules()
        self._flattener = Flattener(document, lambda a, b: apart(self._flattener, a, b))
        self._names: dict[bytes, str | None] = {}
        self._paths: dict[str, str] = {}
        self._within: set[str] = set()
        """Rules that a schema refers to from within itself."""
        self._depth = 0

    def rule(self, schema: Any, path: str) -> str | None:
        """Return the name of the rule of what fits *schema*; None if nothing does.

        :raises InvalidArgument: it says more than a grammar can.
        """
        key = encode(schema)
        if key in self._names:
            known = self._names[key]
            self._within.add(known or "")
            return known
        self._names[key] = name = self.rules.reserve()
        self._paths[name] = path
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise refusal(path, f"deeper than {DEPTH_MAX} in each other", "make it flatter")
        bodies = [
            body for flat in self._flattener.flat(schema, path) for body in self._bodies(flat, path)
        ]
        self._depth -= 1
        if not bodies and name in self._within:
            raise _endless(path)
        if not bodies:
            self._names[key] = None
            return None
        self.rules.define(name, bodies)
        return name

    def check_ends(self) -> None:
        """Refuse a schema of which a part has no end.

        :raises InvalidArgument: it needs itself.
        """
        for name in self.rules.endless():
            if name in self._paths:
                raise _endless(self._paths[name])

    def _bodies(self, flat: Flat, path: str) -> Iterator[Body]:
        if "enum" in flat:
            yield from self._values(flat, path)
            return
        for kind in types_of(flat):
            match kind:
                case "null":
                    yield _body('"null"')
                case "boolean":
                    yield _body('"true" | "false"')
                case "integer" | "number":
                    yield from map(_body, self._number(flat, kind == "integer", path))
                case "string":
                    yield from map(_body, self._string(flat, path))
                case "array":
                    yield from self._array(flat, path)
                case _:
                    yield from self._object(flat, path)

    def _values(self, flat: Flat, path: str) -> Iterator[Body]:
        """Return the values of an enum, less those of other types."""
        others = flat.keys() - {"enum", "type"}
        if others:
            names = ", ".join(sorted(others))
            raise refusal(path, f"{names} beside enum or const", "name just the values that fit")
        types = set(flat.get("type", TYPES))
        texts = {_json(value) for value in flat["enum"] if types & types_of_value(value)}
        if texts:
            yield _body(self.rules.one_of(texts))

    def _number(self, flat: Flat, whole: bool, path: str) -> Iterable[str]:
        between, divisor = range_of(flat), flat.get("multipleOf")
        if divisor is not None:
            return self._multiples(int(divisor), divisor, between, path)
        if whole:
            return numbers.integers(between)
        if between == numbers.Range():
            return [numbers.NUMBER]
        if between.digits > numbers.DIGITS_MAX:
            most = f"{numbers.DIGITS_MAX} at most"
            raise refusal(path, f"a bound of {between.digits} digits; {most}", "round it")
        return numbers.numbers(between)

    def _multiples(
        self, divisor: int, asked: float, between: numbers.Range, path: str
    ) -> Iterable[str]:
        found = numbers.multiples(self.rules, divisor, between) if divisor == asked else None
        if found is None:
            raise refusal(
                f"{path}/multipleOf",
                f"the multiples of {asked} in this range cannot be told by a grammar",
                f"use a whole number of {numbers.DIVISOR_MAX} at most without bounds, or bounds"
                f" between which there are {numbers.MULTIPLES_MAX} at most",
            )
        return found

    def _string(self, flat: Flat, path: str) -> Iterable[str]:
        low, high = flat.get("minLength", 0), flat.get("maxLength")
        if "pattern" in flat or "format" in flat:
            return [self._patterned(flat, low, high, path)]
        if high is not None and high < low:
            return []
        if low > LENGTH_MAX or (high or 0) > LENGTH_MAX:
            raise refusal(path, f"a length of more than {LENGTH_MAX} characters", "ask for less")
        return [sequence(r'"\""', self.rules.repeat("char", low, high), r'"\""')]

    def _patterned(self, flat: Flat, low: int, high: int | None, path: str) -> str:
        if "pattern" in flat and "format" in flat:
            raise refusal(path, "a pattern beside a format", "use one of both")
        if "format" in flat and flat["format"] not in FORMATS:
            known = ", ".join(FORMATS)
            raise refusal(
                f"{path}/format", f"no grammar for {flat['format'][:50]!r}", f"there are {known}"
            )
        pattern = flat["pattern"] if "pattern" in flat else f"^({FORMATS[flat['format']]})$"
        found = matched(self.rules, pattern, path)
        if found.low < low or (high is not None and (found.high is None or found.high > high)):
            raise refusal(
                path,
                f"a length beside a pattern or format of {found.low} to {found.high} characters",
                "say the length in the pattern, by quantifiers, and leave minLength, maxLength out",
            )
        return sequence(r'"\""', self.rules.shared(found.text), r'"\""')

    # Arrays.

    def _array(self, flat: Flat, path: str) -> Iterator[Body]:
        low, high = flat.get("minItems", 0), flat.get("maxItems")
        if flat.get("uniqueItems") and (high is None or high > 1):
            raise refusal(
                f"{path}/uniqueItems",
                "a grammar cannot remember what was there",
                "use an object with a boolean for each, or leave it out and see to it yourself",
            )
        if max(low, high or 0) > ITEMS_MAX:
            raise refusal(path, f"more than {ITEMS_MAX} items", "ask for fewer")
        if high is not None and high < low:
            return
        first = [
            self.rule(one, f"{path}/prefixItems/{number}")
            for number, one in enumerate(flat.get("prefixItems", ()))
        ][:high]
        rest = flat.get("items", not first or low > len(first))
        item = self.rule(rest, f"{path}/items")
        low, high = max(0, low - len(first)), high if high is None else high - len(first)
        if item is None:
            high = 0
        if None not in first and (item is not None or low == 0):
            yield self._listed([one for one in first if one], item or "", low, high)

    def _listed(self, first: list[str], item: str, low: int, high: int | None) -> Body:
        parts = f" {_SEPARATOR} ".join(first)
        needs = [*first, item] if low else first
        if high == 0:
            return _body(sequence('"[" ws', parts, 'ws "]"'), *needs)
        more = self.rules.shared(f"{_SEPARATOR} {item}")
        if first:
            parts = sequence(parts, self.rules.repeat(more, low, high))
        else:
            most = None if high is None else high - 1
            parts = sequence(item, self.rules.repeat(more, max(0, low - 1), most))
            parts = parts if low else f"({parts})?"
        return _body(sequence('"[" ws', parts, 'ws "]"'), *needs)

    # Objects.

    def _object(self, flat: Flat, path: str) -> Iterator[Body]:
        required = required_of(flat)
        names = [*flat.get("properties", {}), *(n for n in required)]
        found: list[tuple[str, bool]] = []
        needs: list[str] = []
        for name in dict.fromkeys(names):
            value = self.rule(schema_of(flat, name), f"{path}/properties/{name}")
            if value is None and name in required:
                return
            if value is not None:
                pair = self.rules.shared(f'{literal(_json(name))} ws ":" ws {value}')
                found.append((pair, name in required))
                needs += [value] if name in required else []
        if len(found) > PROPERTIES_MAX:
            raise refusal(path, f"{len(found)} properties; {PROPERTIES_MAX} at most", "use fewer")
        extra = self._extra(flat, list(dict.fromkeys(names)), path)
        body = self._members(flat, found, extra, path)
        if body is not None:
            yield _body(sequence('"{" ws', body, 'ws "}"'), *needs)

    def _extra(self, flat: Flat, names: list[str], path: str) -> str | None:
        """Return the rule of a property that is not named; None where there are no others: where
        some are named, others are only if `additionalProperties` says so.
        """
        schema = flat.get("additionalProperties", not names)
        value = self.rule(schema, f"{path}/additionalProperties")
        if value is None:
            return None
        return self.rules.shared(f'"\\"" {self._other_key(names)} "\\"" ws ":" ws {value}')

    def _other_key(self, names: list[str]) -> str:
        """Return a rule of keys that are none of *names*. Keys have no escapes: none is a name in
        disguise.
        """
        plain = [n for n in names if all(any(a <= ord(c) <= b for a, b in _KEY) for c in n)]
        return self._besides(plain, self.rules.shared(_class_without("")))

    def _besides(self, names: list[str], character: str) -> str:
        """Return a rule of texts that are none of *names*, a letter at a time."""
        by_letter: dict[str, list[str]] = {}
        for name in names:
            if name:
                by_letter.setdefault(name[0], []).append(name[1:])
        if not by_letter:
            return self.rules.shared(f"{character}{'+' if '' in names else '*'}")
        parts = [
            f"[{_code(letter)}] {self._besides(tails, character)}"
            for letter, tails in by_letter.items()
        ]
        parts.append(f"{_class_without(by_letter)} {character}*")
        return self.rules.shared(" | ".join(parts) if "" in names else f"| {' | '.join(parts)}")

    def _members(
        self, flat: Flat, found: list[tuple[str, bool]], extra: str | None, path: str
    ) -> str | None:
        """Return the members between the braces, in their order; None if there can be none."""
        low, high = flat.get("minProperties", 0), flat.get("maxProperties")
        required = sum(needed for _, needed in found)
        if high is not None and max(low, required) > high:
            return None
        most = None if high is None else high - len(found)
        if most is not None and most < 0:
            raise refusal(
                f"{path}/maxProperties",
                "a grammar cannot count which of the optional properties are there",
                "let it be the number of properties, or require some",
            )
        if low > max(1, required):
            raise refusal(
                f"{path}/minProperties",
                "a grammar cannot count properties that may be the same",
                f"require them by name: {required} are",
            )
        more = "" if extra is None else self.rules.shared(f"{_SEPARATOR} {extra}")
        rest = self.rules.repeat(more, 0, most) if more and most != 0 else ""
        head = ""
        if more and most != 0:
            head = sequence(
                extra or "", self.rules.repeat(more, 0, None if most is None else most - 1)
            )
        return self._in_order(found, head, rest, empty=low == 0)

    def _in_order(
        self, found: list[tuple[str, bool]], head: str, rest: str, *, empty: bool
    ) -> str | None:
        """Return the *found* members in order, then others: *rest* behind a member, *head* where
        there is none before.
        """
        begin: str | None = (f"({head})?" if empty else head) if head else ("" if empty else None)
        for pair, needed in reversed(found):
            follows = sequence(pair, rest)
            if needed or begin is None:
                begin = follows
            else:
                begin = self.rules.shared(either([follows, begin or '""']))
            behind = sequence(f"{_SEPARATOR} {pair}", rest)
            rest = self.rules.shared(behind if needed else f"{rest} | {behind}".lstrip())
        return begin


def _endless(path: str) -> InvalidArgument:
    why = "it needs itself: nothing that ends fits it"
    return refusal(path, why, "let what leads back not be required, or be null, or a list")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _code(letter: str) -> str:
    return f"\\U{ord(letter):08X}"


def _class_without(letters: Iterable[str]) -> str:
    """Return the class of a key's characters but *letters*."""
    spans = _KEY
    for point in map(ord, letters):
        spans = [
            part
            for low, high in spans
            for part in ((low, min(high, point - 1)), (max(low, point + 1), high))
            if part[0] <= part[1]
        ]
    return f"[{''.join(f'{_code(chr(low))}-{_code(chr(high))}' for low, high in spans)}]"
