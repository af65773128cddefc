"""What a sampler chain is made of: which samplers of llama.cpp act, and with which numbers."""

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
"""Tokens that mirostat 1 estimates from: its paper's and llama-server's number."""
PROTOTYPES = 16
_XTC = 0x787463
"""Xtc draws with another generator than the sampler that picks."""
_BACK = {"penalties": "last_n_penalty", "dry": "dry_penalty_last_n"}
"""Samplers that change the logits of tokens that were there, each by itself."""
_KEEP_THE_LIKELIEST = ("top-k", "top-p", "min-p", "top-n-sigma", "temperature")


def seed_of(seed: int, index: int) -> int:
    """Return the seed of the generator that draws token *index* of a turn: 32 bits.

    splitmix64 (Steele, Lea, Flood 2014) over both numbers: stable for ever, unlike `hash`.
    """
    x = ((seed & 0xFFFFFFFF) << 32 | (index & 0xFFFFFFFF)) + 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    mixed = (x ^ x >> 31) & 0xFFFFFFFF
    # LLAMA_DEFAULT_SEED asks for a random one.
    return mixed if mixed != lib.LLAMA_DEFAULT_SEED else 0


class Prototypes:
    """Samplers that take long to make, of which each turn gets a copy. Owned by their model."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, Any] = OrderedDict()

    def copy(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a copy of the sampler of *key*, making that if it is not there."""
        if key not in self._made:
            self._made[key] = make()
        self._made.move_to_end(key)
        if len(self._made) > PROTOTYPES:
            lib.llama_sampler_free(self._made.popitem(last=False)[1])
        return lib.llama_sampler_clone(self._made[key])

    def close(self) -> None:
        """Free them."""
        while self._made:
            lib.llama_sampler_free(self._made.popitem()[1])


@dataclass(frozen=True, slots=True)
class Setup:
    """What the samplers of a turn are made from; *ctx_size* is the longest look back."""

    vocab: Vocab
    prototypes: Prototypes
    params: SamplingParams
    prompt: Sequence[int]
    ctx_size: int

    def window(self, asked: int) -> int:
        """Return how many tokens a penalty looks back on; −1 asks for the context."""
        return self.ctx_size if asked < 0 else min(asked, self.ctx_size)


@dataclass(frozen=True, slots=True)
class Stage:
    """A kind of sampler: whether it *acts*, and how it is made for token number *index*.

    One of *chance* draws by chance: it is made anew for each token.
    """

    acts: Callable[[Setup], bool]
    make: Callable[[Setup, int], Any]
    chance: bool = False


def stages_of(setup: Setup) -> list[Stage]:
    """Return the samplers that act, in the order that was asked for; the last one picks."""
    return [*(_STAGES[name] for name in _acting(setup)), _picker(setup.params)]


def _acting(setup: Setup) -> list[str]:
    p = setup.params
    names = [n for n in p.samplers if n in _STAGES and _STAGES[n].acts(setup)]
    while p.temp <= 0 and names and names[-1] in _KEEP_THE_LIKELIEST:
        names.pop()  # those before another sampler count: they bound what that one sees
    return names


def seen_of(setup: Setup) -> tuple[int, int]:
    """Return how many of the likeliest tokens a chain looks at together, 0 for all, and how many
    tokens back those look that come before: they change the logits of these alone.
    """
    p, window = setup.params, 0
    for name in _acting(setup):
        if name == "top-k":
            return p.top_k, window
        if name not in _BACK:
            return 0, 0
        window = max(window, setup.window(getattr(p, _BACK[name])))
    return (1, window) if p.temp <= 0 else (0, 0)


def _picker(p: SamplingParams) -> Stage:
    if p.temp <= 0:
        return _GREEDY
    if p.mirostat:
        return _MIROSTAT_1 if p.mirostat == 1 else _MIROSTAT_2
    return _ADAPTIVE_P if "adaptive-p" in p.samplers and p.adaptive_target >= 0 else _DIST


def _penalties_act(s: Setup) -> bool:
    p = s.params
    penalties = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
    return s.window(p.last_n_penalty) > 0 and penalties != (1.0, 0.0, 0.0)


def _penalties(s: Setup, _: int) -> Any:
    p, last_n = s.params, s.window(s.params.last_n_penalty)
    penalties = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
    return _fed(lib.llama_sampler_init_penalties(s.vocab.size, last_n, *penalties), s, last_n)


def _dry(s: Setup, _: int) -> Any:
    p, last_n = s.params, s.window(s.params.dry_penalty_last_n)
    numbers = (p.dry_multiplier, p.dry_base, p.dry_allowed_length, last_n)
    breakers = [b.encode() for b in p.dry_sequence_breakers]

    def make() -> Any:  # looks at the whole vocabulary for each breaker: 49 ms on Gemma
        array = (ctypes.c_char_p * len(breakers))(*breakers)
        return lib.llama_sampler_init_dry(s.vocab.pointer, *numbers, array, len(breakers))

    return _fed(s.prototypes.copy((*numbers, *breakers), make), s, last_n)


def _fed(sampler: Any, s: Setup, last_n: int) -> Any:
    for token in s.prompt[-last_n:]:
        lib.llama_sampler_accept(sampler, token)
    return sampler


def _temperature(s: Setup, _: int) -> Any:
    p = s.params
    return lib.llama_sampler_init_temp_ext(p.temp, p.dynatemp_range, p.dynatemp_exponent)


def _xtc(s: Setup, index: int) -> Any:
    p, seed = s.params, seed_of(seed_of(s.params.seed, _XTC), index)
    return lib.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, seed)


def _mirostat_1(s: Setup, _: int) -> Any:
    p = s.params
    return lib.llama_sampler_init_mirostat(
        s.vocab.size, p.seed, p.mirostat_tau, p.mirostat_eta, _MIROSTAT_M
    )


def _mirostat_2(s: Setup, _: int) -> Any:
    p = s.params
    return lib.llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta)


def _adaptive_p(s: Setup, _: int) -> Any:
    p = s.params
    return lib.llama_sampler_init_adaptive_p(p.adaptive_target, p.adaptive_decay, p.seed)


_STAGES: dict[str, Stage] = {
    "penalties": Stage(_penalties_act, _penalties),
    "dry": Stage(
        lambda s: s.params.dry_multiplier > 0 and s.window(s.params.dry_penalty_last_n) > 0, _dry
    ),
    "top-n-sigma": Stage(
        lambda s: s.params.top_n_sigma > 0,
        lambda s, _: lib.llama_sampler_init_top_n_sigma(s.params.top_n_sigma),
    ),
    "top-k": Stage(
        lambda s: s.params.top_k > 0, lambda s, _: lib.llama_sampler_init_top_k(s.params.top_k)
    ),
    "typ-p": Stage(
        lambda s: s.params.typ_p < 1,
        lambda s, _: lib.llama_sampler_init_typical(s.params.typ_p, s.params.min_keep),
    ),
    "top-p": Stage(
        lambda s: s.params.top_p < 1,
        lambda s, _: lib.llama_sampler_init_top_p(s.params.top_p, s.params.min_keep),
    ),
    "min-p": Stage(
        lambda s: s.params.min_p > 0,
        lambda s, _: lib.llama_sampler_init_min_p(s.params.min_p, s.params.min_keep),
    ),
    "xtc": Stage(
        lambda s: s.params.xtc_probability > 0 and s.params.xtc_threshold <= 0.5, _xtc, chance=True
    ),
    "temperature": Stage(lambda s: s.params.temp != 1 or s.params.dynatemp_range > 0, _temperature),
    "infill": Stage(lambda _: True, lambda s, _: lib.llama_sampler_init_infill(s.vocab.pointer)),
}
"""Adaptive-p is not among them: it picks, and so comes last wherever it is named."""


def _picks(_: Setup) -> bool:
    return True


_GREEDY = Stage(_picks, lambda s, _: lib.llama_sampler_init_greedy())
_DIST = Stage(
    _picks, lambda s, i: lib.llama_sampler_init_dist(seed_of(s.params.seed, i)), chance=True
)
_MIROSTAT_1 = Stage(_picks, _mirostat_1)
_MIROSTAT_2 = Stage(_picks, _mirostat_2)
_ADAPTIVE_P = Stage(_picks, _adaptive_p)


def biases_of(vocab: Vocab, params: SamplingParams) -> dict[int, float]:
    """Return what the logits of tokens get more: what was asked for, and -inf for muted ones.

    :raises InvalidArgument: a token is not in the vocabulary.
    """
    biases: dict[int, float] = {}
    for token, bias in params.logit_bias:
        for number in _numbers(vocab, token):
            more = -math.inf if bias is False else float(bias)
            biases[number] = biases.get(number, 0.0) + more
    never = vocab.muted() + (vocab.eog() if params.ignore_eos else ())
    return biases | dict.fromkeys(never, -math.inf)


def _numbers(vocab: Vocab, token: int | str) -> Sequence[int]:
    if isinstance(token, str):
        return vocab.tokenize(token.encode(), special=True, bos=False)
    if not 0 <= token < vocab.size:
        raise InvalidArgument(
            f"logit-bias: token {token} is not in the vocabulary of {vocab.size}",
            hint="`tokenize` tells the tokens of a text; a text can be given instead",
        )
    return (token,)


def logit_bias(vocab_size: int, biases: dict[int, float]) -> Any:
    """Return the sampler that adds *biases*."""
    array = (lib.llama_logit_bias * len(biases))()
    for entry, (token, bias) in zip(array, biases.items(), strict=True):
        entry.token, entry.bias = token, bias
    return lib.llama_sampler_init_logit_bias(vocab_size, len(biases), array)
