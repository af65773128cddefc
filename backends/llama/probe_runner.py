"""Steps of known kinds on small contexts over a model's weights, which time the model's settings.

The near context has the layout of the model's own: a stream of cells for each sequence, because
llama.cpp computes sequences of one stream together, and so with less work. The deep context has one
sequence of 1500 tokens. Most of their cells are copies of the few tokens that are computed: the
time of a step depends on the number of cells, and not on their contents.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from llama_cpp import llama_cpp as lib
from msgspec.structs import replace

from ..batch import Chunk
from ..engine_options import EngineOptions
from ..errors import BackendError, InferdError
from ..model_spec import ModelSpec
from ..tuning_choice import PROBES, Probe, Setting
from .kv.context import LlamaContext
from .llama_log import LogRing
from .loading.opening import context_params, ctx_size_of, open_context

NEAR_TOKENS = 60
"""The tokens before those of a near probe that decodes: half of a short answer."""
NEAR_CELLS = 256
"""The cells of a near sequence. llama.cpp computes attention to as many, even if fewer are used."""
CONTEXTS_MAX = 2
"""Contexts at a time: one with each kind of attention, which run by turns."""
COPIES_PER_PIECE = 4
"""The copies of a state that one piece of preparation makes."""
_CELLS_STEP = 256
_FINGERPRINT = "00" * 16
"""The states are never used by another context."""
_TOKEN_STRIDE = 7919
"""A prime, so that the tokens of a step differ: a mixture of experts would compute equal ones with
equal experts.
"""


class StopFlag:
    """A byte in memory. While it is set, llama.cpp's steps end. Any thread may set it.

    llama.cpp checks it between the nodes of a graph by `strlen`, to which zero is the empty text. A
    Python function would wait there for the interpreter's lock, and distort the times.
    """

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(2)

    @property
    def is_set(self) -> bool:
        """Whether steps end now."""
        return self._bytes[0] != b"\0"

    def set(self) -> None:
        """End the present step within a node of its graph, and the next ones at once."""
        self._bytes[0] = b"\1"

    def clear(self) -> None:
        """Let steps run again."""
        self._bytes[0] = b"\0"

    def watch(self, context: Any) -> None:
        """Have this flag, which must outlive it, end the steps of a llama.cpp *context*."""
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, lib.ggml_abort_callback)
        lib.llama_set_abort_callback(context, strlen, ctypes.cast(self._bytes, ctypes.c_void_p))


class Layout(NamedTuple):
    """The shape of a context: its sequences, each with a stream of *cells* unless it is *deep*, and
    the most tokens of a step. Sequences are prepared with *depth* tokens.
    """

    sequences: int
    cells: int
    batch_size: int
    depth: int
    deep: bool


def layout_of(probe: Probe, slots: int) -> Layout:
    """Return the shape of the context in which *probe* runs beside a model with *slots*."""
    if probe.depth + probe.tokens <= NEAR_CELLS:
        sequences = max(p.sequences for p in PROBES if p.sequences <= slots)
        return Layout(sequences, NEAR_CELLS, NEAR_CELLS, NEAR_TOKENS, deep=False)
    cells = -(-(probe.depth + probe.tokens) // _CELLS_STEP) * _CELLS_STEP
    # The second sequence serves to copy cells.
    return Layout(2, cells, max(NEAR_TOKENS, probe.tokens), probe.depth, deep=True)


def probes_of(spec: ModelSpec, model: Any) -> tuple[Probe, ...]:
    """Return the probes that can run beside *model*, which was loaded with *spec*.

    Deep ones of several sequences would need a long state for each. The state of a recurrent model
    does not grow with the depth, and that of a hybrid cannot be cut back after a step.
    """
    whole = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
    tokens_max = 0 if whole else ctx_size_of(spec, model)
    return tuple(
        probe
        for probe in PROBES
        if probe.sequences <= spec.slots
        and (not probe.depth or (probe.sequences == 1 and probe.depth + probe.tokens <= tokens_max))
    )


def probe_context_params(
    spec: ModelSpec,
    options: EngineOptions,
    model: Any,
    layout: Layout,
    setting: Setting,
) -> Any:
    """Return llama.cpp's parameters of a context with *layout* that computes as *setting* says."""
    attention: Literal["on", "off"] = "on" if setting.flash_attn else "off"
    params = context_params(spec, replace(options, flash_attn=attention), model)
    params.n_seq_max = params.n_outputs_max = layout.sequences
    params.n_rs_seq = 0
    params.kv_unified = layout.deep
    params.n_ctx = layout.cells * (1 if layout.deep else layout.sequences)
    params.n_batch = layout.batch_size
    params.n_ubatch = min(setting.ubatch or params.n_ubatch, params.n_batch)
    return params


class _ProbeContext:
    """A context whose sequences hold the tokens that precede those of a probe.

    *state* is that of the computed tokens if an earlier context had the same layout, else empty.
    """

    def __init__(
        self, context: LlamaContext, layout: Layout, vocab_size: int, stop: StopFlag, state: bytes
    ):
        self._context, self._layout, self._stop = context, layout, stop
        self._vocab_size = vocab_size
        self.state = state
        self._filling: Iterator[None] | None = self._fill()
        self._last: tuple[str, int, int] | None = None
        """The last probe that was computed, and its threads."""
        self.close = context.close
        stop.watch(context.pointer)

    @property
    def _computed(self) -> int:
        """The tokens of a sequence that are computed; the other cells are copies of theirs.

        The cells of a window are fewer than the tokens, so copies would not fit.
        """
        depth, whole = self._layout.depth, self._context.kv_kind == "window"
        return depth if whole and self._layout.deep else min(depth, NEAR_TOKENS)

    def advance(self, probe: Probe, threads: int, threads_batch: int) -> float | None:
        """Do one piece of work; see `ProbeRunner.advance`.

        The first step of a kind is not timed, because llama.cpp builds its graph then, and starts
        threads.
        """
        self._context.set_thread_counts(threads, threads_batch)
        if self._filling is not None:
            if next(self._filling, _END) is _END:
                self._filling = None
            return None
        begin = self._computed if probe.tokens == 1 or probe.depth else 0
        for slot in range(probe.sequences):
            if self._context.trim(slot, begin) != begin:
                self._restore(slot)
        seconds = self._compute(
            [self._chunk(slot, begin, probe.tokens, logits=1) for slot in range(probe.sequences)]
        )
        kind = (probe.name, threads, threads_batch)
        if seconds is None or self._last == kind:
            return seconds
        self._last = kind
        return None

    def _fill(self) -> Iterator[None]:
        """Give the sequences their tokens; yield between pieces of work."""
        layout, computed = self._layout, self._computed
        if not computed:
            return
        if self.state:
            self._restore(0)
        else:
            for position in range(0, computed, NEAR_TOKENS):
                chunk = self._chunk(0, position, min(NEAR_TOKENS, computed - position), logits=0)
                while self._compute([chunk]) is None:
                    yield
                yield
            self.state = self._context.save(0)
        copies = layout.depth // computed if layout.deep else layout.sequences
        for number in range(1, copies):
            self._restore(1 if layout.deep else number)
            if layout.deep:
                lib.llama_memory_seq_cp(self._context.memory, 1, 0, -1, -1)
                self._context.clear(1)
            if number % COPIES_PER_PIECE == 0:
                yield

    def _restore(self, slot: int) -> None:
        if not self._context.restore(slot, self.state):
            raise BackendError("the state of a probe's tokens could not be copied")

    def _chunk(self, slot: int, position: int, count: int, logits: int) -> Chunk:
        numbers = range(1 + slot + position, 1 + slot + position + count)
        tokens = [number * _TOKEN_STRIDE % self._vocab_size for number in numbers]
        return Chunk(slot, tokens, position, logits)

    def _compute(self, chunks: Sequence[Chunk]) -> float | None:
        """Compute a step; return its seconds, or None if it was stopped."""
        self._context.check(chunks)
        begin = time.perf_counter()
        try:
            self._context.decode(chunks)
        except BackendError:
            if self._stop.is_set:
                return None
            raise
        return time.perf_counter() - begin


class LlamaProbeRunner:
    """A `ProbeRunner` over the weights of a llama.cpp model, which must outlive it.

    The types of KV states are those of *options*.
    """

    def __init__(self, model: Any, spec: ModelSpec, options: EngineOptions, log: LogRing):
        self._model, self._spec, self._options, self._log = model, spec, options, log
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        self.probes = probes_of(spec, model)
        self._stop = StopFlag()
        self.abort = self._stop.set
        self._contexts: dict[_Key, _ProbeContext] = {}
        """The contexts, the one used longest ago first."""
        self._states: dict[_Key, bytes] = {}

    def advance(self, probe: Probe, setting: Setting) -> float | None:
        """Do the next piece of work for *probe* with *setting*; see `ProbeRunner.advance`."""
        self._stop.clear()
        key = layout_of(probe, self._spec.slots), setting.flash_attn, setting.ubatch
        threads = setting.threads or self._spec.threads or len(os.sched_getaffinity(0))
        batch = setting.threads_batch or setting.threads or self._options.threads_batch or threads
        with self._log.muted():  # llama.cpp warns of aborted steps and of small contexts
            try:
                context = self._contexts.pop(key, None)
                if context is None:
                    while len(self._contexts) >= CONTEXTS_MAX:
                        self._contexts.pop(next(iter(self._contexts))).close()
                    self._contexts[key] = self._open(key, setting)
                    return None
                self._contexts[key] = context
                seconds = context.advance(probe, threads, batch)
            except InferdError:
                self.close()
                raise
        self._states[key] = context.state
        return seconds

    def _open(self, key: _Key, setting: Setting) -> _ProbeContext:
        layout = key[0]
        params = probe_context_params(self._spec, self._options, self._model, layout, setting)
        self._log.clear()
        context = LlamaContext(
            open_context(self._spec, params, self._model, self._log),
            self._model,
            vocab_size=self._vocab_size,
            fingerprint=_FINGERPRINT,
            logits_max=layout.sequences,
        )
        state = self._states.get(key, b"")
        return _ProbeContext(context, layout, self._vocab_size, self._stop, state)

    def close(self) -> None:
        """Free the contexts and states; a second call does nothing."""
        while self._contexts:
            self._contexts.popitem()[1].close()
        self._states.clear()


_END = object()
_Key = tuple[Layout, bool, int]
"""The layout of a context, whether it has flash attention, and the tokens of a micro-batch."""
