"""The Lark grammar of structural tags.

Free text goes on until a trigger: a lexeme that ends at the trigger's first occurrence, or a
special token. Only the parts with this trigger can follow. Other special tokens belong to free
text. Marks are written as lexemes of one character, so that one can be the beginning of another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from llguidance import regex_to_lark

from ..trial import CheckRequest, Mark, TagRequest

__all__ = ("grammar_of_tags", "regex_literal")

Content = Callable[[TagRequest], dict[str, Any]]


def grammar_of_tags(request: CheckRequest, content: Content) -> str:
    """Return llguidance's form of the grammar of free text with the tags of *request*.

    *content* returns the grammar of a tag's schema or GBNF, as a field of llguidance's lists.
    """
    rules = ["TEXT: /(?s:.)*/"]
    grammars: list[dict[str, Any]] = []
    triggers = []
    by_trigger = sorted(request.tags, key=lambda tag: list(map(str, tag.trigger)))
    for number, (trigger, tags) in enumerate(groupby(by_trigger, key=lambda tag: tag.trigger)):
        triggers.append(trigger)
        bodies = []
        for tag in tags:
            name = f"c{len(grammars) + len(rules)}"
            if tag.regex:
                rule, end = _regex_rule(name, tag)
                rules.append(rule)
            else:
                grammars.append({"name": name, **content(tag)})
                name, end = f"@{name}", tag.end
            bodies.append(" ".join((*_chars(tag.rest), name, *_chars(end))))
        rules.append(f"t{number}: {' | '.join(bodies)}")
        rules.append(_head_rule(number, trigger))
    lark = "\n".join([*_start_rules(request, triggers), *rules, ""])
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *grammars]})


def regex_literal(regex: str) -> str:
    """Return *regex* as it stands in Lark."""
    return f"/{regex_to_lark(regex)}/"


def _start_rules(request: CheckRequest, triggers: Sequence[Mark]) -> Iterator[str]:
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
        yield "start: first" if request.stop_after_first else f"start: first ({parts})* TEXT"
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
    removed = sorted({*request.ends, *(mark for mark in marks if isinstance(mark, int))})
    for first, last in request.special:
        for token in removed:
            if first <= token <= last:
                if first < token:
                    yield f"{first}-{token - 1}"
                first = token + 1
        if first <= last:
            yield f"{first}-{last}"
