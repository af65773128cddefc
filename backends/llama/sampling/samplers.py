"""The samplers of a chain: which of llama.cpp's are used, and with which parameters."""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_cpp import llama_cpp as lib

from ...errors import InvalidArgument
from ...params import SamplingParams
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
