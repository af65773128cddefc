"""The process that measures a model's settings: `python -m` this module, with a socket as input.

It is a process of its own because llama.cpp ends its process on some files. It ends when the other
end of the socket is closed.

The loss of quantized KV states is measured by the probabilities that a model gives to a fixed text.
Each piece of the text is computed in a context of each type, all with flash attention, so that only
the types differ.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib
from msgspec.structs import replace
from numpy.typing import NDArray

from ...batch import Chunk
from ...engine_options import CACHE_TYPES, EngineOptions, head_sizes
from ...errors import InferdError, OutOfMemory, UnsupportedOperation
from ...fd_frames import receive_frame, send_frame
from ...model_spec import ModelSpec
from ..kv.context import LlamaContext
from ..llama_log import LogRing, capture
from ..loading.devices import layers_of
from ..loading.memory_estimate import LlamaMemoryEstimator
from ..loading.opening import (
    context_params,
    ctx_size_of,
    decoder_start_token,
    load_failed,
    model_shape,
    name_of,
    open_context,
    open_model,
    read_llama_options,
    set_load_mode,
)
from ..probe_runner import LlamaProbeRunner, probes_of
from ..text.vocab import Vocab
from . import requests as m
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
    params.n_seq_max, params.n_ctx, params.n_rs_seq = 1, TOKENS_MAX, 0
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


_MEASURED = ("flash-attn", "cache-type-k", "cache-type-v")
"""The options that each variant sets."""


class Measuring:
    """A loaded model with a runner of probes for each type of KV states that was requested."""

    def __init__(self) -> None:
        self._log = capture()
        self._model: Any = None
        self._runners: dict[tuple[str, str], LlamaProbeRunner] = {}

    def open_model(self, request: m.OpenModel) -> m.Opened:
        """Load the model.

        :raises InferdError: it cannot be loaded, does not fit, or has no settings to measure.
        """
        plain = {k: v for k, v in request.spec.options.items() if k not in _MEASURED}
        self._spec = spec = replace(request.spec, options=plain)
        self._options = read_llama_options(spec)
        estimator = LlamaMemoryEstimator(spec)
        try:
            need = estimator.need(estimator.shape)
        finally:
            estimator.close()
        total = need.weights + need.process + need.measuring
        if total > request.free_bytes:
            raise OutOfMemory(
                f"measuring {spec.name!r} needs {total >> 20} MiB of memory, and"
                f" {request.free_bytes >> 20} MiB are free",
                hint="unload other models with `inferd unload`, or measure a smaller quantization",
            )
        params = lib.llama_model_default_params()
        set_load_mode(self._options, params)
        self._log.clear()
        self._model, file = open_model(spec, self._options, params)
        if not self._model:
            raise load_failed(name_of(spec), self._log)
        if layers_of(spec, self._model):
            raise UnsupportedOperation(
                f"layers of {spec.name!r} run on a GPU, whose settings llama.cpp chooses",
                hint="set n-gpu-layers to 0 to measure the CPU",
            )
        if not need.measuring:
            kind = "only makes embeddings"
            if decoder_start_token(self._model) is not None:
                kind = "is an encoder-decoder"
            raise UnsupportedOperation(
                f"{spec.name!r} {kind}, and has no settings to measure",
                hint="measure a decoder-only language model",
            )
        sizes = head_sizes(file.values).values()
        types = [t for t, (block, _) in CACHE_TYPES.items() if not any(s % block for s in sizes)]
        return m.Opened(
            shape=model_shape(read_llama_options(request.spec), self._model),
            probes=list(probes_of(spec, self._model)),
            cache_types=types,
            ctx_size=ctx_size_of(spec, self._model),
        )

    def run_probe(self, request: m.RunProbe) -> m.Timed:
        """Time one step."""
        variant = request.variant
        types = (variant.cache_type_k, variant.cache_type_v)
        runner = self._runners.get(types)
        if runner is None:
            keys: Any = {"cache_type_k": types[0], "cache_type_v": types[1]}
            options = replace(self._options, **keys)
            runner = LlamaProbeRunner(self._model, self._spec, options, self._log)
            self._runners[types] = runner
        left_s = request.deadline - time.monotonic()
        timer = threading.Timer(max(0.0, left_s), runner.abort)
        timer.start()
        try:
            while time.monotonic() < request.deadline:
                seconds = runner.advance(request.probe, variant)
                if seconds is not None:
                    return m.Timed(seconds)
        finally:
            timer.cancel()
            timer.join()
        return m.Timed(None)

    def measure_loss(self, request: m.MeasureLoss) -> m.Losses:
        """Measure the losses of types of KV states."""
        vocab = Vocab(lib.llama_model_get_vocab(self._model))
        tokens = vocab.tokenize(TEXT.encode(), special=False, bos=True)
        return m.Losses(
            measure_losses(
                self._model,
                self._spec,
                self._options,
                tokens,
                request.types,
                request.deadline,
                self._log,
            )
        )

    def close_contexts(self) -> m.Closed:
        """Free all contexts."""
        while self._runners:
            self._runners.popitem()[1].close()
        return m.Closed()

    def reply_to(self, request: m.Request) -> m.Reply:
        """Do what *request* says."""
        try:
            match request:
                case m.OpenModel():
                    return self.open_model(request)
                case m.RunProbe():
                    return self.run_probe(request)
                case m.MeasureLoss():
                    return self.measure_loss(request)
                case m.CloseContexts():
                    return self.close_contexts()
        except InferdError as exc:
            return m.Failed(exc.to_wire())


def main() -> None:
    """Reply to requests until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command, which has it too, ends this process
    sock = socket.socket(fileno=0)
    frames, measuring = sock.makefile("rb"), Measuring()
    decode = msgspec.msgpack.Decoder(m.Request).decode
    while body := receive_frame(frames):
        send_frame(sock, msgspec.msgpack.encode(measuring.reply_to(decode(body))))


if __name__ == "__main__":
    main()
