"""GBNF, llama.cpp's notation of grammars: its parser, and its translation to llguidance's Lark.

It accepts the grammars that llama.cpp accepts (`llama_grammar_parser`, `llama-grammar.cpp`), and
some that llama.cpp refuses: left recursion and repetitions of any size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from string import ascii_letters, digits

from ...errors import InvalidArgument
from ...texts import shorten
from ..formats import Vocabulary

__all__ = (
    "Chars",
    "Choice",
    "Item",
    "Name",
    "Repeat",
    "Rules",
    "Sequence",
    "Token",
    "lark_of",
    "parse_gbnf",
)

BRACKETS_OPEN_MAX = 100
"""Groups within each other; the parser recurses for each one."""
REPEAT_MAX = 1 << 20
_CODE_POINT_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_HINT = 'GBNF begins at the rule `root`, such as: root ::= "yes" | "no"'
_SPACE, _LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME, _NUMBER = re.compile(r"[A-Za-z0-9-]+"), re.compile(r"[0-9]+")
_TOKEN = re.compile(r"!?<(?:\[([0-9]+)\]|([^\[>][^>]*))>")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {c: c for c in '\\"[]-'}


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of the *ranges* of code points, or, if *negated*, any other one."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """One token, given by its number or its name; if *negated*, any other one."""

    value: int | str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Name:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Items one after another; without items, the empty text."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several alternatives."""

    alternatives: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item, repeated at least *least* times, and at most *most* times if that is not None."""

    item: Item
    least: int
    most: int | None


Item = Chars | Token | Name | Sequence | Choice | Repeat
Rules = dict[str, Choice]


def parse_gbnf(text: str) -> Rules:
    """Return the rules of *text* by name.

    :raises InvalidArgument: *text* is not a grammar.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise refusal("there is no 'root' symbol")
    for rule in rules.values():
        for name in references(rule):
            if name not in rules:
                raise refusal(f"Undefined rule identifier {name!r}")
    return rules


def references(item: Item) -> Iterator[str]:
    """Yield the names of the rules that *item* refers to."""
    match item:
        case Name(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from references(part)
        case Repeat(repeated):
            yield from references(repeated)


def refusal(cause: str) -> InvalidArgument:
    """Return the error for a grammar that is refused because of *cause*."""
    return InvalidArgument(f"grammar: {cause}", hint=_HINT)


@dataclass(slots=True)
class _Parser:
    """A recursive-descent parser; `at` is its position in `text`."""

    text: str
    at: int = 0
    nesting: int = 0
    found: Rules = field(default_factory=dict)

    def rules(self) -> Rules:
        """Parse the whole text."""
        self._skip(newlines=True)
        while self.at < len(self.text):
            name = self._match(_NAME, "a rule's name")
            self._skip()
            self._expect("::=")
            self._skip(newlines=True)
            self.found[name] = self._choice()
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self._error("expecting newline or end")
            self._skip(newlines=True)
        return self.found

    def _choice(self) -> Choice:
        alternatives = [self._sequence()]
        while self._takes("|"):
            self._skip(newlines=True)
            alternatives.append(self._sequence())
        return Choice(tuple(alternatives))

    def _sequence(self) -> Sequence:
        items: list[Item] = []
        while (parse := _PARSERS.get(self.text[self.at : self.at + 1] or "end")) is not None:
            parse(self, items)
            self._skip(newlines=self.nesting > 0)
        return Sequence(tuple(items))

    def literal(self, items: list[Item]) -> None:
        """Parse a text in quotes."""
        self.at += 1
        characters = []
        while not self._takes('"'):
            code = self._character()
            characters.append(Chars(((code, code),)))
        items.append(Sequence(tuple(characters)))

    def char_class(self, items: list[Item]) -> None:
        """Parse a class of characters; an empty class is the empty text, as in llama.cpp."""
        self.at += 1
        negated, ranges = self._takes("^"), []
        while not self._takes("]"):
            low = high = self._character()
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self._character()
            if high < low:
                raise self._error("a range of characters runs backwards")
            ranges.append((low, high))
        items.append(Chars(tuple(ranges), negated) if ranges else Sequence(()))

    def any_char(self, items: list[Item]) -> None:
        """Parse the dot."""
        self.at += 1
        items.append(Chars((), negated=True))

    def token(self, items: list[Item]) -> None:
        """Parse a token."""
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            raise self._error("expecting a token, such as <name> or <[7]>")
        self.at = found.end()
        number, name = found.groups()
        items.append(Token(int(number) if number else f"<{name}>", found[0][0] == "!"))

    def name(self, items: list[Item]) -> None:
        """Parse a reference to a rule."""
        items.append(Name(self._match(_NAME, "a name")))

    def group(self, items: list[Item]) -> None:
        """Parse a group in brackets."""
        self.at += 1
        self.nesting += 1
        if self.nesting > BRACKETS_OPEN_MAX:
            raise self._error(f"more than {BRACKETS_OPEN_MAX} brackets are open at once")
        self._skip(newlines=True)
        choice = self._choice()
        if not self._takes(")"):
            raise self._error("expecting ')'")
        self.nesting -= 1
        items.append(choice)

    def repetition(self, items: list[Item]) -> None:
        """Parse `*`, `+`, `?` or `{…}`, which repeats the previous item."""
        if not items:
            raise self._error("expecting preceding item to */+/?/{")
        sign = self.text[self.at]
        self.at += 1
        least, most = _REPETITIONS[sign] if sign != "{" else self._bounds()
        items[-1] = Repeat(items[-1], least, most)

    def _bounds(self) -> tuple[int, int | None]:
        least = self._number()
        most: int | None = least
        if not self._takes("}"):
            self._expect(",")
            self._skip(newlines=self.nesting > 0)
            most = None if self.text.startswith("}", self.at) else self._number()
            self._expect("}")
        if most is not None and most < least:
            raise self._error("a repetition's bounds run backwards")
        return least, most

    def _number(self) -> int:
        self._skip(newlines=self.nesting > 0)
        number = self._match(_NUMBER, "an int")
        self._skip(newlines=self.nesting > 0)
        if len(number) > 9 or int(number) > REPEAT_MAX:
            raise self._error(f"number of repetitions exceeds {REPEAT_MAX}")
        return int(number)

    def _character(self) -> int:
        """Parse one character of a literal or class."""
        if self.at >= len(self.text):
            raise refusal("unexpected end of input")
        character = self.text[self.at]
        self.at += 1
        if character != "\\":
            return ord(character)
        escaped = self.text[self.at : self.at + 1]
        self.at += 1
        if escaped in _HEX_DIGITS:
            return self._code_point(_HEX_DIGITS[escaped])
        if escaped not in _ESCAPES:
            raise self._error("unknown escape")
        return ord(_ESCAPES[escaped])

    def _code_point(self, size: int) -> int:
        found = self.text[self.at : self.at + size]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{size}}}", found):
            raise self._error(f"expecting {size} hex chars")
        self.at += size
        if (code := int(found, 16)) > _CODE_POINT_MAX or code in _SURROGATES:
            raise self._error(f"U+{code:04X} is not a character")
        return code

    def _skip(self, *, newlines: bool = False) -> None:
        """Skip white space and comments."""
        found = (_LINES if newlines else _SPACE).match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def _takes(self, sign: str) -> bool:
        """Skip *sign* if it comes next; return whether it did."""
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._error(f"expecting {sign!r}")

    def _match(self, pattern: re.Pattern[str], kind: str) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self._error(f"expecting {kind}")
        self.at = found.end()
        return found[0]

    def _error(self, cause: str) -> InvalidArgument:
        line = self.text.count("\n", 0, self.at) + 1
        rest = shorten(self.text[self.at : self.at + 40])
        return refusal(f"{cause} at {rest}, in line {line}" if rest else cause)


_REPETITIONS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_Parse = Callable[[_Parser, list[Item]], None]
_SIGN_PARSERS: dict[str, _Parse] = {
    '"': _Parser.literal,
    "[": _Parser.char_class,
    ".": _Parser.any_char,
    "<": _Parser.token,
    "!": _Parser.token,
    "(": _Parser.group,
    "*": _Parser.repetition,
    "+": _Parser.repetition,
    "?": _Parser.repetition,
    "{": _Parser.repetition,
}
_PARSERS = _SIGN_PARSERS | dict.fromkeys(f"{ascii_letters}{digits}-", _Parser.name)
"""The parser of an item, by its first character."""


_EMPTY = '""'


# llguidance splits the text into lexemes, which are as long as possible. So `"a" | "ab"` before
# `"bc"` would no longer match "abc". Every lexeme here is one character, which keeps the language.


def lark_of(rules: Rules, vocabulary: Vocabulary) -> str:
    """Return the Lark grammar of GBNF *rules*.

    :raises InvalidArgument: a token is not in the vocabulary.
    """
    names = {"root": "start"}
    for name in _reachable(rules):
        names.setdefault(name, f"r{len(names)}")
    writer = _Writer(names, vocabulary)
    written = {name: writer.choice(rules[given]) for given, name in names.items()}
    return "".join(f"{name}: {body}\n" for name, body in (written | writer.groups).items())


def _reachable(rules: Rules) -> Iterator[str]:
    found, waiting = {"root"}, ["root"]
    while waiting:
        name = waiting.pop()
        yield name
        new = [n for n in dict.fromkeys(references(rules[name])) if n not in found]
        found.update(new)
        waiting += new


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes items; `names` has the Lark names of rules."""

    names: Mapping[str, str]
    vocabulary: Vocabulary
    groups: dict[str, str] = field(default_factory=dict)
    """Groups as rules, because llguidance refuses Lark with many brackets within each other."""

    def choice(self, choice: Choice) -> str:
        """Return the alternatives of *choice*."""
        return " | ".join(map(self.item, choice.alternatives))

    def item(self, item: Item) -> str:
        """Return *item* as it stands in a sequence."""
        match item:
            case Chars():
                return _regex(item)
            case Token(value, negated):
                return self._token(value, negated=negated)
            case Name(name):
                return self.names[name]
            case Sequence(items):
                return " ".join(map(self.item, items)) or _EMPTY
            case Choice():
                body = self.choice(item)
                name = f"g{len(self.groups)}"
                self.groups[name] = body
                return name
            case Repeat(_, _, 0):
                return _EMPTY
            case Repeat(repeated, least, most):
                return f"({self.item(repeated)}){_bounds(least, most)}"
        raise AssertionError(item)

    def _token(self, value: int | str, *, negated: bool) -> str:
        size, ends = self.vocabulary.size, self.vocabulary.ends
        token = self.vocabulary.names.get(value, -1) if isinstance(value, str) else value
        if not 0 <= token < size:
            name = value if isinstance(value, str) else f"<[{value}]>"
            raise refusal(f"{name} is not a token of the vocabulary")
        if not negated:
            return f"<[{token}]>"
        gaps = sorted({-1, token, size, *ends})
        between = [(a + 1, b - 1) for a, b in pairwise(gaps) if b - a > 1]
        return f"<[{','.join(f'{a}-{b}' for a, b in between)}]>"


def _bounds(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return f"{{{least},{most}}}"


def _regex(chars: Chars) -> str:
    """Return a terminal of one character; `.` also matches a newline."""
    if not chars.ranges:
        return "/(?s:.)/"
    ranges = (part for low, high in chars.ranges for part in _without_surrogates(low, high))
    inner = "".join(
        f"\\x{{{low:x}}}" + (f"-\\x{{{high:x}}}" if high > low else "") for low, high in ranges
    )
    return f"/[{'^' * chars.negated}{inner}]/"


def _without_surrogates(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that texts can contain. Neither end is a surrogate."""
    first, last = _SURROGATES[0], _SURROGATES[-1]
    if low < first and last < high:
        yield low, first - 1
        yield last + 1, high
    else:
        yield low, high
