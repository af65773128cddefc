"""The vocabulary in llguidance's form."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator

from llama_cpp import llama_cpp as lib
from llguidance import LLTokenizer

from ...grammars.compiler import VocabularyFacts
from .vocab import PIECE_BYTES, Vocab

__all__ = ("BYTES_PER_TOKEN", "MatchingVocab")

BYTES_PER_TOKEN = 480
"""Memory of llguidance's form and of what making it leaves behind (measured by the growth of the
process: 490 with 49k tokens, 400 to 550 with 262k)."""
_SPECIAL = b"\xff"
"""Marks tokens that no text contains."""
_NAME = re.compile(r"<[^\[>][^>]*>")
_NAMES_MAX = 1000


class MatchingVocab:
    """Makes llguidance's form of *vocab*, which must outlive it, in a thread.

    That takes 0.13 s with 49k tokens and 1.1 s with 262k, for which llguidance holds the GIL. The
    thread starts as soon as there is a vocabulary, so that it runs while llama.cpp computes.

    Control tokens are not text: a grammar cannot spell them, only name them. User-defined tokens,
    such as Gemma's `<h1>`, are text: an answer shows them.
    """

    def __init__(self, vocab: Vocab):
        self._vocab = vocab
        self._tokenizer: LLTokenizer | None = None
        self._thread = threading.Thread(target=self._make, name="grammar vocabulary", daemon=True)
        self._thread.start()

    @property
    def facts(self) -> VocabularyFacts:
        """The facts that grammars are compiled with."""
        vocab = self._vocab
        return VocabularyFacts(vocab.size, vocab.eog, self._get, self._names_in)

    def _get(self) -> LLTokenizer:
        """Return llguidance's form; wait until it is complete."""
        self._thread.join()
        assert self._tokenizer is not None, "the thread has failed"
        return self._tokenizer

    def _make(self) -> None:
        vocab, ends = self._vocab, self._vocab.eog()
        pieces = list(_pieces(vocab))
        if not ends:  # a matcher needs a token that ends the answer
            pieces.append(_SPECIAL + b"<end>")
        self._tokenizer = LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
            tokens=pieces,
            vocab_ptr=ctypes.cast(vocab.pointer, ctypes.c_void_p).value,
            tokenize_fptr=ctypes.cast(lib._lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=list(ends) or [vocab.size],
            slices=LLTokenizer.json_slices(),
        )

    def _names_in(self, grammar: str) -> dict[str, int]:
        """Return the tokens that *grammar* may name, such as `<think>`."""
        found = {}
        for name in dict.fromkeys(_NAME.findall(grammar)[:_NAMES_MAX]):
            tokens = self._vocab.tokenize(name.encode(), special=True, bos=False)
            if len(tokens) == 1:
                found[name] = tokens[0]
        return found

    def close(self) -> None:
        """Wait for the thread, which reads the vocabulary, and free the memory."""
        self._thread.join()
        self._tokenizer = None


def _pieces(vocab: Vocab) -> Iterator[bytes]:
    """Yield the bytes of each token. Raw calls: those of the bindings take three times as long."""
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    address = ctypes.cast(lib._lib.llama_token_to_piece, pointer).value
    kind = ctypes.PYFUNCTYPE(number, pointer, number, pointer, number, number, ctypes.c_bool)
    assert address is not None
    read, start = kind(address), ctypes.cast(vocab.pointer, pointer).value
    buffer = ctypes.create_string_buffer(PIECE_BYTES)
    for token in range(vocab.size):
        length = read(start, token, ctypes.addressof(buffer), len(buffer), 0, True)
        if length < 0:  # the buffer is too small
            buffer = ctypes.create_string_buffer(-length)
            length = read(start, token, ctypes.addressof(buffer), len(buffer), 0, True)
        piece = ctypes.string_at(buffer, length)
        yield _SPECIAL + piece if vocab.is_control(token) else piece
