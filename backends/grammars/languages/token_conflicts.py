"""Tokens of GBNF grammars that stand where their own texts may stand, too.

Where a token is allowed by its number, llguidance matches it by the number alone. With ``"a" |
<[97]> "x"`` it would ignore that the token 97 is also the text "a". So such a token is written as
its text. This allows the same texts, but also by other tokens. A negated token is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from ..formats import Vocabulary
from .gbnf import Chars, Choice, Item, Name, Repeat, Rules, Sequence, Token, refusal

__all__ = ("without_conflicts",)

_Pair = tuple[int, int]


def without_conflicts(rules: Rules, vocabulary: Vocabulary) -> Rules:
    """Return *rules* with texts in place of the tokens that stand where a text may stand, too.

    :raises InvalidArgument: a negated token, or one that is not text in UTF-8, stands where a text
        or another token may stand, too.
    """
    while (found := _Graph(rules, vocabulary).conflict()) is not None:
        text = vocabulary.texts.get(_number(found, vocabulary)) if not found.negated else None
        if text is None:
            raise _refusal_of(found)
        spelled = _spelled(text, found)
        rules = {name: _replaced_rule(rule, found, spelled) for name, rule in rules.items()}
    return rules


def _refusal_of(token: Token) -> Exception:
    name = token.value if isinstance(token.value, str) else f"<[{token.value}]>"
    return refusal(
        f"{'!' * token.negated}{name} stands where a text or another token may stand, too;"
        " only one of them could be matched"
    )


def _spelled(text: bytes, token: Token) -> Sequence:
    try:
        return Sequence(tuple(Chars(((ord(c), ord(c)),)) for c in text.decode()))
    except UnicodeDecodeError:
        raise _refusal_of(token) from None


def _replaced_rule(rule: Choice, token: Token, text: Sequence) -> Choice:
    parts = (_replaced_all(sequence, token, text) for sequence in rule.alternatives)
    return Choice(tuple(parts))


def _replaced_all(sequence: Sequence, token: Token, text: Sequence) -> Sequence:
    return Sequence(tuple(_replaced(item, token, text) for item in sequence.items))


def _replaced(item: Item, token: Token, text: Sequence) -> Item:
    match item:
        case Token():
            return text if item == token else item
        case Sequence():
            return _replaced_all(item, token, text)
        case Choice():
            return _replaced_rule(item, token, text)
        case Repeat(repeated, least, most):
            return Repeat(_replaced(repeated, token, text), least, most)
    return item


def _number(token: Token, vocabulary: Vocabulary) -> int:
    value = token.value
    return vocabulary.names.get(value, -1) if isinstance(value, str) else value


@dataclass(slots=True)
class _Graph:
    """The characters and tokens of *rules* with those that can follow each.

    A rule is followed by what can follow any reference to it. So the graph allows all that the
    grammar allows, and more.
    """

    rules: Rules
    vocabulary: Vocabulary
    next_nodes: list[list[int]] = field(default_factory=list)
    """The nodes that follow each node without a character or token."""
    leaves: dict[int, tuple[Chars | Token, int]] = field(default_factory=dict)
    """By node, a character or token, and the node after it."""
    spans: dict[str, _Pair] = field(default_factory=dict)
    """The first and last nodes of rules."""
    reachable: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def conflict(self) -> Token | None:
        """Return a token that may stand in the same place as a text, or as another token."""
        if not any(
            isinstance(leaf, Token) for rule in self.rules.values() for leaf in _leaves(rule)
        ):
            return None
        for name in self.rules:
            self.spans[name] = self._node(), self._node()
        for name, rule in self.rules.items():
            first, last = self.spans[name]
            self._join(first, rule, last)
        return self._search(self.spans["root"][0])

    def _node(self) -> int:
        self.next_nodes.append([])
        return len(self.next_nodes) - 1

    def _join(self, first: int, item: Item, last: int) -> None:
        """Add *item* between two nodes."""
        match item:
            case Chars() | Token():
                node = self._node()
                self.next_nodes[first].append(node)
                self.leaves[node] = item, last
            case Name(name):
                begin, end = self.spans[name]
                self.next_nodes[first].append(begin)
                self.next_nodes[end].append(last)
            case Sequence(parts):
                for part in parts:
                    end = self._node()
                    self._join(first, part, end)
                    first = end
                self.next_nodes[first].append(last)
            case Choice(parts):
                for part in parts:
                    self._join(first, part, last)
            case Repeat(repeated, least, _):
                begin, end = self._node(), self._node()
                self.next_nodes[first].append(begin)
                self._join(begin, repeated, end)
                self.next_nodes[end] += [begin, last]
                if least == 0:
                    self.next_nodes[first].append(last)

    def _leaves_from(self, node: int) -> tuple[int, ...]:
        """Return the nodes of the characters and tokens that may stand at *node*."""
        if node not in self.reachable:
            found, waiting = {node}, [node]
            while waiting:
                new = [n for n in self.next_nodes[waiting.pop()] if n not in found]
                found.update(new)
                waiting += new
            self.reachable[node] = tuple(n for n in found if n in self.leaves)
        return self.reachable[node]

    def _search(self, root: int) -> Token | None:
        """Return a token in conflict, from all pairs of nodes to which the same text can lead."""
        seen: set[_Pair] = set()
        begins = self._leaves_from(root)
        waiting = list(product(begins, begins))
        while waiting:
            pair = first, second = waiting.pop()
            if pair in seen or first > second:
                continue
            seen.add(pair)
            (one, after_one), (two, after_two) = self.leaves[first], self.leaves[second]
            if not self._same(one, two):
                if not self._overlap(one, two):
                    continue
                tokens = [leaf for leaf in (one, two) if isinstance(leaf, Token)]
                if tokens:
                    return min(tokens, key=lambda token: token.negated)
            waiting += (
                (min(a, b), max(a, b))
                for a in self._leaves_from(after_one)
                for b in self._leaves_from(after_two)
            )
        return None

    def _same(self, one: Chars | Token, two: Chars | Token) -> bool:
        if isinstance(one, Token) and isinstance(two, Token):
            numbers = _number(one, self.vocabulary), _number(two, self.vocabulary)
            return one.negated == two.negated and numbers[0] == numbers[1]
        return one == two

    def _overlap(self, one: Chars | Token, two: Chars | Token) -> bool:
        """Return whether a token may match both, which differ, judged by its first character."""
        if isinstance(one, Chars) and isinstance(two, Chars):
            return _chars_overlap(one, two)
        if isinstance(one, Token) and isinstance(two, Token):
            same = _number(one, self.vocabulary) == _number(two, self.vocabulary)
            return (one.negated or two.negated) and not same
        token, chars = (one, two) if isinstance(one, Token) else (two, one)
        assert isinstance(token, Token) and isinstance(chars, Chars)
        if token.negated:
            return True
        text = self.vocabulary.texts.get(_number(token, self.vocabulary))
        if not text:
            return False
        first = text.decode("utf-8", "replace")[0]
        return first == "\ufffd" or _chars_overlap(chars, Chars(((ord(first), ord(first)),)))


def _leaves(item: Item) -> Iterator[Item]:
    match item:
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _leaves(part)
        case Repeat(repeated):
            yield from _leaves(repeated)
        case _:
            yield item


def _chars_overlap(one: Chars, two: Chars) -> bool:
    """Return whether a character is in both; if both are negated, most characters are."""
    if one.negated and two.negated:
        return True
    if one.negated or two.negated:
        kept, removed = (two, one) if one.negated else (one, two)
        return any(
            not any(low <= a and b <= high for low, high in removed.ranges) for a, b in kept.ranges
        )
    return any(a <= d and c <= b for a, b in one.ranges for c, d in two.ranges)
