"""A grammar that an answer follows: which tokens may come next."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

from llama_cpp import llama_cpp as lib

from ..errors import InvalidArgument
from ..params import SamplingParams
from .json_schema import gbnf_of
from .llama_log import capture
from .sampling.samplers import Prototypes
from .text.vocab import Vocab

__all__ = ("Grammar",)

_ROOT = b"root"
_CAUSE_CHARACTERS = 200


class Grammar:
    """The state of one answer's grammar, after the tokens of *answer*. Owned by its sampler.

    :raises InvalidArgument: the grammar is no GBNF, the schema cannot be made into one, or *answer*
        does not follow it.
    """

    def __init__(
        self,
        vocab: Vocab,
        prototypes: Prototypes,
        params: SamplingParams,
        answer: Sequence[int],
    ):
        self._vocab, self._says_text = vocab, bool(params.json_schema)
        key = ("grammar", params.grammar, params.json_schema)
        self._sampler = prototypes.copy(key, lambda: _parsed(vocab, _text_of(params)))
        self._one = (lib.llama_token_data * 1)()
        self._array = lib.llama_token_data_array(self._one, 1, -1, False)
        for token in answer:
            if not self.allows(token):
                self.close()
                raise InvalidArgument("the answer so far does not follow the grammar")
            self.accept(token)

    def allows(self, token: int) -> bool:
        """Tell whether *token* may come next."""
        if self._says_text and self._vocab.is_control(token) and not self._vocab.is_eog(token):
            return False
        self._one[0].id, self._one[0].logit = token, 1.0
        lib.llama_sampler_apply(self._sampler, ctypes.byref(self._array))
        return bool(self._one[0].logit == 1.0)

    @property
    def never(self) -> list[int]:
        """The special tokens that may not come where text is to come: their names are text to
        llama.cpp, and nothing to who reads the answer.
        """
        return self._vocab.special() if self._says_text else []

    def mask(self, candidates: Any) -> None:
        """Let the logits of tokens that may not come next be −inf."""
        lib.llama_sampler_apply(self._sampler, ctypes.byref(candidates))

    @property
    def complete(self) -> bool:
        """Tell whether the answer may end here."""
        return any(self.allows(token) for token in self._vocab.eog()[:1])

    def accept(self, token: int) -> None:
        """Go on behind *token*, which is allowed: llama.cpp ends the process over another."""
        lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free it; twice is once."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            lib.llama_sampler_free(sampler)


def _text_of(params: SamplingParams) -> str:
    return params.grammar or gbnf_of(params.json_schema)


def _parsed(vocab: Vocab, text: str) -> Any:
    log = capture()
    log.clear()
    with _stderr() as said:
        sampler = lib.llama_sampler_init_grammar(vocab.pointer, text.encode(), _ROOT)
    if not sampler:
        first = next((line for line in said if line.startswith("parse: ")), log.cause())
        cause = first.removeprefix("parse: error parsing grammar: ")[:_CAUSE_CHARACTERS]
        raise InvalidArgument(
            f"grammar: {cause.strip()}",
            hint='GBNF begins at the rule `root`, such as: root ::= "yes" | "no"',
        )
    return sampler


@contextlib.contextmanager
def _stderr() -> Iterator[list[str]]:
    """Keep what llama.cpp says of a grammar past its own log: it is the client's to know, and it
    quotes his text.
    """
    said: list[str] = []
    kept = os.dup(2)
    try:
        with os.fdopen(os.memfd_create("stderr"), "rb+") as file:
            os.dup2(file.fileno(), 2)
            try:
                yield said
            finally:
                os.dup2(kept, 2)
            file.seek(0)
            said += file.read().decode("utf-8", "replace").splitlines()
    finally:
        os.close(kept)
