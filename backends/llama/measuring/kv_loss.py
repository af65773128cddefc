"""The loss of quantized KV states, by the probabilities that a model gives to a fixed text.

Each piece of the text is computed in a context of each type, all with flash attention, so that only
the types differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from msgspec.structs import replace
from numpy.typing import NDArray

from ...batch import Chunk
from ...engine_options import EngineOptions
from ...model_spec import ModelSpec
from ..kv.context import LlamaContext
from ..llama_log import LogRing
from ..loading.opening import context_params, open_context
from .requests import KvLoss

TOKENS_MAX = 512
PIECE_TOKENS = 16
"""The tokens whose logits are in memory at the same time, in each context."""
REFERENCE = ("f16", "f16")
TEXT = """\
The lighthouse at the end of the pier was built in 1874, after three ships had run aground within a
single winter. Its first keepers, two retired coopers, kept a diary of the weather, the ships that
passed, and the price of lamp oil. "Oil is dear again," says the entry of the ninth of March, "and
the wind has not turned for eleven days." Nobody could have known that the same sentence would be
read aloud a hundred and fifty years later, in a room full of engineers, as an example of a
complaint that has never lost its meaning.

To compute the area of a circle, multiply the square of its radius by pi. A circle with a radius of
3 cm has an area of about 28.3 square centimetres; one with twice the radius has four times the
area, 113.1. The same rule explains why a large pizza is usually the better bargain: a diameter of
40 cm gives 1.78 times as much as one of 30 cm, while it seldom costs more than one and a half times
the price.

def moving_average(values, width):
    \"\"\"Return the means of all runs of *width* neighbouring values.\"\"\"
    if width < 1 or width > len(values):
        raise ValueError(f"width {width} does not fit {len(values)} values")
    total = sum(values[:width])
    means = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        means.append(total / width)
    return means

Question: Why does bread rise? Answer: Yeast feeds on the sugar in the dough and gives off carbon
dioxide. The gas is caught in a net of gluten, which stretches like many small balloons. In the oven
the gas expands once more, the water turns to steam, and at last the crust sets and the loaf keeps
its shape. Without salt the yeast works too fast, and the bread tastes of little.

Dear Ms. Okafor, thank you for your letter of 12 June. We have looked into the matter, and you are
right: the invoice lists 14 chairs, but only 12 were delivered. The two missing chairs will leave
our warehouse on Monday and should reach you by Wednesday at the latest. We have also taken 5 % off
the total, which is now 1,482.00 euros. Please accept our apologies for the trouble.
"""
_FINGERPRINT = "00" * 16


def measure_losses(
    model: Any,
    spec: ModelSpec,
    options: EngineOptions,
    tokens: Sequence[int],
    types: Sequence[tuple[str, str]],
    deadline: float,
    log: LogRing,
) -> list[KvLoss]:
    """Return the losses of *types* on the first of *tokens*, as many as are computed until
    *deadline*; empty if there are none.
    """
    tokens = tokens[:TOKENS_MAX]
    sums = [_Sum() for _ in types]
    with ExitStack() as stack:
        contexts = []
        for one in (REFERENCE, *types):
            context = _open(model, spec, options, one, log)
            stack.callback(context.close)
            contexts.append(context)
        for begin in range(0, len(tokens), PIECE_TOKENS):
            if time.monotonic() >= deadline:
                break
            piece = tokens[begin : begin + PIECE_TOKENS]
            expected, *found = (_log_probs(context, piece, begin) for context in contexts)
            for total, logs in zip(sums, found, strict=True):
                total.add(expected, logs)
    return [total.loss() for total in sums if total.count]


def _open(
    model: Any, spec: ModelSpec, options: EngineOptions, types: tuple[str, str], log: LogRing
) -> LlamaContext:
    keys, values = types
    changes: dict[str, Any] = {"cache_type_k": keys, "cache_type_v": values, "flash_attn": "on"}
    params = context_params(spec, replace(options, **changes), model)
    params.n_seq_max, params.n_ctx = 1, TOKENS_MAX
    params.n_batch = params.n_ubatch = params.n_outputs_max = PIECE_TOKENS
    log.clear()
    return LlamaContext(
        open_context(spec, params, model, log),
        model,
        vocab_size=int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))),
        fingerprint=_FINGERPRINT,
        logits_max=PIECE_TOKENS,
    )


def _log_probs(context: LlamaContext, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
    """Compute *tokens*; return the logarithms of the probabilities after each of them."""
    chunk = Chunk(0, tokens, position, len(tokens))
    context.check([chunk])
    indices = context.decode([chunk])[0]
    logits = np.stack([context.logits_at(index) for index in indices])
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


class _Sum:
    """The sums over the tokens so far."""

    def __init__(self) -> None:
        self.count = self._other_top = 0
        self._divergence = self._squares = 0.0

    def add(self, expected: NDArray[np.float32], found: NDArray[np.float32]) -> None:
        """Add the logarithms of the probabilities after some tokens, in two contexts."""
        difference = np.exp(expected) * (expected - found)
        divergences = difference.sum(axis=1, dtype=np.float64)
        self.count += len(divergences)
        self._divergence += float(divergences.sum())
        self._squares += float((divergences**2).sum())
        self._other_top += int((expected.argmax(axis=1) != found.argmax(axis=1)).sum())

    def loss(self) -> KvLoss:
        """Return the means."""
        mean = self._divergence / self.count
        variance = max(0.0, self._squares / self.count - mean * mean)
        error = math.sqrt(variance / self.count)
        return KvLoss(mean, error, self._other_top / self.count, self.count)
