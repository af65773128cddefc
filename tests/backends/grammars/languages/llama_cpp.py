"""llama.cpp's own matcher of GBNF, as the reference for ours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from llama_cpp import llama_cpp as lib

from inferd.backends.llama.text.vocab import Vocab

__all__ = ("Reference",)

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`llama_token_data`. An array of its ctypes form takes longer to fill than to filter."""


class Reference:
    """The state of a GBNF grammar in llama.cpp. With a grammar that it refuses, `refused` is set.

    llama.cpp ends the process over a token that it does not allow.
    """

    def __init__(self, vocab: Vocab, grammar: str):
        self._sampler = lib.llama_sampler_init_grammar(vocab.pointer, grammar.encode(), b"root")
        self.refused = not self._sampler

    def allowed(self, tokens: Iterable[int]) -> list[int]:
        """Return those of *tokens* that may come next."""
        entries = np.ones(len(found := list(tokens)), _ENTRY)
        entries["id"] = found
        data = entries.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
        array = lib.llama_token_data_array(data, len(entries), -1, False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return list(entries["id"][entries["logit"] == 1.0].tolist())

    def accept(self, token: int) -> None:
        """Continue after *token*, which is allowed."""
        lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free the grammar."""
        if self._sampler:
            lib.llama_sampler_free(self._sampler)
