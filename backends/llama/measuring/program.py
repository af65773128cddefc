"""The process that measures a model's settings: `python -m` this module, with a socket as input.

It is a process of its own because llama.cpp ends its process on some files. It ends when the other
end of the socket is closed.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import msgspec
from llama_cpp import llama_cpp as lib
from msgspec.structs import replace

from ...engine_options import CACHE_TYPES, head_sizes
from ...errors import InferdError, OutOfMemory, UnsupportedOperation
from ...sandbox import receive_frame, send_frame
from ..llama_log import capture
from ..loading.devices import layers_of
from ..loading.memory_estimate import LlamaMemoryEstimator
from ..loading.opening import (
    ctx_size_of,
    decoder_start_token,
    load_failed,
    model_shape,
    name_of,
    open_model,
    read_llama_options,
    set_load_mode,
)
from ..probe_runner import LlamaProbeRunner, probes_of
from ..text.vocab import Vocab
from . import requests as m
from .kv_loss import TEXT, measure_losses

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
