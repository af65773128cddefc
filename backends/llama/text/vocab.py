"""The vocabulary: tokenization, the bytes of tokens, special tokens."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...base import SpecialToken
from ...encoder_prompts import as_text_prompt
from ...errors import BackendError, InvalidArgument, TooLarge, not_utf8
from ...texts import is_utf8

_RAW = re.compile("([\udc80-\udcff]+)")
_NAMES = (2, 6)
"""Sizes in bytes of a byte token's name: a character as in GPT-2's vocabulary, or `<0xE9>`."""
_HIGH_BYTES = 128
_BREAK = b"\n"
"""Stands before a part, so that the vocabulary puts its space before this text, not the part."""

Tokenize = Callable[[bytes], list[int]]


class ByteTokens:
    """The tokens of single bytes above 127 in a vocabulary. Read-only after its first use."""

    def __init__(self, vocab: Vocab, read_name: Callable[[int | None, int], bytes]):
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


_CHARACTER_BYTES_MAX = 4
_SPACE = "\u2581"
"""Stands for a space in the names of tokens."""


class Spelling:
    """The single characters and bytes that are tokens of a SentencePiece vocabulary, by the *names*
    of all tokens.

    llama.cpp spells a character without a token by the tokens of its bytes, and ends the process if
    the vocabulary lacks one of these.
    """

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


TEXT_BYTES_MAX = (1 << 31) - 1
PIECE_BYTES = 256
SPECIAL_NAMES = (
    *("bos", "eos", "eot", "sep", "nl", "pad", "mask"),
    *("fim-pre", "fim-suf", "fim-mid", "fim-pad", "fim-rep", "fim-sep"),
)
"""The special tokens of llama.cpp's vocabularies; fim: fill in the middle."""
PART_TOKENS = 1024


def raw_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of llama.cpp for many short calls. Calls through the bindings, which
    release the GIL, take three times as long.
    """
    address = ctypes.cast(getattr(lib._lib, name), ctypes.c_void_p).value
    assert address is not None
    return ctypes.PYFUNCTYPE(result, *arguments)(address)


class Vocab:
    """The vocabulary of a loaded model, which must outlive it. Read-only. *start_token* is that of
    an encoder-decoder, and ends its prompts.
    """

    def __init__(self, pointer: Any, start_token: int | None = None):
        self.pointer = pointer
        self._start_token = start_token
        self.address = ctypes.cast(pointer, ctypes.c_void_p).value
        self.size = int(lib.llama_vocab_n_tokens(pointer))
        self._pieces: dict[int, bytes] = {}
        self._bytes: dict[bytes, int] | None = None
        self._read_name = raw_function("llama_vocab_get_text", *NAME_TYPES)
        self._byte_tokens = ByteTokens(self, self._read_name)
        self._spelling: Spelling | None = None
        self._suppressed: tuple[int, ...] | None = None
        self._eog: tuple[int, ...] | None = None
        self._special: list[int] | None = None

    @property
    def adds_bos(self) -> bool:
        """Whether `tokenize` with *bos* puts a token before the text."""
        return bool(lib.llama_vocab_get_add_bos(self.pointer))

    @property
    def bos(self) -> str:
        """The name of the token that begins a text; empty if there is none."""
        return self._name(int(lib.llama_vocab_bos(self.pointer)))

    @property
    def eos(self) -> str:
        """The name of the token that ends a text; empty if there is none."""
        return self._name(int(lib.llama_vocab_eos(self.pointer)))

    def _name(self, token: int) -> str:
        return self.piece(token).decode("utf-8", "replace") if 0 <= token < self.size else ""

    def named_tokens(self) -> dict[str, SpecialToken]:
        """Return the special tokens that the vocabulary has, by name."""
        ids = {
            name: int(getattr(lib, f"llama_vocab_{name.replace('-', '_')}")(self.pointer))
            for name in SPECIAL_NAMES
        }
        return {n: SpecialToken(i, self._name(i)) for n, i in ids.items() if 0 <= i < self.size}

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the token ids of *text*; see `LanguageModel.tokenize`."""
        if len(text) > TEXT_BYTES_MAX // 2:
            raise TooLarge(f"a text of {len(text)} bytes", hint="shorten the text")
        if bos and self._start_token is not None:
            tokens = self._tokenize_bytes(text, special=special, bos=True)
            return as_text_prompt(tokens, self._start_token)
        return self._tokenize_bytes(text, special=special, bos=bos)

    def _tokenize_bytes(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        if is_utf8(text):
            return self._tokenize(text, special=special, bos=bos)
        # llama.cpp's BPE tokenizer reads these bytes as U+FFFD; others read valid bytes with them.
        around = self._tokenize(b"", special=special, bos=bos)
        tokens = self._byte_tokens.tokenize(
            text, lambda part: self._tokenize(part, special=special, bos=False)
        )
        begin = int(bos and self.adds_bos)
        return [*around[:begin], *tokens, *around[begin:]]

    def _check_spelling(self, text: bytes) -> None:
        if lib.llama_vocab_type(self.pointer) != lib.LLAMA_VOCAB_TYPE_SPM:
            return
        if self._spelling is None:
            names = (self._read_name(self.address, token) for token in range(self.size))
            self._spelling = Spelling(names)
        lacking = "" if self._spelling.is_complete else self._spelling.first_lacking(text.decode())
        if lacking:
            raise InvalidArgument(
                f"the model has no token for the character {lacking!r}",
                hint="leave it out, or use a model that can spell all characters",
                data={"character": lacking},
            )

    def _tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        self._check_spelling(text)
        count = len(text) // 3 + 16
        while True:
            tokens = (ctypes.c_int32 * count)()
            found = lib.llama_tokenize(self.pointer, text, len(text), tokens, count, bos, special)
            if found >= 0:
                return tokens[:found]
            if -found <= count:
                raise BackendError(f"a text of {len(text)} bytes has too many tokens")
            count = -found

    def piece(self, token: int) -> bytes:
        """Return the bytes of *token*; those of a special token are its name."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(self._checked(token))
        return piece

    def _piece(self, token: int, size: int = PIECE_BYTES) -> bytes:
        # Each call has its own buffer, because the thread of `MatchingVocab` calls this, too.
        buffer = ctypes.create_string_buffer(size)
        length = lib.llama_token_to_piece(self.pointer, token, buffer, size, 0, True)
        return self._piece(token, -length) if length < 0 else buffer.raw[:length]

    def is_control(self, token: int) -> bool:
        """Return whether *token* is a special token that does not stand for text."""
        return bool(lib.llama_vocab_is_control(self.pointer, self._checked(token)))

    def is_eog(self, token: int) -> bool:
        """Return whether *token* ends a generation."""
        return bool(lib.llama_vocab_is_eog(self.pointer, self._checked(token)))

    def _checked(self, token: int) -> int:
        # llama.cpp would throw a C++ exception, which ends the process.
        if not 0 <= token < self.size:
            raise InvalidArgument(f"token {token} is not one of the model's {self.size}")
        return token

    def spelled(self, data: bytes, special: bool = False) -> list[int]:
        """Return tokens whose pieces make up *data*, which may be any bytes; none if that fails.

        They are the tokens of the text if tokenizing adds nothing to it, or those that it has
        behind another text, else one for each byte. If *special*, names of special tokens become
        these tokens.
        """

        def tokens_of(text: bytes) -> list[int]:
            return self.tokenize(text, special=special, bos=False)

        try:
            for tokens in (tokens_of(data), _without_space(data, tokens_of(_BREAK), tokens_of)):
                if b"".join(map(self.piece, tokens)) == data:
                    return tokens
        except InvalidArgument:
            pass
        if self._bytes is None:
            pieces = ((self._piece(token), token) for token in range(self.size))
            self._bytes = {piece: token for piece, token in pieces if len(piece) == 1}
        found = [self._bytes.get(bytes((byte,))) for byte in data]
        return [token for token in found if token is not None] if None not in found else []

    def suppressed(self) -> tuple[int, ...]:
        """Return the tokens that must never be generated, according to the model's file."""
        if self._suppressed is None:
            count = ctypes.c_int32(0)
            tokens = lib.llama_vocab_get_suppress_tokens(self.pointer, ctypes.byref(count))
            self._suppressed = tuple(tokens[: count.value]) if tokens else ()
        return self._suppressed

    def eog(self) -> tuple[int, ...]:
        """Return all tokens that end a generation, the one that the model's file names first.

        The first call checks every token.
        """
        if self._eog is None:
            found: list[int] = np.flatnonzero(self.flags("llama_vocab_is_eog")).tolist()
            own = int(lib.llama_vocab_eos(self.pointer))
            self._eog = tuple(sorted(found, key=lambda token: token != own))
        return self._eog

    def special(self) -> list[int]:
        """Return the control tokens that end no generation; the first call checks every token."""
        if self._special is None:
            control, ends = self.flags("llama_vocab_is_control"), self.eog()
            control[list(ends)] = False
            self._special = np.flatnonzero(control).tolist()
        return self._special

    def flags(self, function: str) -> NDArray[np.bool_]:
        """Return the results of a *function* of llama.cpp for all tokens."""
        call = raw_function(function, ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32)
        parts = [
            np.fromiter(map(call, repeat(self.address), tokens), np.bool_, len(tokens))
            for tokens in self.parts()
        ]
        return np.concatenate(parts)

    def parts(self) -> Iterator[range]:
        """Yield the tokens in parts, because no other thread gets the GIL during a loop in C."""
        for begin in range(0, self.size, PART_TOKENS):
            yield range(begin, min(begin + PART_TOKENS, self.size))
