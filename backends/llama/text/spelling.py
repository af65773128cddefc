"""The characters that a SentencePiece vocabulary can spell.

llama.cpp spells a character without a token by the tokens of its bytes, and ends the process if the
vocabulary lacks one of these.
"""

from __future__ import annotations

from collections.abc import Iterable

_CHARACTER_BYTES_MAX = 4
_SPACE = "\u2581"
"""Stands for a space in the names of tokens."""


class Spelling:
    """The single characters and bytes that are tokens, by the *names* of all tokens."""

    def __init__(self, names: Iterable[bytes]):
        self._lacking = {b"<0x%02X>" % byte: byte for byte in range(256)}
        self._characters = set[str]()
        for name in names:
            self._lacking.pop(name, None)
            if not self._lacking:
                break
            if 0 < len(name) <= _CHARACTER_BYTES_MAX:
                text = name.decode("utf-8", "replace")
                if len(text) == 1:
                    self._characters.add(text)
        self._bytes = set(range(256)).difference(self._lacking.values())

    @property
    def is_complete(self) -> bool:
        """Whether every text can be spelled."""
        return not self._lacking

    def first_lacking(self, text: str) -> str:
        """Return the first character of *text* that cannot be spelled, or an empty text."""
        found = set(text.replace(" ", _SPACE)) - self._characters
        lacking = {c for c in found if not self._bytes.issuperset(c.encode())}
        return next((c for c in text if (_SPACE if c == " " else c) in lacking), "")
