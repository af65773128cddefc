"""llama.cpp's own matcher of GBNF, as the reference for ours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from llama_cpp import llama_cpp as lib

from inferd.backends.llama.text.vocab import Vocab

__all__ = ("Reference",)


class Reference:
    """The state of a GBNF grammar in llama.cpp. With a grammar that it refuses, `refused` is set.

    llama.cpp ends the process over a token that it does not allow.
    """

    def __init__(self, vocab: Vocab, grammar: str):
        self._sampler = lib.llama_sampler_init_grammar(vocab.pointer, grammar.encode(), b"root")
        self.refused = not self._sampler

    def allowed(self, tokens: Iterable[int]) -> list[int]:
        """Return those of *tokens* that may come next."""
        entries = [(token, 1.0, 0.0) for token in tokens]
        data = (lib.llama_token_data * len(entries))(*entries)
        array = lib.llama_token_data_array(data, len(entries), -1, False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return [entry.id for entry in data if entry.logit == 1.0]

    def accept(self, token: int) -> None:
        """Continue after *token*, which is allowed."""
        lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free the grammar."""
        if self._sampler:
            lib.llama_sampler_free(self._sampler)
