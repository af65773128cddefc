"""Regular expressions of ECMA 262 as GBNF for the text of a JSON string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from .rules import DEPTH_MAX, Rules, either, refusal, sequence

__all__ = ("LENGTH_MAX", "Matched", "matched")

LENGTH_MAX = 10_000
"""Characters of a string that a bound may ask for."""
PATTERN_CHARACTERS_MAX = 2000
_GROUPS_MAX = DEPTH_MAX // 3

Span = tuple[int, int]
Spans = Sequence[Span]

_DIGIT: Spans = [(48, 57)]
_WORD: Spans = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Spans = [(9, 10), (13, 13), (32, 32)]
_ASCII_SPACE: Spans = [(9, 13), (28, 32)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_LEFT_OUT = {"D": _DIGIT, "W": _WORD, "S": _ASCII_SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_NO_LINE: Spans = [(10, 10), (13, 13), (0x2028, 0x2029)]
_ALL: Spans = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
_ASCII: Spans = [(32, 126)]
"""What is not in a class is sought here where dialects differ on what is: é is a letter to some."""
_PLAIN: Spans = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF)]
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}


@dataclass(frozen=True, slots=True)
class Matched:
    """GBNF, and how many characters it stands for; None: any number. An *item* is one symbol."""

    text: str
    low: int
    high: int | None
    item: bool = False


def matched(rules: Rules, pattern: str, path: str) -> Matched:
    """Return what holds a match of *pattern*: a whole string where it has `^` and `$`.

    :raises InvalidArgument: it is none, or more than a grammar can say.
    """
    return _Reader(rules, pattern, path).whole()


def _among(span: Span, spans: Spans) -> Iterable[Span]:
    for low, high in spans:
        if max(low, span[0]) <= min(high, span[1]):
            yield max(low, span[0]), min(high, span[1])


def _both(a: Spans, b: Spans) -> list[Span]:
    return [part for span in a for part in _among(span, b)]


def _without(spans: Spans, others: Spans) -> list[Span]:
    """Return what *others* leave of a few *spans*."""
    left = []
    cuts = sorted(others)
    for begin, end in spans:
        for low, high in cuts:
            if begin < low <= end:
                left.append((begin, low - 1))
            begin = max(begin, high + 1) if low <= end else begin
        if begin <= end:
            left.append((begin, end))
    return left


def _code(point: int) -> str:
    if point < 0x80:
        return f"\\x{point:02X}"
    return f"\\u{point:04X}" if point <= 0xFFFF else f"\\U{point:08X}"


def _class(spans: Spans) -> str:
    parts = (_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in sorted(set(spans)))
    return f"[{''.join(parts)}]"


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, rules: Rules, pattern: str, path: str):
        self._rules, self._pattern, self._path = rules, pattern, path
        self._at = self._open = 0
        if len(pattern) > PATTERN_CHARACTERS_MAX:
            most = f"{PATTERN_CHARACTERS_MAX} at most"
            raise refusal(path, f"a pattern of {len(pattern)} characters; {most}", "shorten it")

    def _refuse(
        self, why: str, hint: str = "say it with characters, classes and groups"
    ) -> NoReturn:
        raise refusal(self._path, f"pattern {self._pattern[:80]!r} at {self._at}: {why}", hint)

    @property
    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _takes(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def whole(self) -> Matched:
        """Return the pattern: each alternative begins and ends anywhere, but at `^` and `$`."""
        found = [self._anchored()]
        while self._takes("|"):
            found.append(self._anchored())
        if self._next:
            self._refuse(f"{self._next!r} closes nothing")
        return _one_of(found)

    def _anchored(self) -> Matched:
        begins = self._takes("^")
        inner = self._sequence()
        ends = self._takes("$")
        anything = Matched("char*", 0, None)
        return _joined([] if begins else [anything], [inner], [] if ends else [anything])

    def _alternatives(self) -> Matched:
        found = [self._sequence()]
        while self._takes("|"):
            found.append(self._sequence())
        return _one_of(found)

    def _sequence(self) -> Matched:
        parts = []
        while self._next and self._next not in "|)$":
            parts.append(self._quantified(self._atom()))
        return _joined(parts)

    def _quantified(self, part: Matched) -> Matched:
        if not self._next or self._next not in "*+?{":
            return part
        low, high = self._quantifier()
        self._takes("?")  # the shortest first or the longest: it is the same text
        if self._next and self._next in "*+?{":
            self._refuse("two quantifiers on each other")
        if (low, high) == (1, 1):
            return part
        if part.low == 0:
            self._refuse("what may be empty is repeated", "leave it out, or let it be not empty")
        item = part.text if part.item else self._rules.shared(part.text)
        most = None if high is None or part.high is None else part.high * high
        return Matched(self._rules.repeat(item, low, high), part.low * low, most)

    def _quantifier(self) -> tuple[int, int | None]:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return bounds
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : end].partition(",")
        numbers = [n for n in (low, high) if n]
        if end < 0 or not low or not all(n.isascii() and n.isdecimal() for n in numbers):
            self._refuse("no quantifier", r"write it as {2}, {2,} or {2,5}; a bracket itself is \{")
        if any(len(n) > 5 or int(n) > LENGTH_MAX for n in numbers):
            self._refuse(f"more than {LENGTH_MAX} times", "ask for fewer")
        self._at = end + 1
        least = int(low)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            self._refuse("the least is above the most")
        return least, most

    def _atom(self) -> Matched:
        if self._takes("("):
            return self._group()
        if self._takes("["):
            return self._bracket()
        if self._takes("."):
            return self._character(_without(_ALL, _NO_LINE))
        if self._takes("\\"):
            return self._character(self._escape())
        if self._next in ("^", "*", "+", "?", "{", "}", "]"):
            self._refuse(f"{self._next!r} here", f"a character itself is \\{self._next}")
        point = ord(self._next)
        self._at += 1
        return self._character([(point, point)])

    def _group(self) -> Matched:
        if self._takes("?"):
            named = self._pattern.startswith("<", self._at) and self._pattern[
                self._at + 1 : self._at + 2
            ] not in ("=", "!")
            if named:
                self._at = max(self._at, self._pattern.find(">", self._at)) + 1
            elif not self._takes(":"):
                self._refuse(
                    "a group that looks around or sets flags", "say it without (?=, (?!, (?i"
                )
        self._open += 1
        if self._open > _GROUPS_MAX:
            self._refuse(f"more than {_GROUPS_MAX} groups in each other")
        inner = self._alternatives()
        if not self._takes(")"):
            self._refuse("`$` inside a group" if self._next == "$" else "a group is not closed")
        self._open -= 1
        return Matched(self._rules.shared(inner.text), inner.low, inner.high, item=True)

    def _escape(self) -> Spans:
        """Return what an escape stands for, behind its backslash."""
        sign = self._next
        self._at += 1
        if sign in _CLASSES and sign:
            return _CLASSES[sign]
        if sign in _LEFT_OUT and sign:
            return _without(_ASCII, _LEFT_OUT[sign])
        if sign in _CONTROLS and sign:
            return [(_CONTROLS[sign], _CONTROLS[sign])]
        if sign in ("x", "u"):
            return self._hexadecimal(2 if sign == "x" else 4)
        if not sign or sign.isalnum():
            self._at -= 1
            self._refuse(f"the escape \\{sign}", r"there are \d \w \s \t \n \r \f \v \xHH \uHHHH")
        return [(ord(sign), ord(sign))]

    def _hexadecimal(self, digits: int) -> Spans:
        text = self._pattern[self._at : self._at + digits]
        if len(text) < digits or set(text) - set("0123456789abcdefABCDEF"):
            self._refuse(f"an escape without its {digits} hexadecimal digits")
        self._at += digits
        return [(int(text, 16), int(text, 16))]

    def _bracket(self) -> Matched:
        negated, spans, broad = self._takes("^"), list[Span](), False
        while not self._takes("]"):
            if not self._next:
                self._refuse("a class is not closed")
            first, known = self._in_bracket()
            broad = broad or known
            if (
                not known
                and self._pattern[self._at : self._at + 1] == "-"
                and (self._pattern[self._at + 1 : self._at + 2] not in ("]", ""))
            ):
                self._at += 1
                last, known = self._in_bracket()
                if known or last[0][0] < first[0][0]:
                    self._refuse("a range that runs backwards or to a class")
                first = [(first[0][0], last[0][0])]
            spans += first
        if negated:
            spans = _without(_ASCII if broad else _ALL, spans)
        return self._character(spans)

    def _in_bracket(self) -> tuple[Spans, bool]:
        """Return what stands next in a class, and whether it is a class itself."""
        if not self._takes("\\"):
            point = ord(self._next)
            self._at += 1
            return [(point, point)], False
        sign = self._next
        if sign == "b":
            self._at += 1
            return [(8, 8)], False
        if sign in ("D", "W", "S"):
            self._refuse(f"\\{sign} in a class", "write the characters that may stand there")
        return self._escape(), sign in ("d", "w", "s")

    def _character(self, spans: Spans) -> Matched:
        """Return one character of *spans*, as it stands in a JSON string."""
        plain = _both(spans, _PLAIN)
        parts = [_class(plain)] if plain else []
        parts += [_json(point) for point in sorted(_SHORT) if _both(spans, [(point, point)])]
        if not parts:
            points = [
                p for low, high in _both(spans, [(0, 31), (127, 127)]) for p in range(low, high + 1)
            ]
            parts = [_json(point) for point in points]
        if not parts:
            self._refuse("a class without characters")
        text = parts[0] if len(parts) == 1 and plain else self._rules.shared(" | ".join(parts))
        return Matched(text, 1, 1, item=True)


def _json(point: int) -> str:
    """Return the escape of a character in a JSON string, as a GBNF literal."""
    escaped = _SHORT.get(point, f"u{point:04x}")
    return '"\\\\' + ("\\" if escaped in '"\\' else "") + escaped + '"'


def _joined(*parts: Sequence[Matched]) -> Matched:
    found = [one for part in parts for one in part]
    highs = [one.high for one in found]
    high = None if None in highs else sum(h for h in highs if h is not None)
    text = sequence(*(one.text for one in found))
    return Matched(text, sum(one.low for one in found), high)


def _one_of(found: Sequence[Matched]) -> Matched:
    if len(found) == 1:
        return found[0]
    highs = [one.high for one in found]
    high = None if None in highs else max(h for h in highs if h is not None)
    text = either(one.text for one in found)
    return Matched(text, min(one.low for one in found), high)
