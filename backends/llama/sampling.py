"""Sampler chains: how a token is drawn from a row of logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ..errors import BackendError
from ..params import SamplingParams
from .grammar import Grammar
from .lazy import LazyGrammar
from .samplers import Prototypes, Setup, Stage, biases_of, logit_bias, stages_of
from .vocab import Vocab

__all__ = ("Candidates", "LlamaSampler")


class LlamaSampler:
    """One turn's chain: the biases, the samplers in their order, the last of which picks.

    Those that draw by chance are made anew for each token, so that a turn goes on in another
    process as it would have. Mirostat and adaptive-p, which learn while they draw, begin anew
    there.

    :raises InvalidArgument: a bias is for a token that the vocabulary does not have, or the
        grammar is none.
    """

    def __init__(
        self,
        vocab: Vocab,
        prototypes: Prototypes,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int],
        last_n_max: int,
    ):
        self._setup = Setup(vocab, prototypes, params, prompt, last_n_max)
        self._stages = stages_of(self._setup)
        self._chance = next((i for i, s in enumerate(self._stages) if s.chance), None)
        """The first stage that is made anew for each token; with it go those behind it."""
        biases = biases_of(vocab, params)
        self._before = 1 if biases else 0
        self._biased = np.array(list(biases), dtype=np.intp)
        self._added = np.array(list(biases.values()), dtype=np.float32)
        self.grammar: Grammar | None = None
        self._lazy: LazyGrammar | None = None
        if params.follows and params.grammar_triggers:
            self._lazy = LazyGrammar(vocab, prototypes, params, answer)
            self.grammar = self._lazy.grammar
        elif params.follows:
            self.grammar = Grammar(vocab, prototypes, params, answer)
        self.greedy = len(self._stages) == 1 and params.temp <= 0
        """The likeliest token, and nothing but biases to heed: no chain is needed."""
        self._chain = self._build(biases)

    def _build(self, biases: dict[int, float]) -> Any:
        chain_params = lib.llama_sampler_chain_default_params()
        chain_params.no_perf = True
        chain = lib.llama_sampler_chain_init(chain_params)
        if biases:
            lib.llama_sampler_chain_add(chain, logit_bias(self._setup.vocab.size, biases))
        for stage in self._stages:
            lib.llama_sampler_chain_add(chain, stage.make(self._setup, 0))
        return chain

    def likeliest(self, logits: NDArray[np.float32]) -> int:
        """Return the token with the highest logit, the first of equals, as the greedy sampler.

        Five times faster than a chain, which first makes a candidate of every token (measured:
        75 → 14 µs with 49k tokens). Changes *logits*, which nobody needs any more.
        """
        self._check_open()
        if len(self._biased):
            logits[self._biased] += self._added
        return int(logits.argmax())

    def chain(self, index: int) -> Any:
        """Return the chain, ready to draw token number *index*."""
        self._check_open()
        if self._chance is not None:
            self._renew(self._stages[self._chance :], self._before + self._chance, index)
        return self._chain

    def _renew(self, stages: Sequence[Stage], place: int, index: int) -> None:
        """Make the samplers anew that draw by chance; a chain can only be added to at its end."""
        taken = [lib.llama_sampler_chain_remove(self._chain, place) for _ in stages]
        for stage, sampler in zip(stages, taken, strict=True):
            if stage.chance:
                lib.llama_sampler_free(sampler)
            new = stage.make(self._setup, index) if stage.chance else sampler
            lib.llama_sampler_chain_add(self._chain, new)

    def _check_open(self) -> None:
        if self._chain is None:
            raise BackendError("the sampler is closed")

    @property
    def complete(self) -> bool:
        """Tell whether the answer may end here by its grammar."""
        return self.grammar is not None and self.grammar.complete

    @property
    def asleep(self) -> bool:
        """Tell whether there is a grammar that no trigger has woken yet."""
        return self._lazy is not None and self.grammar is None

    def hear(self, token: int) -> None:
        """Let a grammar that is asleep hear what was drawn without it."""
        assert self._lazy is not None
        self._lazy.hear(token)
        self.grammar = self._lazy.grammar

    def close(self) -> None:
        """Free the chain and all in it; twice is once."""
        if self.grammar is not None:
            self.grammar.close()
        chain, self._chain = self._chain, None
        if chain is not None:
            lib.llama_sampler_free(chain)


class Candidates:
    """A buffer of all tokens with their logits, used again for every row that was held."""

    def __init__(self, vocab_size: int):
        kind = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        self._ids = np.arange(vocab_size, dtype=np.int32)
        self._data = np.zeros(vocab_size, kind)
        self._array = lib.llama_token_data_array()

    def draw(self, chain: Any, row: NDArray[np.float32]) -> int:
        """Draw from a copied row as `llama_sampler_sample` draws from one in the context."""
        self._fill(row)
        token = self._pick(chain)
        lib.llama_sampler_accept(chain, token)
        return token

    def draw_by_grammar(
        self, sampler: LlamaSampler, grammar: Grammar, row: NDArray[np.float32], index: int
    ) -> int | None:
        """Draw a token that *grammar* allows; None if it allows none.

        The one that would be drawn is looked at first, all others only where it is not allowed:
        as `common_sampler_sample` does it (`common/sampling.cpp`).
        """
        self._fill(row)
        token = self._pick(chain := sampler.chain(index))
        if not grammar.allows(token):
            self._fill(row)
            grammar.mask(self._array)
            self._data["logit"][grammar.never] = -np.inf
            if not np.isfinite(self._data["logit"]).any():
                return None
            token = self._pick(chain := sampler.chain(index))
            if not grammar.allows(token):
                return None  # all that it allows are muted
        lib.llama_sampler_accept(chain, token)
        grammar.accept(token)
        return token

    def _fill(self, row: NDArray[np.float32]) -> None:
        data, array = self._data, self._array
        data["id"], data["logit"], data["p"] = self._ids, row, 0
        array.data = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
        array.size, array.selected, array.sorted = len(data), -1, False

    def _pick(self, chain: Any) -> int:
        array = self._array
        lib.llama_sampler_apply(chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise BackendError("the sampler chain picked nothing")
        return int(array.data[array.selected].id)
