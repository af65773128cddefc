"""Estimation of a model's memory by a dry run of llama.cpp, which allocates nothing.

The model is opened with `no_alloc`, and without mmap, because llama.cpp aborts with both. Then a
context is created on it, and llama.cpp reports what it would have allocated. The vocabulary is
really loaded, so the process's own size is measured. This adds 0.13 s to a first load of SmolLM2
135M (0.56 s without), and 0.5 s to one of Gemma 3 270M (0.83 s), whose vocabulary is read twice.

The estimate is that of a full context that computes a full batch. The buffers of a step become
resident only as far as a context is filled.

Weights that llama.cpp repacks for the CPU are counted once: their pages in the file's mapping are
not read again, and the kernel may reclaim them.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from llama_cpp import llama_cpp as lib
from msgspec.structs import replace

from ...engine_options import EngineOptions, is_quantized
from ...errors import InferdError
from ...memory import Device, MemoryNeed, resident_bytes
from ...model_spec import ModelSpec, Shape
from ...tuning_choice import Setting
from ..kv.draft_models import STATE_BYTES, STATES_MAX
from ..kv.embedding_context import embed_info, open_embedding_context, output_bytes
from ..llama_log import capture
from ..probe_runner import CONTEXTS_MAX, layout_of, probe_context_params, probes_of
from ..text.matching import BYTES_PER_TOKEN
from ..threads import cpu_function
from .devices import Share, breakdown, c_function, devices, layers_of
from .draft_model import (
    check_draft_model,
    check_draftable,
    draft_context_params,
    draft_spec,
    open_draft_context,
)
from .nextn import nextn_params, state_width
from .opening import (
    LOGIT_BYTES,
    context_params,
    ctx_size_of,
    decoder_start_token,
    kept_bytes_of,
    load_failed,
    logits_max_of,
    name_of,
    open_context,
    open_model,
    read_llama_options,
)

_pointer, _number = ctypes.c_void_p, ctypes.c_uint32


class _Plan(ctypes.Structure):
    """`ggml_cplan`."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", _pointer),
        ("n_threads", ctypes.c_int),
        ("threadpool", _pointer),
        ("abort_callback", _pointer),
        ("abort_callback_data", _pointer),
        ("use_ref", ctypes.c_bool),
    )


class _Symbol(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", _pointer),
        ("name", ctypes.c_char_p),
        ("address", _pointer),
    )


_reserve = c_function(
    "_Z19llama_graph_reserveP13llama_contextjjj", _pointer, _pointer, *[_number] * 3
)


@cache
def _plan_function() -> Any:
    """Return `ggml_graph_plan`. The backend's registry does not name it, so it is looked up in the
    library that has one of the named functions.
    """
    named = cpu_function(b"ggml_threadpool_new", _pointer, _pointer)
    found = _Symbol()
    ctypes.CDLL(None).dladdr(ctypes.cast(named, _pointer), ctypes.byref(found))
    function = ctypes.CDLL(found.file.decode()).ggml_graph_plan
    function.restype, function.argtypes = _Plan, [_pointer, ctypes.c_int, _pointer]
    return function


def work_bytes(context: Any, logits_max: int = 0) -> int:
    """Return the size of the work buffer for a full batch of *context* at its full depth, with the
    logits of *logits_max* tokens, or at least one of each slot. llama.cpp's reports leave it out.

    The CPU backend allocates it at a step, with the size for the operation of the graph that needs
    the most. With flash attention it takes a few MB. Without it, all attention weights of a layer
    are converted to the type of the values, with which they are multiplied. This adds half of the
    memory that the weights themselves take, which are most of the compute buffers.

    The context must have no layers on devices, because the compute buffers of its graph are
    allocated until the context is freed; on the host they are not touched. If they are larger than
    the machine's memory, which no estimate lets pass, this returns 0.
    """
    slots = lib.llama_n_seq_max(context)
    tokens = min(lib.llama_n_ctx(context), lib.llama_n_ubatch(context))
    graph = _reserve(context, tokens, slots, min(tokens, max(slots, logits_max)))
    if not graph:
        return 0
    threads = max(lib.llama_n_threads(context), lib.llama_n_threads_batch(context))
    return int(_plan_function()(graph, threads, None).work_size)


FIRST_STEP_BYTES = 3 << 20
"""Memory that a load and the first step use besides the model (measured by the process's growth):
code of llama.cpp, llguidance and numpy, and the stacks and heaps of threads.
"""
WORK_GAP_BYTES = 3 << 20
"""Memory that old work buffers leave in the heap without flash attention, because they grow then
(measured). Only those below the worker's `LARGE_BLOCK_BYTES` leave any.
"""
BYTES_PER_CELL = 96
"""Memory of a used cell's entries in a set and a map of `llama_kv_cells`: 48 each with glibc."""


class LlamaMemoryEstimator:
    """A GGUF model opened without its weights; see `MemoryEstimator`. Owned by one thread."""

    def __init__(self, spec: ModelSpec):
        self._spec = spec
        self._options = read_llama_options(spec)
        self._log = capture()
        self._draft: LlamaMemoryEstimator | None = None
        if spec.draft_model:
            check_draft_model(spec)
        self._model = self._open(spec)
        self._layers = layers_of(spec, self._model)
        if spec.draft_model:
            self._draft = self._open_draft(spec)

    def _open_draft(self, spec: ModelSpec) -> LlamaMemoryEstimator:
        """Return the estimator of the draft model.

        :raises InferdError: it cannot be opened, or cannot draft for this model.
        """
        draft = None
        try:
            check_draftable(spec, self._model)
            draft = LlamaMemoryEstimator(draft_spec(spec, self._model))
            check_draftable(draft._spec, draft._model)
        except InferdError:
            if draft is not None:
                draft.close()
            self.close()
            raise
        return draft

    def _open(self, spec: ModelSpec) -> Any:
        self._log.clear()
        params = lib.llama_model_default_params()
        params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
        model, file = open_model(spec, self._options, params)
        if not model:
            raise load_failed(name_of(spec), self._log)
        self._values = file.values
        return model

    @property
    def shape(self) -> Shape:
        """The spec's shape, with the model's defaults where the spec has none."""
        spec = self._spec
        ctx_size = ctx_size_of(spec, self._model)
        return Shape(spec.slots, ctx_size, spec.batch_size, self._layers)

    @property
    def devices(self) -> list[Device]:
        """The devices that can run layers, with their current free memory."""
        return devices()

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the model's need in *shape*. Takes 5 ms, or more if `n_gpu_layers` changes."""
        spec = shape.apply_to(self._spec)
        self._place_layers(spec, shape.n_gpu_layers)
        if decoder_start_token(self._model) is not None:
            need = self._of_slots(spec, self._options)
            return replace(need, options=self._added_by_options(spec, need))
        self._log.clear()
        params = context_params(spec, self._options, self._model)
        context = open_context(spec, params, self._model, self._log)
        info = embed_info(spec, self._model, context, self._values)
        encoder = not lib.llama_get_memory(context)
        kept = 0 if lib.llama_n_rs_seq(context) else kept_bytes_of(spec.slots, self._model)
        need = self._with_gaps(total_need(*self._taken(context, spec.logits_per_slot)), params)
        need = replace(need, options=self._added_by_options(spec, need))
        need = replace(need, context=need.context + kept)
        if not encoder:
            need = replace(need, measuring=self._of_probes(spec))
        if self._draft is not None:
            need = self._draft.add_draft(need, draft_spec(spec, self._model))
        if spec.nextn:
            need = self._add_nextn(need, spec)
        self._log.clear()
        context = open_embedding_context(
            spec, self._options, self._model, info, self._values, self._log
        )
        shares, _, _, work = self._taken(context)
        bare = [replace(share, weights=0) for share in shares]
        second = total_need(bare, 0, output_bytes(info, self._model), work)
        if encoder:
            return replace(need, context=0, compute=second.total)
        return replace(need, embedding=second.total, embedding_devices=second.devices)

    def _place_layers(self, spec: ModelSpec, layers: int) -> None:
        """Open the model again if another number of its layers is on devices."""
        if layers != self._layers:
            lib.llama_model_free(self._model)
            self._model, self._layers = None, layers
            self._model = self._open(spec)

    def add_draft(self, need: MemoryNeed, spec: ModelSpec) -> MemoryNeed:
        """Return *need*, that of a model, with this model, of *spec*, as its draft model. Both are
        in one process, whose size was measured with both vocabularies.
        """
        self._place_layers(spec, layers_of(spec, self._model))
        self._log.clear()
        params = draft_context_params(spec, self._options, self._model)
        context = open_draft_context(spec, params, self._model, self._log)
        kept = kept_bytes_of(spec.slots, self._model)
        own = self._of_draft(context, params)
        return _with_draft(need, replace(own, context=own.context + kept))

    def _of_draft(self, context: Any, params: Any, *, owns_weights: bool = True) -> MemoryNeed:
        """Return the need of a *context* with *params* that drafts, which is freed; with that of
        the model's weights if it *owns* them.
        """
        cells = BYTES_PER_CELL * int(lib.llama_n_ctx(context))
        shares, _, output, work = self._taken(context)
        if not owns_weights:
            shares = [replace(share, weights=0) for share in shares]
        return self._with_gaps(total_need(shares, cells, output, work), params)

    def _add_nextn(self, need: MemoryNeed, spec: ModelSpec) -> MemoryNeed:
        """Return *need* with that of the NextN layers, whose weights are among the model's: their
        context, and the hidden states of a batch and of the last tokens of each slot.
        """
        self._log.clear()
        params = nextn_params(context_params(spec, self._options, self._model), spec.slots)
        context = open_context(spec, params, self._model, self._log)
        width = STATE_BYTES * state_width(self._model)
        states = width * (spec.slots * (STATES_MAX + 1) + spec.batch_size)
        own = self._of_draft(context, params, owns_weights=False)
        return _with_draft(need, replace(own, compute=own.compute + states))

    def _added_by_options(self, spec: ModelSpec, need: MemoryNeed) -> int:
        """Return the bytes by which *need* exceeds that of a context with the default options."""
        if self._options.is_plain:
            return 0
        if decoder_start_token(self._model) is not None:
            plain = self._of_slots(spec, self._options.without_memory())
            return _of_context(need) - _of_context(plain)
        self._log.clear()
        params = context_params(spec, self._options.without_memory(), self._model)
        context = open_context(spec, params, self._model, self._log)
        plain = total_need(*self._taken(context, spec.logits_per_slot))
        return _of_context(need) - _of_context(self._with_gaps(plain, params))

    def _of_slots(self, spec: ModelSpec, options: EngineOptions) -> MemoryNeed:
        """Return the need of an encoder-decoder, whose slots have a context each. It makes neither
        embeddings nor measurements.

        llama.cpp reserves space for the logits of a whole batch in its compute buffers, which stays
        untouched, and in its output buffer, which an encoding fills with zeros.
        """
        self._log.clear()
        params = context_params(spec, options, self._model)
        context = open_context(spec, params, self._model, self._log)
        size = self._vocab_size + int(lib.llama_model_n_embd_out(self._model))
        output = LOGIT_BYTES * size * int(lib.llama_n_batch(context))
        cells = BYTES_PER_CELL * int(lib.llama_n_ctx(context))
        shares, process, _, work = self._taken(context)
        others = spec.slots - 1
        shares += [replace(share, weights=0) for share in shares] * others
        need = total_need(shares, process + others * cells, spec.slots * output, spec.slots * work)
        return self._with_gaps(need, params)

    def _of_probes(self, spec: ModelSpec) -> int:
        """Return the most memory of the contexts in which probes run by turns, on the host. It is 0
        if the settings are not measured: they are set, or layers run on devices.
        """
        options = self._options
        if self._layers or options.flash_attn != "auto" or is_quantized(options.cache_type_v):
            return 0
        layouts = {layout_of(probe, spec.slots) for probe in probes_of(spec, self._model)}
        sizes = []
        for layout in layouts:
            self._log.clear()
            params = probe_context_params(spec, options, self._model, layout, Setting(False))
            context = open_context(spec, params, self._model, self._log)
            shares, _, output, work = self._taken(context)
            bare = [replace(share, weights=0) for share in shares]
            own = total_need(bare, BYTES_PER_CELL * layout.cells, output, work)
            # A state that is kept for the next context may be as large as that of one sequence.
            states = own.context // (1 if layout.deep else layout.sequences)
            sizes.append(own.total + states)
        return CONTEXTS_MAX * max(sizes)

    def _with_gaps(self, need: MemoryNeed, params: Any) -> MemoryNeed:
        """Return *need* with the gaps that the work buffers of a context with *params* leave."""
        flash = params.flash_attn_type != lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if flash or self._layers:
            return need
        return replace(need, compute=need.compute + WORK_GAP_BYTES)

    def _taken(self, context: Any, logits_per_slot: int = 1) -> tuple[list[Share], int, int, int]:
        """Return a context's arguments for `total_need`, and free the context.

        The buffer of logits, which is on the host, is missing in the breakdown. llama.cpp enlarges
        it when a step first has more logits than there are slots.
        """
        shares, process = breakdown(context), resident_bytes() + self._growth(context)
        slots, batch_size = int(lib.llama_n_seq_max(context)), int(lib.llama_n_batch(context))
        logits = logits_max_of(slots, batch_size, self._model, logits_per_slot)
        output = LOGIT_BYTES * self._vocab_size * logits
        # With layers on devices, the graph's buffers would be allocated there.
        work = work_bytes(context, logits) if self._layers == 0 else 0
        lib.llama_free(context)
        return shares, process, output, work

    @property
    def _vocab_size(self) -> int:
        return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))

    def _growth(self, context: Any) -> int:
        """Return the bytes by which the process grows, apart from the buffers of its context."""
        tokens = self._vocab_size
        cells = int(lib.llama_n_ctx(context)) if lib.llama_get_memory(context) else 0
        if lib.llama_model_is_recurrent(self._model):
            cells = 0
        return FIRST_STEP_BYTES + BYTES_PER_TOKEN * tokens + BYTES_PER_CELL * cells

    def close(self) -> None:
        """Free the model and its draft model; a second call does nothing."""
        if self._draft is not None:
            self._draft.close()
        model, self._model = self._model, None
        if model is not None:
            lib.llama_model_free(model)


def total_need(shares: Iterable[Share], process: int, output: int, work: int) -> MemoryNeed:
    """Add up the *shares* of host and devices, the process, and the output and work buffers."""
    weights = context = compute = 0
    on_devices: Counter[str] = Counter()
    for share in shares:
        if share.device:
            on_devices[share.device] += share.weights + share.context + share.compute
        else:
            weights, context = weights + share.weights, context + share.context
            compute += share.compute
    return MemoryNeed(
        weights=weights,
        context=context,
        compute=compute + output + work,
        process=process,
        devices=dict(on_devices),
    )


def _with_draft(need: MemoryNeed, own: MemoryNeed) -> MemoryNeed:
    """Return *need* with the *own* need of what drafts for the model."""
    names = sorted({*need.devices, *own.devices})
    devices = {n: need.devices.get(n, 0) + own.devices.get(n, 0) for n in names}
    return replace(need, draft=own.total, devices=devices)


def _of_context(need: MemoryNeed) -> int:
    """Return the bytes on the host and on devices, without the process."""
    return need.context + need.compute + sum(need.devices.values())
