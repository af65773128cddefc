"""Lark grammars: those of users, checked and rewritten for llguidance, and that of structural tags.

The text of a user is split into its symbols, and only known symbols are written again. So
llguidance reads nothing that was not checked here, whatever its own parser takes for a comment or a
string.

In structural tags, free text goes on until a trigger: a lexeme that ends at the trigger's first
occurrence, or a special token. Only the parts with this trigger can follow. Other special tokens
belong to free text. Marks are written as lexemes of one character, so that one can be the beginning
of another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from llguidance import regex_to_lark

from ...errors import InvalidArgument, TooLarge
from ...texts import shorten
from ..formats import Vocabulary
from ..limits import LITERAL_BYTES_MAX, REGEX_BYTES_MAX, RULES_MAX
from ..trial import CheckRequest, Mark, PartRequest, TagRequest, all_parts

__all__ = (
    "FORMATS_HINT",
    "grammar_of_tags",
    "lark_refusal",
    "regex_literal",
    "rewrite_lark",
)


FORMATS_HINT = "correct it; `inferd parameters regex lark structural-tag` prints their forms"
_SYMBOL = re.compile(
    r"""
    (?P<space>(?:(?:\#|//)[^\n]*|[ \t]+)+)
    |(?P<newline>(?:\r?\n)+[ \t]*)
    |(?P<json>%(?:json|regex|llguidance))
    |(?P<statement>%[a-z]*)
    |(?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1F\x7F])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imsux]*)
    |(?P<token><[^<>\s]+>)
    |(?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
    |(?P<number>0[xX][0-9a-fA-F]+|[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<sign>->|\.\.|::|[:,.()\[\]{}~|&=_+*?])
    """,
    re.VERBOSE,
)
_SPACE = re.compile(r"[ \t\r\n]*")
_STATEMENTS = ("%ignore", "%import", "%lark", "%if")
_OPTIONS = ("allow_initial_skip", "ignore_once")
"""The options of `%llguidance` that change the language. Others change how tokens are matched."""
_ATTRIBUTES = {
    "stop": "it takes back text that was sent; write the text after the rule, or [lazy]",
    "suffix": "write the text after the rule, or [lazy]",
    "max_tokens": "use n-predict, or a repetition",
    "temperature": "use temp, which applies to the whole answer",
}
"""Advice for attributes of rules that are not supported."""


def lark_refusal(cause: str, hint: str = FORMATS_HINT) -> InvalidArgument:
    """Return the error for a Lark grammar that is refused because of *cause*."""
    return InvalidArgument(f"lark: {cause}", hint=hint)


def rewrite_lark(text: str, vocabulary: Vocabulary, checked_schema: Callable[[Any], Any]) -> str:
    """Return the Lark grammar of *text* for llguidance, with the same line numbers.

    Special tokens are written as numbers, and named tokens that are ordinary text as strings.
    *checked_schema* returns llguidance's form of a schema after `%json`.

    :raises InvalidArgument: *text* is not a grammar, or uses something that is not supported.
    :raises TooLarge: *text* is past a limit on its size.
    """
    return _Rewriter(text, vocabulary, checked_schema).rewrite()


@dataclass(slots=True)
class _Rewriter:
    """Rewrites `text`; `at` is its position there."""

    text: str
    vocabulary: Vocabulary
    checked_schema: Callable[[Any], Any]
    at: int = 0
    written: list[str] = field(default_factory=list)

    def rewrite(self) -> str:
        """Return the rewritten text."""
        rules = 0
        while self.at < len(self.text):
            found = _SYMBOL.match(self.text, self.at)
            if found is None:
                raise self._error(f"unexpected {shorten(self.text[self.at : self.at + 20])}")
            self.at = found.end()
            rules += found[0] == ":"
            if rules > RULES_MAX:
                raise _too_large("rules", rules, RULES_MAX)
            self.written.append(self._symbol(str(found.lastgroup), found[0]))
        return " ".join(filter(None, self.written)) + "\n"

    def _symbol(self, kind: str, symbol: str) -> str:
        match kind:
            case "space":
                return ""
            case "newline":
                return "\n" * symbol.count("\n")
            case "json":
                begin, value = self.at, self._json(symbol)
                lines = "\n" * self.text.count("\n", begin, self.at)
                return f"{symbol} {lines}{json.dumps(value)}"
            case "statement":
                self._check_statement(symbol)
            case "string":
                _check_size("literal", symbol, LITERAL_BYTES_MAX)
            case "regex":
                _check_size("regular expression", symbol, REGEX_BYTES_MAX)
            case "token":
                return self._token(symbol)
        if symbol == "=":
            self._refuse_attribute()
        return symbol

    def _json(self, keyword: str) -> Any:
        """Return the checked JSON value after *keyword*."""
        begin = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        try:
            value, self.at = _DECODER.raw_decode(self.text, begin)
        except ValueError:
            raise self._error(f"expecting JSON after {keyword}") from None
        if keyword == "%json":
            return self.checked_schema(value)
        if keyword == "%llguidance":
            unknown = [k for k in value if k not in _OPTIONS] if isinstance(value, dict) else [""]
            if unknown:
                known = ", ".join(_OPTIONS)
                raise self._error(f"%llguidance: {shorten(unknown[0])} is not one of {known}")
        return value

    def _check_statement(self, symbol: str) -> None:
        if symbol not in _STATEMENTS:
            raise self._error(f"{symbol} is not supported")
        if symbol == "%import" and not re.match(r"[ \t]*common\b", self.text[self.at :][:80]):
            raise self._error("%import: only common can be imported, such as %import common.INT")

    def _refuse_attribute(self) -> None:
        name = next(filter(None, reversed(self.written)), "")
        advice = _ATTRIBUTES.get(name)
        raise self._error(f"{name}= is not supported{f': {advice}' if advice else ''}")

    def _token(self, symbol: str) -> str:
        vocabulary = self.vocabulary
        if symbol.startswith("<["):
            return self._token_numbers(symbol)
        token = vocabulary.names.get(symbol)
        if token is None and vocabulary.size:
            raise self._error(f"{shorten(symbol)} is not a token of the vocabulary")
        if token is not None and vocabulary.is_special(token):
            return f"<[{token}]>"
        return json.dumps(symbol)

    def _token_numbers(self, symbol: str) -> str:
        """Return tokens given by numbers. Those that are text are refused, because llguidance would
        accept them only by number even where the same text is allowed.
        """
        if not re.fullmatch(r"<\[[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*\]>", symbol):
            raise self._error(f"{shorten(symbol)}: give numbers and ranges, such as <[3,7-9]>")
        for part in symbol[2:-2].split(","):
            first, last = (int(number) for number in (*part.split("-"), part)[:2])
            if self.vocabulary.size and not self.vocabulary.is_special(first, last):
                raise self._error(f"<[{part}]> is not a special token; write the token's text")
        return symbol

    def _error(self, cause: str) -> InvalidArgument:
        line = self.text.count("\n", 0, max(0, self.at - 1)) + 1
        return lark_refusal(f"line {line}: {cause}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _check_size(unit: str, text: str, most: int) -> None:
    if (size := len(text.encode())) > most:
        raise _too_large(f"bytes in one {unit}", size, most)


def _too_large(unit: str, count: int, most: int) -> TooLarge:
    return TooLarge(
        f"lark: {count} {unit}; {most} at most",
        hint="use fewer or smaller rules and texts",
        data={"count": count, "most": most},
    )


Content = Callable[[TagRequest | PartRequest], dict[str, Any]]


def grammar_of_tags(request: CheckRequest, content: Content) -> str:
    """Return llguidance's form of the grammar of free text with the tags of *request*.

    *content* returns the grammar of a tag's schema or GBNF, as a field of llguidance's lists.
    """
    rules, triggers, again = _Rules(content), [], []
    by_trigger = sorted(request.tags, key=lambda tag: list(map(str, tag.trigger)))
    for number, (trigger, tags) in enumerate(groupby(by_trigger, key=lambda tag: tag.trigger)):
        triggers.append(trigger)
        bodies = []
        for tag in tags:
            rest = rules.content(tag)
            bodies.append(" ".join((*_chars(tag.rest), rest)))
            again.append(" ".join((*_chars(tag.again), rest)))
        after = " ".join(("more_tag*" if request.tags[0].again else "", *_chars(request.closing)))
        rules.rules.append(f"t{number}: ({' | '.join(bodies)}) {after}")
        rules.rules.append(_head_rule(number, trigger))
    if request.tags[0].again:
        rules.rules.append(f"more_tag: {' | '.join(again)}")
    before = rules.sequence(request.before)
    lark = "\n".join([*_start_rules(request, triggers, before), *rules.rules, ""])
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *rules.grammars]})


class _Rules:
    """The rules and the inner grammars of the contents of tags."""

    def __init__(self, content: Content):
        self.rules = ["TEXT: /(?s:.)*/"]
        self.grammars: list[dict[str, Any]] = []
        self._content = content

    def _new_name(self) -> str:
        return f"c{len(self.grammars) + len(self.rules)}"

    def content(self, tag: TagRequest) -> str:
        """Return the symbols of a tag's content and its end."""
        if tag.parts:
            return " ".join((self.sequence(tag.parts), *_chars(tag.end)))
        if tag.regex:
            name = self._new_name()
            rule, end = _regex_rule(name, tag)
            self.rules.append(rule)
            return " ".join((name, *_chars(end)))
        return " ".join((self._inner(tag), *_chars(tag.end)))

    def _inner(self, content: TagRequest | PartRequest) -> str:
        name = self._new_name()
        self.grammars.append({"name": name, **self._content(content)})
        return f"@{name}"

    def sequence(self, parts: Iterable[PartRequest]) -> str:
        """Return the symbols of *parts*, one after the other."""
        return " ".join(map(self._part, parts))

    def _part(self, part: PartRequest) -> str:
        if part.schema:
            return self._inner(part)
        if part.regex:
            name = self._new_name()
            self.rules.append(f"{name}: {regex_literal(part.regex)}")
            return name
        if part.until:
            return self._free_text(part.until)
        if not part.any_of:
            return " ".join(_chars(part.text))
        sequences = [self.sequence(sequence) for sequence in part.any_of]
        if not any(sequences):
            return ""
        name = self._new_name()
        self.rules.append(f"{name}: {' | '.join(filter(None, sequences))}")
        optional = "?" if "" in sequences else ""
        return f"({name}){'*' if part.repeated else optional}"

    def _free_text(self, mark: Mark) -> str:
        """Return the symbols of text up to *mark*. Text in the mark before a special token belongs
        to the free text, which the token ends.
        """
        special = next((at for at, part in enumerate(mark) if isinstance(part, int)), None)
        if special is not None:
            return " ".join(("TEXT", *_chars(mark[special:])))
        name = self._new_name()
        self.rules.append(f"{name}[lazy]: /(?s:.)*/ {_literal(str(mark[0]))}")
        return name


def regex_literal(regex: str) -> str:
    """Return *regex* as it stands in Lark."""
    return f"/{regex_to_lark(regex)}/"


def _start_rules(request: CheckRequest, triggers: Sequence[Mark], before: str) -> Iterator[str]:
    """Yield the rules of the whole answer."""
    parts = "tag"
    if others := ",".join(_ranges(request)):
        yield f"other: TEXT <[{others}]>"
        parts = "tag | other"
    yield "tag: " + " | ".join(f"h{number} t{number}" for number in range(len(triggers)))
    if request.opened:
        yield from _opened_rules(request.opened, parts, triggers, f"<[{others}]>" if others else "")
    elif request.at_least_one:
        first = (f"{' '.join(_chars(t))} t{number}" for number, t in enumerate(triggers))
        yield "first: " + " | ".join(first)
        first_part = f"{before} first"
        more = "" if request.stop_after_first else f" ({parts})* TEXT"
        yield f"start: {first_part}{more}"
    elif request.stop_after_first:
        yield f"start: {'other* ' if others else ''}(tag | TEXT)"
    else:
        yield f"start: ({parts})* TEXT"


def _opened_rules(opened: str, parts: str, triggers: Sequence[Mark], others: str) -> Iterator[str]:
    """Yield the rules of an answer that may begin with the rest of a trigger, whose beginning is
    *opened*. Free text at the beginning of the answer cannot start with such a rest.
    """
    rests = [str(mark).removeprefix(opened) for [mark] in triggers]
    yield f"FIRST: /(?s:.)*/ & ~/({'|'.join(map(_escaped, rests))})(?s:.)*/"
    yield f"more: ({parts})* TEXT"
    begins = [f"{_literal(rest)} t{number}" for number, rest in enumerate(rests)]
    for number, [mark] in enumerate(triggers):
        yield f"f{number}[lazy]: FIRST {_literal(str(mark))}"
        begins.append(f"f{number} t{number}")
    begins += [f"FIRST {others}"] if others else []
    yield f"start: ({' | '.join(begins)}) more | FIRST"


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _head_rule(number: int, trigger: Mark) -> str:
    """Return the rule of free text that ends with *trigger*, a text or one special token."""
    [mark] = trigger
    if isinstance(mark, int):
        return f"h{number}: TEXT <[{mark}]>"
    return f"h{number}[lazy]: TEXT {_literal(mark)}"


def _regex_rule(name: str, tag: TagRequest) -> tuple[str, Mark]:
    """Return the rule of a tag's regular expression, and what remains of the tag's end. If the end
    begins with a text, the rule includes that text, at whose first occurrence it ends.
    """
    regex = regex_literal(tag.regex)
    if tag.end and isinstance(tag.end[0], str):
        return f"{name}[lazy]: {regex} {_literal(tag.end[0])}", tag.end[1:]
    return f"{name}: {regex}", tag.end


def _chars(mark: Mark) -> Iterator[str]:
    for part in mark:
        if isinstance(part, int):
            yield f"<[{part}]>"
        else:
            yield from map(_literal, part)


def _literal(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")


def _ranges(request: CheckRequest) -> Iterable[str]:
    """Yield ranges of the special tokens that free text may have, without marks and end tokens."""
    marks = {m for tag in request.tags for m in (*tag.trigger, *tag.rest, *tag.end)}
    marks |= {m for part in all_parts(request) for m in (*part.text, *part.until)}
    marks |= {*request.closing, *(m for tag in request.tags for m in tag.again)}
    removed = sorted({*request.ends, *(mark for mark in marks if isinstance(mark, int))})
    for first, last in request.special:
        for token in removed:
            if first <= token <= last:
                if first < token:
                    yield f"{first}-{token - 1}"
                first = token + 1
        if first <= last:
            yield f"{first}-{last}"
