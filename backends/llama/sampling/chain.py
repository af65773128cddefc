"""Sampler chains: how a token is drawn from a row of logits."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...base import TokenProbs
from ...errors import BackendError
from ...params import SamplingParams
from ..grammar import Grammar
from ..lazy import LazyGrammar
from ..text.vocab import Vocab
from .logits import CANDIDATES_MAX, probs_after_sampling, probs_before_sampling, top_candidates
from .samplers import Prototypes, Setup, Stage, biases_of, logit_bias, seen_of, stages_of

Logits = NDArray[np.float32]


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
        kept, window = seen_of(self._setup)
        self._kept = kept if window + len(biases) <= CANDIDATES_MAX // 2 else 0
        self._recent = deque(prompt[-window:] if window else (), maxlen=window)
        """Tokens whose logits the first samplers may change."""
        self.grammar: Grammar | None = None
        self._lazy: LazyGrammar | None = None
        if params.has_grammar and params.grammar_triggers:
            self._lazy = LazyGrammar(vocab, prototypes, params, answer)
            self.grammar = self._lazy.grammar
        elif params.has_grammar:
            self.grammar = Grammar(vocab, prototypes, params, answer)
        self.certain = params.temp <= 0
        self.greedy = len(self._stages) == 1 and self.certain
        """The likeliest token, and nothing but biases to heed: no chain is needed."""
        self.n_probs = params.n_probs
        self.after_sampling = params.post_sampling_probs
        self.probs: TokenProbs | None = None
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

    @property
    def whole(self) -> bool:
        """Tell whether nothing but its chain is asked for, which may come to any token."""
        return not (self._kept or self.greedy or self.n_probs) and self.grammar is None

    def argmax_token(self, logits: Logits) -> int:
        """Return the token with the highest logit, the first of equals, as the greedy sampler.

        Five times faster than a chain, which first makes a candidate of every token (measured:
        75 → 14 µs with 49k tokens). Changes *logits*, which are used up.
        """
        self._check_open()
        if len(self._biased):
            logits[self._biased] += self._added
        return int(logits.argmax())

    def short_list(self, logits: Logits) -> NDArray[np.intp] | None:
        """Return the tokens that the chain can come to, ascending: it keeps the likeliest before it
        looks at them together. None where it may come to any.
        """
        if not self._kept:
            return None
        touched = np.union1d(self._biased, np.array(self._recent, dtype=np.intp))
        ids = top_candidates(logits, self._kept + len(touched))
        return ids if ids is None or not len(touched) else np.union1d(ids, touched)

    def accept(self, token: int) -> None:
        """Go on behind *token*."""
        lib.llama_sampler_accept(self._chain, token)
        self._recent.append(token)

    def chain(self, index: int) -> Any:
        """Return the chain, ready to sample token number *index*."""
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
    def awaits_trigger(self) -> bool:
        """Whether there is a lazy grammar that no trigger has started yet."""
        return self._lazy is not None and self.grammar is None

    def try_trigger(self, token: int) -> None:
        """Start the lazy grammar, if the sampled *token* completes a trigger."""
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
    """A buffer of tokens with their logits, used again for every row: of all, or of a few."""

    def __init__(self, vocab_size: int):
        kind = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        self._ids = np.arange(vocab_size, dtype=np.int32)
        self._data = np.zeros(vocab_size, kind)
        self._array = lib.llama_token_data_array()
        self._begin = ctypes.cast(self._data.ctypes.data, lib.llama_token_data_p)
        self._reference = ctypes.byref(self._array)

    def sample(self, sampler: LlamaSampler, logits: Logits, index: int) -> int | None:
        """Sample a token from *logits* as `llama_sampler_sample` does from those in the context;
        None if a grammar allows none. Set the sampler's `probs`, where they are requested.
        """
        told = sampler.n_probs
        before = logits.copy() if told and not sampler.after_sampling else None
        token = self._sample_one(sampler, logits, index)
        if not told or token is None:
            sampler.probs = None
        elif before is not None:
            sampler.probs = probs_before_sampling(before, token, told)
        elif sampler.certain:
            sampler.probs = TokenProbs(token, 1.0, [(token, 1.0)])
        else:
            left = self._left()
            sampler.probs = probs_after_sampling(left["id"], left["p"], token, told)
        return token

    def _sample_one(self, sampler: LlamaSampler, logits: Logits, index: int) -> int | None:
        if sampler.grammar is not None:
            return self._sample_by_grammar(sampler, sampler.grammar, logits, index)
        if sampler.greedy:
            return sampler.argmax_token(logits)
        self._fill_short(sampler, logits)
        token = self._pick(sampler.chain(index))
        sampler.accept(token)
        return token

    def _sample_by_grammar(
        self, sampler: LlamaSampler, grammar: Grammar, logits: Logits, index: int
    ) -> int | None:
        """Check the token that would be sampled without the grammar first, and all others only
        where it is not allowed, as `common_sampler_sample` does (`common/sampling.cpp`).
        """
        self._fill_short(sampler, logits)
        token = self._pick(sampler.chain(index))
        if not grammar.allows(token):
            self._fill(self._ids, logits)
            grammar.mask(self._array)
            self._data["logit"][grammar.never] = -np.inf
            if not np.isfinite(self._data["logit"]).any():
                return None
            token = self._pick(sampler.chain(index))
            if not grammar.allows(token):
                return None  # all that it allows are muted
        sampler.accept(token)
        grammar.accept(token)
        return token

    def _fill_short(self, sampler: LlamaSampler, logits: Logits) -> None:
        ids = sampler.short_list(logits)
        if ids is None:
            self._fill(self._ids, logits)
        else:
            self._fill(ids, logits[ids])

    def _fill(self, ids: NDArray[Any], logits: Logits) -> None:
        part, array = self._data[: len(ids)], self._array
        part["id"], part["logit"], part["p"] = ids, logits, 0
        array.data = self._begin  # xtc moves it on
        array.size, array.selected, array.sorted = len(ids), -1, False

    def _pick(self, chain: Any) -> int:
        array = self._array
        lib.llama_sampler_apply(chain, self._reference)
        if not 0 <= array.selected < array.size:
            raise BackendError("the sampler chain picked nothing")
        return int(array.data[array.selected].id)

    def _left(self) -> NDArray[Any]:
        """Return the candidates that the chain has left."""
        moved = ctypes.addressof(self._array.data.contents) - self._data.ctypes.data
        first = moved // self._data.itemsize
        return self._data[first : first + self._array.size]
