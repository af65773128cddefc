"""The echo model's vocabulary: a token per byte, and three marks, for the start of a prompt, its
end, and the end of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

EOG, PROMPT_END, PROMPT_BEGIN = 256, 257, 258
VOCAB_SIZE = 259
_NAMES = {EOG: b"", PROMPT_END: b"<|echo|>", PROMPT_BEGIN: b"<|prompt|>"}
_MARKS = {name: token for token, name in _NAMES.items() if name}
_MARK = re.compile(b"(%s)" % b"|".join(map(re.escape, _MARKS)))


class EchoVocabulary:
    """Tokens and bytes; byte 0 is the token *first*."""

    def __init__(self, first: int):
        self._first = first

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the tokens of *text*, with marks around them if *bos* or *special*. If *special*
        and the text begins with the mark of a prompt, the marks in it are read instead.
        """
        if special and text.startswith(_NAMES[PROMPT_BEGIN]):
            return [token for part in _MARK.split(text) for token in self._tokens_of(part)]
        tokens = [self.token(byte) for byte in text]
        return [PROMPT_BEGIN, *tokens, PROMPT_END] if bos or special else tokens

    def _tokens_of(self, part: bytes) -> list[int]:
        return [_MARKS[part]] if part in _MARKS else [self.token(byte) for byte in part]

    def token(self, byte: int) -> int:
        """Return the token of *byte*."""
        return (byte + self._first) % EOG

    def byte(self, token: int) -> int:
        """Return the byte of *token*, which is not a mark."""
        return (token - self._first) % EOG

    def piece(self, token: int) -> bytes:
        """Return the byte of *token*, or a mark's name; the end mark's is empty."""
        return bytes((self.byte(token),)) if token < EOG else _NAMES[token]

    def is_control(self, token: int) -> bool:
        """Return whether *token* is a mark."""
        return token >= EOG

    def is_eog(self, token: int) -> bool:
        """Return whether *token* is the end mark."""
        return token == EOG

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of *tokens*, without marks."""
        return bytes(self.byte(t) for t in tokens if 0 <= t < EOG)
