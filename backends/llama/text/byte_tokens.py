"""Tokens of texts with bytes that are not UTF-8: one token for each of these bytes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Protocol

from ...errors import not_utf8

_RAW = re.compile("([\udc80-\udcff]+)")
_NAMES = (2, 6)
"""Sizes in bytes of a byte token's name: a character as in GPT-2's vocabulary, or `<0xE9>`."""
_HIGH_BYTES = 128
_BREAK = b"\n"
"""Stands before a part, so that the vocabulary puts its space before this text, not the part."""

Tokenize = Callable[[bytes], list[int]]


class Pieces(Protocol):
    """The pieces of a vocabulary's tokens, and its address for llama.cpp."""

    address: int | None
    size: int

    def piece(self, token: int) -> bytes:
        """Return the text of a token."""


class ByteTokens:
    """The tokens of single bytes above 127 in a vocabulary. Read-only after its first use."""

    def __init__(self, vocab: Pieces, read_name: Callable[[int | None, int], bytes]):
        self._vocab, self._read_name = vocab, read_name
        self._tokens: dict[int, int] | None = None

    def tokenize(self, text: bytes, tokenize: Tokenize) -> list[int]:
        """Return the tokens of *text*; *tokenize* returns those of its parts in UTF-8.

        :raises InvalidArgument: the vocabulary has no token for a byte.
        """
        first, *parts = _parts(text)
        tokens = tokenize(first) if first else []
        before = tokenize(_BREAK)
        adds_space = len(b"".join(map(self._vocab.piece, before))) > len(_BREAK)
        at = len(first)
        for raw, part in zip(parts[::2], parts[1::2], strict=True):
            tokens += self._tokens_of(raw, at)
            at += len(raw) + len(part)
            if part:
                tokens += _without_space(part, before, tokenize) if adds_space else tokenize(part)
        return tokens

    def _tokens_of(self, raw: bytes, at: int) -> list[int]:
        if self._tokens is None:
            self._tokens = dict(self._find_tokens())
        for number, byte in enumerate(raw):
            if byte not in self._tokens:
                raise not_utf8(byte, at + number)
        return [self._tokens[byte] for byte in raw]

    def _find_tokens(self) -> Iterator[tuple[int, int]]:
        """Yield bytes and their tokens. Most vocabularies have them among the first 500 tokens."""
        vocab, found = self._vocab, set[bytes]()
        for token in range(vocab.size):
            if len(self._read_name(vocab.address, token)) not in _NAMES:
                continue
            piece = vocab.piece(token)
            if len(piece) == 1 and piece[0] >= _HIGH_BYTES and piece not in found:
                found.add(piece)
                yield piece[0], token
                if len(found) == _HIGH_BYTES:
                    return


def _without_space(part: bytes, before: list[int], tokenize: Tokenize) -> list[int]:
    """Return the tokens of a later part, without the space that the vocabulary puts before a text;
    *before* are the tokens of `_BREAK`.
    """
    tokens = tokenize(_BREAK + part)
    return tokens[len(before) :] if tokens[: len(before)] == before else tokenize(part)


def _parts(text: bytes) -> list[bytes]:
    """Return parts in UTF-8 at even positions, and the bytes between them at odd ones."""
    parts = _RAW.split(text.decode("utf-8", "surrogateescape"))
    return [part.encode("utf-8", "surrogateescape") for part in parts]


NAME_TYPES = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32)
"""The result and the arguments of `llama_vocab_get_text`."""
