"""The translation of GBNF rules to Lark, as llguidance reads it.

llguidance splits the text into lexemes, which are as long as possible. So `"a" | "ab"` before
`"bc"` would no longer match "abc". Every lexeme here is one character, which keeps the language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ..vocabulary import Vocabulary
from .gbnf import Chars, Choice, Item, Name, Repeat, Rules, Sequence, Token, references, refusal

__all__ = ("lark_of",)

_SURROGATES = (0xD800, 0xDFFF)
_EMPTY = '""'


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
    first, last = _SURROGATES
    if low < first and last < high:
        yield low, first - 1
        yield last + 1, high
    else:
        yield low, high
