"""The facts of a vocabulary that grammars refer to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ("Vocabulary",)


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
