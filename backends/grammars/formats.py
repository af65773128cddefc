"""The format of a turn's answer, as the request to compile its grammar for a vocabulary."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..errors import InvalidArgument
from ..params import SamplingParams, StructuralTag, StructuralTags, TagPart
from ..texts import shorten
from .trial import CheckRequest, Mark, PartRequest, TagRequest

if TYPE_CHECKING:  # `native` imports numpy, and the start of a trial's program would take longer
    from .native import MatchingTokenizer

__all__ = (
    "NO_VOCABULARY",
    "Vocabulary",
    "VocabularyFacts",
    "check_request",
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a grammar may refer to.

    Special tokens are those that are not text: control tokens, by llama.cpp's word for them.
    """

    size: int
    """0 without a vocabulary, in which case grammars may name any token."""
    ends: Collection[int]
    """The tokens that end a generation; no negated token stands for them."""
    names: Mapping[str, int]
    """Tokens by name, at least those that the grammar names."""
    special: Sequence[tuple[int, int]] = ()
    """The first and last tokens of ranges of special tokens, ascending."""
    texts: Mapping[int, bytes] = field(default_factory=dict)
    """The texts of the tokens that the grammar names or numbers and that are text."""

    def is_special(self, first: int, last: int | None = None) -> bool:
        """Return whether all tokens from *first* to *last* are special."""
        index = bisect_right(self.special, (first, self.size)) - 1
        return index >= 0 and (first if last is None else last) <= self.special[index][1]


_NUMBERS_MAX = 1000
_NUMBER = re.compile(r"<\[([0-9]{1,9})\]>")


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """The facts of a vocabulary that compilation needs; its functions may be called in any thread.

    `tokenizer` returns llguidance's form of the vocabulary, and `special` the ranges of its special
    tokens; both wait until these are known. `names_in` returns the tokens that a grammar names, and
    `special_in` the special tokens in a text in their order, with their names. `piece` returns the
    bytes of a token.
    """

    size: int
    ends: Callable[[], tuple[int, ...]]
    tokenizer: Callable[[], MatchingTokenizer]
    special: Callable[[], tuple[tuple[int, int], ...]]
    names_in: Callable[[str], Mapping[str, int]]
    special_in: Callable[[str], Sequence[tuple[str, int]]]
    piece: Callable[[int], bytes]


def _no_tokenizer() -> MatchingTokenizer:
    raise AssertionError("no vocabulary is loaded")


NO_VOCABULARY = VocabularyFacts(
    size=0,
    ends=tuple,
    tokenizer=_no_tokenizer,
    special=tuple,
    names_in=lambda _: {},
    special_in=lambda _: (),
    piece=lambda _: b"",
)
"""For the check of a grammar alone, which may name any token."""


def check_request(params: SamplingParams, vocabulary: VocabularyFacts) -> CheckRequest:
    """Return the request to compile the grammar of *params*.

    :raises InvalidArgument: a trigger of a structural tag has text before a special token.
    """
    if params.json_schema:
        return CheckRequest(
            schema=params.json_schema,
            whitespace=params.json_whitespace,
            lenient=params.schema_lenient,
            infer=params.schema_infer,
        )
    tags = _read_tags(params.structural_tag)
    found = [tag.grammar for tag in tags.tags if tag.grammar] if tags else []
    grammar = "\n".join((params.grammar, params.lark, *found))
    names = dict(vocabulary.names_in(grammar))
    return CheckRequest(
        whitespace=params.json_whitespace,
        infer=params.schema_infer,
        gbnf=params.grammar,
        lark=params.lark,
        regex=params.regex,
        tags=_tag_requests(tags, vocabulary) if tags else (),
        at_least_one=tags is not None and tags.at_least_one,
        stop_after_first=tags is not None and tags.stop_after_first,
        opened=tags.opened if tags else "",
        closing=_mark(tags.closing, vocabulary) if tags else (),
        before=_part_requests(tags.before, vocabulary) if tags else (),
        vocab_size=vocabulary.size,
        ends=vocabulary.ends(),
        names=names,
        special=vocabulary.special(),
        texts=_texts(grammar, names, vocabulary),
    )


def _read_tags(text: str) -> StructuralTags | None:
    return msgspec.json.decode(text, type=StructuralTags) if text else None


def _texts(grammar: str, names: Mapping[str, int], vocabulary: VocabularyFacts) -> dict[int, bytes]:
    """Return the texts of the tokens that *grammar* mentions and that are text."""
    numbers = map(int, _NUMBER.findall(grammar)[:_NUMBERS_MAX])
    mentioned = {*names.values(), *(n for n in numbers if n < vocabulary.size)}
    special = Vocabulary(vocabulary.size, (), {}, vocabulary.special())
    return {t: vocabulary.piece(t) for t in mentioned if not special.is_special(t)}


def _tag_requests(tags: StructuralTags, vocabulary: VocabularyFacts) -> tuple[TagRequest, ...]:
    again = tags.more or [""] * len(tags.tags)
    return tuple(_tag_request(*tag, vocabulary) for tag in zip(tags.tags, again, strict=True))


def _part_requests(
    parts: Sequence[TagPart], vocabulary: VocabularyFacts
) -> tuple[PartRequest, ...]:
    return tuple(
        PartRequest(
            text=_mark(part.text, vocabulary),
            schema="" if part.schema is None else msgspec.json.encode(part.schema).decode(),
            regex=part.regex,
            until=_mark(part.until, vocabulary),
            any_of=tuple(_part_requests(sequence, vocabulary) for sequence in part.any_of),
            repeated=part.repeated,
        )
        for part in parts
    )


def _tag_request(tag: StructuralTag, again: str, vocabulary: VocabularyFacts) -> TagRequest:
    begin, end = (_mark(text, vocabulary) for text in (tag.begin, tag.end))
    if isinstance(begin[0], int):
        trigger, rest = begin[:1], begin[1:]
    elif begin[0].startswith(tag.trigger):
        trigger, rest = (tag.trigger,), (begin[0][len(tag.trigger) :], *begin[1:])
    else:
        raise InvalidArgument(
            f"structural-tag: the trigger {shorten(tag.trigger)} has text before a special token",
            hint="begin the trigger with the special token, or end it before",
        )
    return TagRequest(
        trigger=trigger,
        rest=rest,
        end=end,
        schema="" if tag.schema is None else msgspec.json.encode(tag.schema).decode(),
        gbnf=tag.grammar or "",
        regex=tag.regex or "",
        parts=_part_requests(tag.parts, vocabulary),
        again=_mark(again, vocabulary),
    )


def _mark(text: str, vocabulary: VocabularyFacts) -> Mark:
    """Return the parts of *text*: texts, and the numbers of special tokens."""
    parts: list[str | int] = []
    for name, token in vocabulary.special_in(text):
        before, _, text = text.partition(name)
        parts += [before, token] if before else [token]
    return (*parts, text) if text else tuple(parts)
