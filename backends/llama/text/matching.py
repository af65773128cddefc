"""The vocabulary in llguidance's form."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendError, InferdError
from ...grammars.formats import VocabularyFacts
from ...grammars.native import TOKENS_MIN, MatchingTokenizer
from .vocab import Vocab, raw_function

__all__ = ("BYTES_PER_TOKEN", "MatchingVocab", "read_pieces")

BYTES_PER_TOKEN = 360
"""Memory of llguidance's form and of what making it leaves behind (measured by the growth of the
process, with 49k and 262k tokens)."""
MATCHING_NICE = 5
"""The niceness of the thread while it runs without the GIL. Beside a busy thread on its core it
gets a quarter of the time. Beside seven busy threads on two cores, making the form took 26 to 42 s
with 10, and 6 to 9 s with 5.
"""
_SPECIAL = 0xFF
"""Marks tokens that no text contains."""
_PIECE_BYTES = 63
"""Longer pieces are read one by one."""
_PAUSE_S = 20e-6
"""Pause after some tokens, in which a thread that waits for the GIL gets it."""
_NAME = re.compile(r"<[^\[>][^>]*>")
_NAMES_MAX = 1000
_PART_BYTES = 512
"""Bytes of a forced text that are tokenized at once. With some vocabularies the time grows faster
than the size: with one of bytes, 64 kB took 0.7 s.
"""

OpenVocab = Callable[[], AbstractContextManager[Vocab]]


class MatchingVocab:
    """Makes llguidance's form of a model's vocabulary in a thread, while llama.cpp reads the model.

    The thread opens the vocabulary itself, because llama.cpp returns a model's vocabulary only once
    it has read the whole model.

    Tokens are special or text, by their type in the model's file. Control tokens are special: no
    text contains them, so a grammar cannot spell them, only name them. All others are text, also
    the user-defined ones in angle brackets. Gemma has 72 of them, such as `<table>` and `<h1>`. An
    answer shows them, `.` and a JSON string match them, and llama.cpp's tokenizer always makes one
    token of their text. (`</s>`, one of the 72, is special, as llama.cpp takes it for an end mark.)
    So a vocabulary decides whether `<tool_call>` in a structural tag or a Lark grammar is matched
    as a token or as text.
    """

    def __init__(self) -> None:
        self._vocab: Vocab | None = None
        self._tokenizer: MatchingTokenizer | None = None
        self._special: tuple[tuple[int, int], ...] = ()
        self._pieces: _Pieces | None = None
        self._last: tuple[bytes, list[int]] = b"", []
        """The text tokenized last, and its first tokens."""
        self._error: InferdError | None = None
        self._thread: threading.Thread | None = None

    def begin(self, open_vocab: OpenVocab) -> None:
        """Start the thread, which reads the vocabulary that *open_vocab* opens.

        :raises BackendError: the system has no more threads.
        """
        self._thread = threading.Thread(
            target=self._make, args=(open_vocab,), name="grammar vocabulary", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._thread = None
            raise BackendError(
                f"the thread for the vocabulary of grammars cannot be started: {exc}",
                hint="raise the limit on threads: TasksMax of the service, or ulimit -u",
            ) from None

    def attach(self, vocab: Vocab) -> VocabularyFacts:
        """Return the facts that grammars are compiled with. *vocab* is the loaded model's; it must
        outlive this object. If no thread was started, one is started now, which reads *vocab*.
        """
        self._vocab = vocab
        if self._thread is None:
            self.begin(lambda: nullcontext(vocab))
        return VocabularyFacts(
            size=vocab.size,
            ends=vocab.eog,
            tokenizer=self.wait,
            special=self._get_special,
            names_in=self._names_in,
            special_in=self._special_in,
            piece=self._piece,
        )

    def wait(self) -> MatchingTokenizer:
        """Return llguidance's form; wait until it is complete.

        :raises InferdError: the form could not be made.
        """
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._tokenizer is not None, "the thread has failed"
        return self._tokenizer

    def _get_special(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of special tokens; wait until they are known."""
        self.wait()
        return self._special

    def _piece(self, token: int) -> bytes:
        """Return the bytes of *token*, in any thread; `Vocab.piece` belongs to the engine's."""
        self.wait()
        assert self._pieces is not None and self._vocab is not None
        piece = self._pieces.join([token])
        return piece[1:] if self._vocab.is_control(token) else piece

    def _make(self, open_vocab: OpenVocab) -> None:
        try:
            with open_vocab() as vocab:
                ends, control = vocab.eog(), vocab.flags("llama_vocab_is_control")
                lengths, texts = read_pieces(vocab, control)
            self._special = _ranges(np.flatnonzero(control))
            if not ends:  # a matcher needs a token that ends the answer
                name = bytes((_SPECIAL,)) + b"<end>"
                ends, texts = (len(lengths),), texts + name
                lengths = np.append(lengths, np.uint32(len(name)))
            self._pieces = pieces = _Pieces(lengths, texts)
            with suppress(OSError):  # not before, when the thread held the GIL that others wait for
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), MATCHING_NICE)
            self._tokenizer = MatchingTokenizer(
                lengths, texts, ends, lambda text: self._tokenize(text, pieces)
            )
        except InferdError as exc:
            self._error = exc

    def _tokenize(self, text: bytes, pieces: _Pieces) -> list[int]:
        """Return the tokens of *text*, without what llama.cpp may add in front. If llama.cpp
        changes the text, return one token for each byte, or none.

        For each mask, llguidance requests the tokens of all the text that a grammar forces, which
        may be a constant of 64 kB. Only the beginning is tokenized, in parts. The tokens of a text
        are used again for its rest.
        """
        if len(text) <= _PART_BYTES:
            return self._tokenize_part(text, pieces)
        last, tokens = self._last
        rest = pieces.tokens_from(tokens, len(last) - len(text)) if last.endswith(text) else []
        if len(rest) < TOKENS_MIN:
            rest = self._tokenize_begin(text, pieces)
        self._last = text, rest
        return rest

    def _tokenize_begin(self, text: bytes, pieces: _Pieces) -> list[int]:
        tokens: list[int] = []
        for part in _parts(text):
            found = self._tokenize_part(part, pieces)
            tokens += found
            if not found:
                return []
            if len(tokens) >= TOKENS_MIN:
                break
        return tokens

    def _tokenize_part(self, text: bytes, pieces: _Pieces) -> list[int]:
        vocab = self._vocab
        if vocab is None:  # the model is closed
            return []
        for before in (b"", _BEFORE):
            tokens = vocab.tokenize(before + text, special=False, bos=False)
            head = vocab.tokenize(before, special=False, bos=False)
            found = tokens[len(head) :]
            if tokens[: len(head)] == head and pieces.join(found) == text:
                return found
        return vocab.spelled(text)

    def _names_in(self, grammar: str) -> dict[str, int]:
        """Return the tokens that *grammar* may name, such as `<think>`."""
        assert self._vocab is not None
        found = {}
        for name in dict.fromkeys(_NAME.findall(grammar)[:_NAMES_MAX]):
            tokens = self._vocab.tokenize(name.encode(), special=True, bos=False)
            if len(tokens) == 1:
                found[name] = tokens[0]
        return found

    def _special_in(self, text: str) -> list[tuple[str, int]]:
        """Return the special tokens that llama.cpp finds in *text*, in their order."""
        vocab = self._vocab
        assert vocab is not None
        tokens = vocab.tokenize(text.encode(), special=True, bos=False)
        return [(self._piece(t).decode(), t) for t in tokens if vocab.is_control(t)]

    def close(self) -> None:
        """Wait for the thread, and free the memory."""
        if self._thread is not None:
            self._thread.join()
        self._tokenizer = self._vocab = None


_BEFORE = b"\x02"
"""Stands before a text where llama.cpp would put a space in front of it."""


def _parts(text: bytes) -> Iterator[bytes]:
    """Yield parts of a text in UTF-8, each of whole characters."""
    begin = 0
    while begin < len(text):
        end = begin + _PART_BYTES
        while end < len(text) and text[end] & 0xC0 == 0x80:
            end += 1
        yield text[begin:end]
        begin = end


def _ranges(tokens: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the first and last numbers of the runs in *tokens*, which ascend."""
    runs: list[tuple[int, int]] = []
    for token in map(int, tokens):
        if runs and token == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], token
        else:
            runs.append((token, token))
    return tuple(runs)


class _Pieces:
    """The texts of all tokens."""

    def __init__(self, lengths: NDArray[np.uint32], texts: bytes):
        # An array, whose numbers are read in a third of the time of numpy's.
        self._bounds = array("I", [0])
        self._bounds.frombytes(np.cumsum(lengths, dtype=np.uintc).tobytes())
        self._texts = texts

    def join(self, tokens: list[int]) -> bytes:
        """Return the text of *tokens*."""
        bounds, texts = self._bounds, self._texts
        return b"".join([texts[bounds[token] : bounds[token + 1]] for token in tokens])

    def tokens_from(self, tokens: list[int], begin: int) -> list[int]:
        """Return those of *tokens* behind their first *begin* bytes; none if one extends across."""
        for index, token in enumerate(tokens):
            if begin <= 0:
                return tokens[index:] if begin == 0 else []
            begin -= self._bounds[token + 1] - self._bounds[token]
        return []


def read_pieces(vocab: Vocab, control: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], bytes]:
    """Return the lengths and the texts of all tokens; those in *control* are marked."""
    lengths = np.empty(vocab.size, dtype=np.uint32)
    texts = bytearray()
    for tokens in vocab.parts():
        part = slice(tokens.start, tokens.stop)
        lengths[part], found = _read_part(vocab, tokens, control[part])
        texts += found
        time.sleep(_PAUSE_S)
    return lengths, bytes(texts)


def _read_part(
    vocab: Vocab, tokens: range, control: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], bytes]:
    """Return the lengths and the texts of some tokens."""
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    arguments = pointer, number, pointer, number, number, ctypes.c_bool
    read = raw_function("llama_token_to_piece", number, *arguments)
    width = 1 + _PIECE_BYTES
    table = np.full((len(tokens), width), _SPECIAL, dtype=np.uint8)
    addresses = itertools.count(table.ctypes.data + 1, width)
    same = map(itertools.repeat, (_PIECE_BYTES, 0, True))
    results = map(read, itertools.repeat(vocab.address), tokens, addresses, *same)
    sizes = np.fromiter(results, np.int64, len(tokens))
    if (sizes < 0).any():
        marks = [bytes((_SPECIAL,)) if marked else b"" for marked in control.tolist()]
        texts = [mark + vocab.piece(token) for mark, token in zip(marks, tokens, strict=True)]
        return np.array(list(map(len, texts))), b"".join(texts)
    columns = np.arange(width)
    chosen = (columns >= 1 - control[:, None]) & (columns <= sizes[:, None])
    return sizes + control, table[chosen].tobytes()
