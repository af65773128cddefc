"""Sampler chains: which of llama.cpp's samplers are used, with which parameters, and the sampling
of tokens from logits.
"""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...base import CompiledGrammar, TokenProbs
from ...errors import BackendError, InvalidArgument
from ...grammars.compiler import GrammarState
from ...params import SamplingParams
from ..lazy import LazyGrammar
from ..text.vocab import Vocab

_MASK = (1 << 64) - 1
_MIROSTAT_M = 100
"""Tokens from which mirostat 1 estimates: the number of its paper and of llama-server."""
PROTOTYPES_MAX = 16
_XTC = 0x787463
"""Mixed into the seed, so that xtc and the sampler that picks have different generators."""
_PENALTIES = {"penalties": "last_n_penalty", "dry": "dry_penalty_last_n"}
"""Samplers that penalize earlier tokens, with the parameter for how far each one looks back."""
_KEEP_TOP_TOKEN = ("top-k", "top-p", "min-p", "top-n-sigma", "temperature")


def seed_of(seed: int, index: int) -> int:
    """Return the 32-bit seed of the generator that samples token *index* of a turn.

    It is splitmix64 (Steele, Lea, Flood 2014) of both numbers, which unlike `hash` never changes.
    """
    x = ((seed & 0xFFFFFFFF) << 32 | (index & 0xFFFFFFFF)) + 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    mixed = (x ^ x >> 31) & 0xFFFFFFFF
    # LLAMA_DEFAULT_SEED requests a random seed.
    return mixed if mixed != lib.LLAMA_DEFAULT_SEED else 0


class Prototypes:
    """Samplers that are slow to create, of which each turn gets a copy. Owned by their model."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, Any] = OrderedDict()

    def copy(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a copy of the sampler of *key*, which *make* creates at the first call."""
        if key not in self._made:
            self._made[key] = make()
        self._made.move_to_end(key)
        if len(self._made) > PROTOTYPES_MAX:
            lib.llama_sampler_free(self._made.popitem(last=False)[1])
        return lib.llama_sampler_clone(self._made[key])

    def close(self) -> None:
        """Free all prototypes."""
        while self._made:
            lib.llama_sampler_free(self._made.popitem()[1])


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs of a turn's samplers; *ctx_size* is the largest window of penalties."""

    vocab: Vocab
    prototypes: Prototypes
    params: SamplingParams
    prompt: Sequence[int]
    ctx_size: int

    def window(self, last_n: int) -> int:
        """Return the window of a penalty in tokens; −1 means the whole context."""
        return self.ctx_size if last_n < 0 else min(last_n, self.ctx_size)


@dataclass(frozen=True, slots=True)
class Stage:
    """A kind of sampler: whether it *acts*, and how to *make* it for token number *index*.

    A *random* one is created again for each token.
    """

    make: Callable[[Setup, int], Any]
    acts: Callable[[Setup], bool] = lambda _: True
    random: bool = False


def stages_of(setup: Setup) -> list[Stage]:
    """Return the samplers that act, in the requested order; the last one picks the token."""
    return [*(_STAGES[name] for name in _acting(setup)), _picker(setup.params)]


def _acting(setup: Setup) -> list[str]:
    p = setup.params
    names = [n for n in p.samplers if n in _STAGES and _STAGES[n].acts(setup)]
    while p.temp <= 0 and names and names[-1] in _KEEP_TOP_TOKEN:
        names.pop()  # these matter only before another sampler, whose candidates they limit
    return names


def input_bounds(setup: Setup) -> tuple[int, int]:
    """Return how many top tokens a chain keeps first (0 if all), and the window of the penalties
    before that. These change only the logits of tokens in the window.
    """
    p, window = setup.params, 0
    for name in _acting(setup):
        if name == "top-k":
            return p.top_k, window
        if name not in _PENALTIES:
            return 0, 0
        window = max(window, setup.window(getattr(p, _PENALTIES[name])))
    return (1, window) if p.temp <= 0 else (0, 0)


def adapts(p: SamplingParams) -> bool:
    """Return whether the sampler that picks learns from each token that it picks."""
    return _picker(p) in (_MIROSTAT_1, _MIROSTAT_2, _ADAPTIVE_P)


def _picker(p: SamplingParams) -> Stage:
    if p.temp <= 0:
        return _GREEDY
    if p.mirostat:
        return _MIROSTAT_1 if p.mirostat == 1 else _MIROSTAT_2
    return _ADAPTIVE_P if "adaptive-p" in p.samplers and p.adaptive_target >= 0 else _DIST


def _strengths(p: SamplingParams) -> tuple[float, float, float]:
    return p.repeat_penalty, p.frequency_penalty, p.presence_penalty


def _penalties(s: Setup, _: int) -> Any:
    last_n = s.window(s.params.last_n_penalty)
    strengths = _strengths(s.params)
    sampler = lib.llama_sampler_init_penalties(s.vocab.size, last_n, *strengths)
    return _after_prompt(sampler, s, last_n)


def _dry(s: Setup, _: int) -> Any:
    p, last_n = s.params, s.window(s.params.dry_penalty_last_n)
    numbers = (p.dry_multiplier, p.dry_base, p.dry_allowed_length, last_n)
    breakers = [b.encode() for b in p.dry_sequence_breakers]

    def make() -> Any:  # reads the whole vocabulary for each breaker: 49 ms on Gemma
        array = (ctypes.c_char_p * len(breakers))(*breakers)
        return lib.llama_sampler_init_dry(s.vocab.pointer, *numbers, array, len(breakers))

    return _after_prompt(s.prototypes.copy((*numbers, *breakers), make), s, last_n)


def _after_prompt(sampler: Any, s: Setup, last_n: int) -> Any:
    for token in s.prompt[-last_n:]:
        lib.llama_sampler_accept(sampler, token)
    return sampler


def _xtc(s: Setup, index: int) -> Any:
    p, seed = s.params, seed_of(seed_of(s.params.seed, _XTC), index)
    return lib.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, seed)


def _mirostat_1(s: Setup, _: int) -> Any:
    p = s.params
    return lib.llama_sampler_init_mirostat(
        s.vocab.size, p.seed, p.mirostat_tau, p.mirostat_eta, _MIROSTAT_M
    )


def _stage(
    make: Callable[[SamplingParams], Any], acts: Callable[[SamplingParams], bool] = lambda _: True
) -> Stage:
    """Return a stage that depends only on the parameters."""
    return Stage(lambda s, _: make(s.params), lambda s: acts(s.params))


_STAGES: dict[str, Stage] = {
    "penalties": Stage(
        _penalties,
        lambda s: s.window(s.params.last_n_penalty) > 0 and _strengths(s.params) != (1.0, 0.0, 0.0),
    ),
    "dry": Stage(
        _dry, lambda s: s.params.dry_multiplier > 0 and s.window(s.params.dry_penalty_last_n) > 0
    ),
    "top-n-sigma": _stage(
        lambda p: lib.llama_sampler_init_top_n_sigma(p.top_n_sigma), lambda p: p.top_n_sigma > 0
    ),
    "top-k": _stage(lambda p: lib.llama_sampler_init_top_k(p.top_k), lambda p: p.top_k > 0),
    "typ-p": _stage(
        lambda p: lib.llama_sampler_init_typical(p.typ_p, p.min_keep), lambda p: p.typ_p < 1
    ),
    "top-p": _stage(
        lambda p: lib.llama_sampler_init_top_p(p.top_p, p.min_keep), lambda p: p.top_p < 1
    ),
    "min-p": _stage(
        lambda p: lib.llama_sampler_init_min_p(p.min_p, p.min_keep), lambda p: p.min_p > 0
    ),
    "xtc": Stage(
        _xtc, lambda s: s.params.xtc_probability > 0 and s.params.xtc_threshold <= 0.5, random=True
    ),
    "temperature": _stage(
        lambda p: lib.llama_sampler_init_temp_ext(p.temp, p.dynatemp_range, p.dynatemp_exponent),
        lambda p: p.temp != 1 or p.dynatemp_range > 0,
    ),
    "infill": Stage(lambda s, _: lib.llama_sampler_init_infill(s.vocab.pointer)),
}
"""By name; without adaptive-p, which picks the token and so comes last wherever it is named."""

_GREEDY = _stage(lambda _: lib.llama_sampler_init_greedy())
_DIST = Stage(lambda s, i: lib.llama_sampler_init_dist(seed_of(s.params.seed, i)), random=True)
_MIROSTAT_1 = Stage(_mirostat_1)
_MIROSTAT_2 = _stage(
    lambda p: lib.llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta)
)
_ADAPTIVE_P = _stage(
    lambda p: lib.llama_sampler_init_adaptive_p(p.adaptive_target, p.adaptive_decay, p.seed)
)


def biases_of(vocab: Vocab, params: SamplingParams) -> dict[int, float]:
    """Return by token the bias to add to its logit, which is −inf for suppressed tokens."""
    biases: dict[int, float] = {}
    for token, bias in params.logit_bias:
        for number in _token_ids(vocab, token):
            added = -math.inf if bias is False else float(bias)
            biases[number] = biases.get(number, 0.0) + added
    never = vocab.suppressed() + (vocab.eog() if params.ignore_eos else ())
    return biases | dict.fromkeys(never, -math.inf)


def _token_ids(vocab: Vocab, token: int | str) -> Sequence[int]:
    if isinstance(token, str):
        return vocab.tokenize(token.encode(), special=True, bos=False)
    if not 0 <= token < vocab.size:
        raise InvalidArgument(
            f"logit-bias: token {token} is not in the vocabulary of {vocab.size}",
            hint="`tokenize` returns the tokens of a text; a text can be given instead",
        )
    return (token,)


def logit_bias(vocab_size: int, biases: dict[int, float]) -> Any:
    """Return the sampler that adds *biases*."""
    array = (lib.llama_logit_bias * len(biases))()
    for entry, (token, bias) in zip(array, biases.items(), strict=True):
        entry.token, entry.bias = token, bias
    return lib.llama_sampler_init_logit_bias(vocab_size, len(biases), array)


Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

COLUMNS = 4096
CANDIDATES_MAX = 1024
"""The largest count that `top_candidates` serves, as it is fast only for a few of the tokens."""
_LOWEST = float(np.finfo(np.float32).min)
"""Replaces the logarithm of 0, as in llama-server, because JSON has no infinity."""


def top_candidates(logits: Logits, count: int) -> Ids | None:
    """Return tokens, ascending, that include the *count* top ones; None if they are too many.

    The logits are laid out as a table of `COLUMNS` columns. The bound is the *count*-th largest of
    the columns' highest logits. So at least *count* tokens reach the bound, and all that do are in
    the columns whose highest logit reaches it. Only one pass reads all logits, so that with 262k
    tokens this is 30 times faster than `numpy.argpartition`.
    """
    lines = len(logits) // COLUMNS
    if lines < 4 or not 0 < count <= CANDIDATES_MAX:
        return None
    table, rest = logits[: lines * COLUMNS].reshape(lines, COLUMNS), logits[lines * COLUMNS :]
    highest = table.max(axis=0)
    bound = np.partition(highest, COLUMNS - count)[COLUMNS - count]
    columns = np.flatnonzero(highest >= bound)
    line, column = np.nonzero(table[:, columns] >= bound)
    found = np.concatenate(
        (line * COLUMNS + columns[column], np.flatnonzero(rest >= bound) + lines * COLUMNS)
    )
    # NaNs compare as false; with flat logits all tokens are at the bound.
    return found if count <= len(found) <= 4 * CANDIDATES_MAX else None


def probs_before_sampling(
    logits: Logits, token: int, count: int, *, ranked: bool = False
) -> TokenProbs:
    """Return the model's logprobs of *token* and the *count* top tokens, before any sampler, and
    with *ranked* the token's rank, which takes another pass over the logits.
    """
    wanted = max(1, count)
    found = top_candidates(logits, wanted)
    ids = np.arange(len(logits)) if found is None else found
    ids = ids[np.argsort(-logits[ids], kind="stable")[:wanted]]
    high = logits[ids[0]]
    total = float(high) + math.log(float(np.exp(logits - high).sum(dtype=np.float64)))
    top = [(int(i), _bounded(float(logits[i]) - total)) for i in ids[:count]]
    rank = 1 + int(np.count_nonzero(logits > logits[token])) if ranked else 0
    return TokenProbs(token, _bounded(float(logits[token]) - total), top, rank)


def _bounded(logarithm: float) -> float:
    return max(_LOWEST, min(0.0, logarithm))


def probs_after_sampling(
    ids: NDArray[np.int32], probabilities: Logits, token: int, count: int
) -> TokenProbs:
    """Return the probability of *token* and the *count* top ones among a chain's candidates."""
    order = np.argsort(-probabilities, kind="stable")
    top = [(int(ids[i]), float(probabilities[i])) for i in order[:count] if probabilities[i] > 0]
    return TokenProbs(token, float(probabilities[ids == token].sum()), top)


_TRIED_MAX = 8
"""Top tokens that are tried before the mask of all tokens that a grammar allows."""


class LlamaSampler:
    """One turn's chain: the biases, then the samplers in order, the last of which picks a token.

    Random samplers are created again for each token, so that a turn continues identically in
    another process. Only mirostat and adaptive-p, which adapt while they sample, start over there.
    *grammar* is the turn's grammar at its beginning; the sampler owns it. For the errors see
    `LanguageModel.sampler`.
    """

    def __init__(
        self,
        vocab: Vocab,
        prototypes: Prototypes,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int],
        last_n_max: int,
        grammar: GrammarState | None = None,
    ):
        self._setup = Setup(vocab, prototypes, params, prompt, last_n_max)
        self._stages = stages_of(self._setup)
        self._random = next((i for i, s in enumerate(self._stages) if s.random), None)
        """The first stage that is created again for each token; later stages are re-added."""
        biases = biases_of(vocab, params)
        self._stages_begin = 1 if biases else 0
        self._biased = np.array(list(biases), dtype=np.intp)
        self._biases = np.array(list(biases.values()), dtype=np.float32)
        self._suppressed = self._biased[np.isneginf(self._biases)]
        top, window = input_bounds(self._setup)
        self._top = top if window + len(biases) <= CANDIDATES_MAX // 2 else 0
        """The number of top tokens that the chain keeps at first; 0 if it keeps all."""
        self._recent = deque(prompt[-window:] if window else (), maxlen=window)
        """Tokens whose logits the penalties may change."""
        self.grammar: GrammarState | None = None
        self._lazy: LazyGrammar | None = None
        if grammar is not None and params.grammar_triggers:
            self._lazy = LazyGrammar(vocab, grammar, params, answer)
            self.grammar = self._lazy.grammar
        elif grammar is not None:
            grammar.replay(answer)
            self.grammar = grammar
        self.params = params
        self._jumps = params.jump_forward and not params.n_probs and not adapts(params)
        self.greedy = len(self._stages) == 1 and params.temp <= 0
        """Whether the highest logit after biases wins, so that no chain is needed."""
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
    def needs_only_chain(self) -> bool:
        """Whether the chain samples the token alone, from all candidates."""
        return not (self._top or self.greedy or self.params.n_probs) and self.grammar is None

    def argmax_token(self, logits: Logits) -> int:
        """Return the token with the highest logit, the first of equals, like the greedy sampler.

        This is five times faster than a chain, which first makes a candidate of every token
        (measured: 75 → 14 µs with 49k tokens). Changes *logits*.
        """
        self._check_open()
        if len(self._biased):
            logits[self._biased] += self._biases
        return int(logits.argmax())

    def allowed_argmax(self, grammar: GrammarState, logits: Logits) -> int | None:
        """Return the token with the highest logit of those that *grammar* allows; None if there are
        none. Changes *logits*.

        The top tokens are tried first, because one of them takes 0.1 ms with 262k tokens, and a
        mask of all tokens up to some ms.
        """
        token = self.argmax_token(logits)
        for _ in range(_TRIED_MAX):
            if logits[token] == -np.inf:  # only suppressed tokens are left
                break
            if grammar.allows(token):
                return token
            logits[token] = -np.inf
            token = int(logits.argmax())
        allowed = self.can_sample(grammar.allowed())
        return int(allowed[logits[allowed].argmax()]) if len(allowed) else None

    def short_list(self, logits: Logits) -> NDArray[np.intp] | None:
        """Return the tokens that the chain can pick, ascending; None if it can pick any.

        A chain has a short list if it keeps only top tokens before it compares candidates.
        """
        if not self._top:
            return None
        changed = np.union1d(self._biased, np.array(self._recent, dtype=np.intp))
        ids = top_candidates(logits, self._top + len(changed))
        return ids if ids is None or not len(changed) else np.union1d(ids, changed)

    def can_sample(self, tokens: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return those of *tokens* that no bias suppresses."""
        return np.setdiff1d(tokens, self._suppressed, assume_unique=True)

    def accept(self, token: int) -> None:
        """Add *token* to what the samplers have seen."""
        lib.llama_sampler_accept(self._chain, token)
        self._recent.append(token)

    def take_forced(self) -> int | None:
        """Return the next token if the grammar forces it; see `Sampler.take_forced`.

        A token that a bias suppresses is never generated, not even if the grammar forces it.
        """
        token = self.grammar.forced if self._jumps and self.grammar is not None else None
        if token is None or token in self._suppressed:
            return None
        assert self.grammar is not None
        self._check_open()
        self.accept(token)
        self.grammar.accept(token)
        return token

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether the grammar allows *tokens* to come next; see `Sampler.allows`."""
        if self.grammar is None or not tokens:
            return True
        if len(tokens) == 1:
            return self.grammar.allows(tokens[0])
        state = self.grammar.copy()
        try:
            state.replay(tokens)
        except InvalidArgument:
            return False
        return True

    def force(self, token: int) -> None:
        """Continue after *token*; see `Sampler.force`."""
        self._check_open()
        self.accept(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        elif self.awaits_trigger:
            self.try_trigger(token)

    def start_grammar(self, grammar: CompiledGrammar) -> None:
        """Follow *grammar* from the next token on; see `Sampler.start_grammar`."""
        assert isinstance(grammar, GrammarState)
        self.grammar = grammar

    def chain(self, index: int) -> Any:
        """Return the chain, ready to sample token number *index*."""
        self._check_open()
        if self._random is not None:
            self._renew(self._stages[self._random :], self._stages_begin + self._random, index)
        return self._chain

    def _renew(self, stages: Sequence[Stage], begin: int, index: int) -> None:
        """Create the random samplers again, and add the stages behind them again, because a chain
        can only be extended at its end.
        """
        removed = [lib.llama_sampler_chain_remove(self._chain, begin) for _ in stages]
        for stage, sampler in zip(stages, removed, strict=True):
            if stage.random:
                lib.llama_sampler_free(sampler)
            new = stage.make(self._setup, index) if stage.random else sampler
            lib.llama_sampler_chain_add(self._chain, new)

    def _check_open(self) -> None:
        if self._chain is None:
            raise BackendError("the sampler is closed")

    @property
    def complete(self) -> bool:
        """Whether the answer may end here by its grammar."""
        return self.grammar is not None and self.grammar.complete

    @property
    def awaits_trigger(self) -> bool:
        """Whether a lazy grammar has not been started yet."""
        return self._lazy is not None and self.grammar is None

    def try_trigger(self, token: int) -> None:
        """Start the lazy grammar, if the sampled *token* completes a trigger."""
        assert self._lazy is not None
        self._lazy.add_token(token)
        self.grammar = self._lazy.grammar

    def close(self) -> None:
        """Free the chain and its samplers; a second call does nothing."""
        self.grammar = None
        chain, self._chain = self._chain, None
        if chain is not None:
            lib.llama_sampler_free(chain)


class Candidates:
    """A reusable buffer of candidates: tokens with their logits, of all tokens or a few."""

    def __init__(self, vocab_size: int):
        kind = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        self._ids = np.arange(vocab_size, dtype=np.int32)
        self._data = np.zeros(vocab_size, kind)
        self._array = lib.llama_token_data_array()
        self._begin = ctypes.cast(self._data.ctypes.data, lib.llama_token_data_p)
        self._reference = ctypes.byref(self._array)

    def sample(self, sampler: LlamaSampler, logits: Logits, index: int) -> int | None:
        """Sample a token from *logits* as `llama_sampler_sample` does from those in the context.

        Return None if a grammar allows no token. Set the sampler's `probs` if they are requested.
        """
        params, count = sampler.params, sampler.params.n_probs
        before = logits.copy() if count and not params.post_sampling_probs else None
        token = self._sample_one(sampler, logits, index)
        if not count or token is None:
            sampler.probs = None
        elif before is not None:
            sampler.probs = probs_before_sampling(before, token, count)
        elif params.temp <= 0:
            sampler.probs = TokenProbs(token, 1.0, [(token, 1.0)])
        else:
            remaining = self._remaining()
            sampler.probs = probs_after_sampling(remaining["id"], remaining["p"], token, count)
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
        self, sampler: LlamaSampler, grammar: GrammarState, logits: Logits, index: int
    ) -> int | None:
        """Sample a token without the grammar. Only if the grammar refuses it, sample from all
        allowed tokens, as `common_sampler_sample` does (`common/sampling.cpp`).
        """
        if sampler.greedy:
            found = sampler.allowed_argmax(grammar, logits)
        else:
            found = self._pick_allowed(sampler, grammar, logits, index)
        if found is not None:
            sampler.accept(found)
            grammar.accept(found)
        return found

    def _pick_allowed(
        self, sampler: LlamaSampler, grammar: GrammarState, logits: Logits, index: int
    ) -> int | None:
        self._fill_short(sampler, logits)
        token = self._pick(sampler.chain(index))
        if grammar.allows(token):
            return token
        allowed = sampler.can_sample(grammar.allowed())
        if not len(allowed):
            return None
        self._fill(allowed, logits[allowed])
        return self._pick(sampler.chain(index))

    def _fill_short(self, sampler: LlamaSampler, logits: Logits) -> None:
        ids = sampler.short_list(logits)
        if ids is None:
            self._fill(self._ids, logits)
        else:
            self._fill(ids, logits[ids])

    def _fill(self, ids: NDArray[Any], logits: Logits) -> None:
        part, array = self._data[: len(ids)], self._array
        part["id"], part["logit"], part["p"] = ids, logits, 0
        array.data = self._begin  # xtc advances it
        array.size, array.selected, array.sorted = len(ids), -1, False

    def _pick(self, chain: Any) -> int:
        array = self._array
        lib.llama_sampler_apply(chain, self._reference)
        if not 0 <= array.selected < array.size:
            raise BackendError("the sampler chain picked nothing")
        return int(array.data[array.selected].id)

    def _remaining(self) -> NDArray[Any]:
        """Return the candidates that the chain has not removed."""
        moved = ctypes.addressof(self._array.data.contents) - self._data.ctypes.data
        first = moved // self._data.itemsize
        return self._data[first : first + self._array.size]
