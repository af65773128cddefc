"""Words of a fixed set, in the spellings that people use."""

from __future__ import annotations

from collections.abc import Iterable

OTHER_WORDS = {"warn": "warning", "err": "error"}
"""Words of other programs, by which a choice is meant."""


def choice_of(word: object, choices: Iterable[str]) -> str | None:
    """Return the one of *choices* that *word* spells in any case, with `-` or `_`, or by another
    program's word; None if there is none.
    """
    if not isinstance(word, str):
        return None
    known = {_plain(choice): choice for choice in choices}
    plain = _plain(word)
    return known.get(plain, known.get(OTHER_WORDS.get(plain, plain)))


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "-")
