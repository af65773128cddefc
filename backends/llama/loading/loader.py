"""Loading of a `LlamaModel` from a `ModelSpec`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import msgspec
from llama_cpp import llama_cpp as lib

from ...answer_form import PLAIN_ANSWERS, AnswerForm
from ...base import NO_DRAFT_MODEL, NO_NEXTN, ModelInfo, TemplateInfo, no_drafts
from ...batch import MediaFormat
from ...embedder import EmbedInfo
from ...engine_options import EngineOptions
from ...errors import InvalidArgument, LoadFailed, UnsupportedOperation, load_cancelled
from ...library import LLAMA_COMMIT
from ...model_spec import LoadProgress, ModelSpec, TemplateSpec
from ...params import read_options
from ...tool_formats import configured_form
from ...tuning_choice import ModelTuning
from ..kv.context import EncoderContext, LlamaContext
from ..kv.draft_models import HiddenStates, LlamaDraftModel, NextnDraftModel
from ..kv.embedding_context import (
    LlamaEmbedder,
    embed_info,
    embedding_refusal,
    open_embedding_context,
)
from ..kv.encoder_decoder import EncoderDecoderContext, SlotContext
from ..llama_log import LogRing, capture
from ..lora import LlamaAdapters
from ..model import LlamaModel
from ..probe_runner import LlamaProbeRunner
from ..text.matching import MatchingVocab
from ..text.renderer import Renderer, TemplateRefusal
from ..text.template import CHATML_BEGIN, ChatTemplate, configured_renderer, fallback_source
from ..text.vocab import Vocab
from .devices import layers_of, repacked_bytes
from .draft_model import (
    check_draft_model,
    check_draftable,
    draft_context_params,
    draft_spec,
    open_draft_context,
)
from .gguf_check import GgufFile
from .nextn import check_nextn_drafts, nextn_params, state_width
from .opening import (
    FLASH_ATTENTION,
    chosen_setting,
    context_params,
    ctx_size_of,
    decoder_start_token,
    kept_bytes_of,
    load_failed,
    model_shape,
    name_of,
    open_context,
    open_model,
    open_vocab,
    read_llama_options,
    set_load_mode,
)

SAMPLING_VALUE_BYTES = 1024
REPACKED_ROWS = 16 if platform.machine() in ("x86_64", "AMD64") else 4
"""The tokens with which llama.cpp multiplies repacked weights at once: on x86 four groups of four,
on other CPUs one. The rest of a pass is computed in groups, then one by one (`ggml/src/ggml-cpu`,
`repack.cpp` and `arch/*/repack.cpp`).
"""
_LONG_FACTORS = "rope_factors_long.weight"
_NO_TOOLS = "the model's chat template does not use tools"
_NO_HISTORY = dict.fromkeys(
    ("append", "ctx-shift", "cache-reuse"),
    "the model is an encoder-decoder, which encodes each prompt by itself",
)
_ATTENDS_BY_STEPS = ("qwen4exp",)
TOOLS_TEMPLATE = b"tool_use"
"""The name of a second template, for chats with tools, as in transformers."""
_SAMPLING_KEYS: dict[int, str] = {
    lib.LLAMA_MODEL_META_KEY_SAMPLING_SEQUENCE: "samplers",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_TOP_K: "top-k",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_TOP_P: "top-p",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIN_P: "min-p",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_XTC_PROBABILITY: "xtc-probability",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_XTC_THRESHOLD: "xtc-threshold",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_TEMP: "temp",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_LAST_N: "last-n-penalty",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_REPEAT: "repeat-penalty",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIROSTAT: "mirostat",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIROSTAT_TAU: "mirostat-tau",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIROSTAT_ETA: "mirostat-eta",
}
"""As `common_init_from_params` reads them (`common/common.cpp`): `general.sampling.*`."""


def load_llama(spec: ModelSpec, progress: LoadProgress, *, renders: bool = False) -> LlamaModel:
    """Load a model and create its context; see `load_model`."""
    options = read_llama_options(spec)
    log = capture()
    log.clear()
    if spec.draft_model:
        check_draft_model(spec)
    with ExitStack() as undo:
        renderer = configured_renderer(spec)
        undo.callback(renderer.close)
        matching = MatchingVocab()
        undo.callback(matching.close)

        def begin(path: str) -> None:
            if renders:
                renderer.start_process()
            if path:
                matching.begin(partial(open_vocab, path))

        model, file = _load_model(spec, options, progress, log, begin)
        undo.callback(lib.llama_model_free, model)
        params = context_params(spec, options, model)
        pointer = open_context(spec, params, model, log)
        start_token = decoder_start_token(model)
        opened = _OpenedModel(
            *(spec, options, log, model, file),
            vocab=Vocab(lib.llama_model_get_vocab(model), start_token),
            start_token=start_token,
            fingerprint=_fingerprint(
                spec, options, file, int(params.flash_attn_type), ctx_size_of(spec, model)
            ),
            embedding=embed_info(spec, model, pointer, file.values),
            embedding_refusal=embedding_refusal(file.values, start_token),
        )
        tuning = _tuning(spec, options, model, file)
        context = _context_of(opened, params, pointer)
        undo.callback(context.close)
        draft: LlamaDraftModel | NextnDraftModel | None = None
        if spec.draft_model:
            draft = _open_draft(opened, progress)
        elif spec.nextn:
            draft = _open_nextn(opened, context)
        if draft is not None:
            undo.callback(draft.close)
        generates = not isinstance(context, EncoderContext)
        template, notes = _template(
            *(model, opened.vocab, renderer),
            generates=generates,
            start_token=start_token,
            prepare=renders,
        )
        named = _named_templates(spec, opened.vocab) if generates else {}
        for each in named.values():
            if isinstance(each, ChatTemplate):
                undo.callback(each.close)
        infos = {
            each.name: _template_info(opened, context, named[each.name], each, prepare=renders)
            if each.is_own
            else _form_info(opened, context, template, each, notes)
            for each in (spec.templates if generates else ())
        }
        if not generates or context.kv_kind in ("recurrent", "hybrid"):
            tuning = None  # its steps have little or no attention, or llama.cpp allows one setting
        loaded = LlamaModel(
            model,
            context,
            opened.vocab,
            template,
            msgspec.structs.replace(_model_info(opened, context, template, notes), templates=infos),
            partial(_open_embedder, opened),
            partial(LlamaProbeRunner, model, spec, options, log),
            LlamaAdapters(model, context.pointer, file),
            matching,
            tuning,
            named,
            draft,
        )
        undo.pop_all()
    return loaded


class _OpenedModel(NamedTuple):
    """A model that llama.cpp has opened, with all that its contexts and its description need."""

    spec: ModelSpec
    options: EngineOptions
    log: LogRing
    pointer: Any
    file: GgufFile
    vocab: Vocab
    start_token: int | None
    """The token with which a decoder begins; None except for encoder-decoders."""
    fingerprint: str
    embedding: EmbedInfo
    embedding_refusal: str
    """Why the model makes no embeddings; empty if it does."""


def _context_of(opened: _OpenedModel, params: Any, pointer: Any) -> LlamaContext:
    """Return the context that computes: *pointer*, which is freed if the architecture needs one for
    each slot or none.
    """
    spec, fingerprint, vocab_size = opened.spec, opened.fingerprint, opened.vocab.size
    logits_max = int(params.n_outputs_max)
    if opened.start_token is not None:
        lib.llama_free(pointer)
        return EncoderDecoderContext(
            lambda: SlotContext(
                open_context(spec, params, opened.pointer, opened.log),
                opened.pointer,
                vocab_size=vocab_size,
                fingerprint=fingerprint,
            ),
            spec.slots,
            start_token=opened.start_token,
            vocab_size=vocab_size,
            logits_max=logits_max,
        )
    if lib.llama_get_memory(pointer):
        return LlamaContext(
            pointer,
            opened.pointer,
            vocab_size=vocab_size,
            fingerprint=fingerprint,
            logits_max=logits_max,
            reads_media=bool(spec.mmproj) and _reads_media(opened.file),
            keeps_states=kept_bytes_of(spec.slots, opened.pointer) > 0,
        )
    lib.llama_free(pointer)
    return EncoderContext(spec.slots, opened.embedding.tokens_max, spec.batch_size, fingerprint)


def _open_draft(opened: _OpenedModel, progress: LoadProgress) -> LlamaDraftModel:
    """Load the draft model of a model that is loaded, and create its context.

    :raises LoadFailed: llama.cpp cannot load it.
    :raises UnsupportedOperation: it cannot draft, or the model has no drafts.
    """
    check_draftable(opened.spec, opened.pointer)
    spec, log = draft_spec(opened.spec, opened.pointer), opened.log
    options = read_llama_options(spec)
    # The model's own load has reported its progress up to the end.
    model, file = _load_model(spec, options, lambda _: progress(1.0), log, lambda _: None)
    with ExitStack() as undo:
        undo.callback(lib.llama_model_free, model)
        check_draftable(spec, model)
        params = draft_context_params(spec, options, model)
        size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        context = LlamaContext(
            open_draft_context(spec, params, model, log),
            model,
            vocab_size=size,
            fingerprint=_fingerprint(
                spec, options, file, int(params.flash_attn_type), ctx_size_of(spec, model)
            ),
            logits_max=int(params.n_outputs_max),
            keeps_states=True,
        )
        undo.pop_all()
    return LlamaDraftModel(model, context, size, opened.vocab.size)


def _open_nextn(opened: _OpenedModel, context: LlamaContext) -> NextnDraftModel:
    """Create the context of a loaded model's NextN layers. The model computes in *context*.

    :raises UnsupportedOperation: rejected drafts cannot be removed from its states.
    """
    spec, model = opened.spec, opened.pointer
    check_nextn_drafts(name_of(spec), context.kv_kind, context.rollback)
    params = nextn_params(context_params(spec, opened.options, model), spec.slots)
    pointer = open_context(spec, params, model, opened.log)
    states = HiddenStates(context.pointer, state_width(model))
    return NextnDraftModel(pointer, states, opened.vocab.size)


def _open_embedder(opened: _OpenedModel) -> LlamaEmbedder:
    if opened.embedding_refusal:
        raise UnsupportedOperation(
            f"the model makes no embeddings: {opened.embedding_refusal}",
            hint="use an embedding model",
        )
    pointer = open_embedding_context(
        *(opened.spec, opened.options, opened.pointer, opened.embedding),
        *(opened.file.values, opened.log),
    )
    return LlamaEmbedder(pointer, opened.pointer, opened.embedding)


def _reads_media(file: GgufFile) -> bool:
    """Return whether images have the same effect in one step as in several. The sparse attention of
    Qwen 4 groups the entries of each step, and all of an image have one position.
    """
    return file.values.get("general.architecture") not in _ATTENDS_BY_STEPS


def _load_model(
    spec: ModelSpec,
    options: EngineOptions,
    progress: LoadProgress,
    log: LogRing,
    begin: Callable[[str], None],
) -> tuple[Any, GgufFile]:
    watch = _Progress(progress)
    params = lib.llama_model_default_params()
    params.progress_callback = watch.callback
    set_load_mode(options, params)
    model, file = open_model(spec, options, params, begin)
    if watch.error is not None:
        raise watch.error
    if watch.cancelled:
        raise load_cancelled(spec.name)
    if not model:
        raise load_failed(name_of(spec), log)
    return model, file


class _Progress:
    """llama.cpp's progress callback; it stores exceptions, which cannot pass through C."""

    def __init__(self, progress: LoadProgress):
        self._progress = progress
        self.error: BaseException | None = None
        self.cancelled = False
        self.callback = lib.llama_progress_callback(self._call)

    def _call(self, done: float, _data: object) -> bool:
        try:
            continues = bool(self._progress(done))
        except BaseException as exc:
            self.error, continues = exc, False
        self.cancelled = self.cancelled or not continues
        return continues


def _ctx_size_of_short_factors(file: GgufFile) -> int:
    """Return the largest context with the short factors; see `llama_model::get_rope_factors`."""
    architecture = file.values.get("general.architecture")
    trained = file.values.get(f"{architecture}.context_length", 0)
    found = file.values.get(f"{architecture}.rope.scaling.original_context_length", trained)
    return found if isinstance(found, int) else 0


def _fingerprint(
    spec: ModelSpec, options: EngineOptions, file: GgufFile, flash_attention: int, ctx_size: int
) -> str:
    """Hash the file and all that a saved state's layout depends on, except the context's size. Of
    that, only the rotation of keys depends on it, in models that have two kinds (LongRoPE).
    """
    has_long = _LONG_FACTORS in file.tensors and ctx_size > _ctx_size_of_short_factors(file)
    rotation = (_LONG_FACTORS,) if has_long else ()
    engine = lib.llama_version(), LLAMA_COMMIT
    layout = (spec.slots, options.of_state, flash_attention, *engine, *rotation)
    return hashlib.sha256(f"{file.content_hash} {layout}".encode()).hexdigest()[:32]


def _tuning(
    spec: ModelSpec, options: EngineOptions, model: Any, file: GgufFile
) -> ModelTuning | None:
    """Return the setting of a load, unless llama.cpp decides."""
    chosen = chosen_setting(spec, options, model)
    if chosen is None or spec.tuning is None:
        return None
    other = FLASH_ATTENTION["off" if chosen.setting.flash_attn else "on"]
    return ModelTuning(
        shape=model_shape(options, model),
        cpu=spec.tuning.cpu.key,
        chosen=chosen,
        other_fingerprint=_fingerprint(spec, options, file, other, ctx_size_of(spec, model)),
        keeps_threads=spec.tuning.keeps_threads,
    )


def _model_info(
    opened: _OpenedModel,
    context: LlamaContext,
    template: ChatTemplate | None,
    notes: dict[str, str],
) -> ModelInfo:
    spec, model, vocab, file = opened.spec, opened.pointer, opened.vocab, opened.file
    form = _answer_form(spec.tool_format, vocab, template)
    media = context.media or MediaFormat(0, False, 0)
    return ModelInfo(
        description=_description(model),
        fingerprint=opened.fingerprint,
        vocab_size=vocab.size,
        vocab_hash=file.vocab_hash,
        ctx_size=context.ctx_size,
        ctx_size_trained=int(lib.llama_model_n_ctx_train(model)),
        batch_size=context.batch_size,
        slots=context.slots,
        logits_max=context.logits_max,
        size_bytes=int(lib.llama_model_size(model)),
        parameters=int(lib.llama_model_n_params(model)),
        token_bytes_max=file.token_bytes_max,
        special_tokens=vocab.named_tokens(),
        has_chat_template=template is not None and "chat-template" not in notes,
        tool_format=form.shown_name,
        answer_form=form,
        unused=_unused(opened, template, context),
        chat_notes=notes,
        kv_kind=context.kv_kind,
        rollback=context.rollback,
        keeps_states=context.keeps_states,
        can_shift=context.can_shift,
        rows_block=_rows_block(model, context, file),
        draft_model=os.path.basename(spec.draft_model),
        nextn=spec.nextn,
        n_gpu_layers=layers_of(spec, model),
        sampling=_recommended_sampling(model),
        embedding=None if opened.embedding_refusal else opened.embedding,
        generates=not isinstance(context, EncoderContext),
        decoder_start_token=opened.start_token,
        media_width=media.width,
        media_mrope=media.mrope,
        media_size_max=media.size_max,
    )


def _rows_block(model: Any, context: LlamaContext, file: GgufFile) -> int:
    """Return `ModelInfo.rows_block`. Experts are multiplied with one token after the other, and an
    encoder-decoder has no context yet.
    """
    has_experts = file.values.get(f"{file.values.get('general.architecture')}.expert_count")
    if has_experts or context.pointer is None:
        return 1
    repacked = repacked_bytes(context.pointer)
    return REPACKED_ROWS if 2 * repacked > int(lib.llama_model_size(model)) else 1


def _answer_form(
    configured: str | dict[str, Any], vocab: Vocab, template: ChatTemplate | None
) -> AnswerForm:
    """Return the form of answers: as configured, or as the template shows it. Marks at the end of
    answers that are tokens which end a generation are left out.
    """
    form = PLAIN_ANSWERS if template is None else template.answer_form
    form = configured_form(configured, form)
    stops = tuple(stop for stop in form.stops if not _ends_generation(vocab, stop))
    return msgspec.structs.replace(form, stops=stops)


def _ends_generation(vocab: Vocab, text: str) -> bool:
    tokens = vocab.tokenize(text.encode(), special=True, bos=False)
    blank = all(not vocab.piece(token).strip() for token in tokens[:-1])
    return bool(tokens) and blank and vocab.is_eog(tokens[-1])


def _unused(
    opened: _OpenedModel, template: ChatTemplate | None, context: LlamaContext
) -> dict[str, str]:
    found = {} if template is None or template.uses_tools else {"tools": _NO_TOOLS}
    encodes = opened.start_token is not None
    goes_back = context.rollback > 0 or context.keeps_states
    if reason := no_drafts(context.kv_kind, encodes=encodes, goes_back=goes_back):
        found |= {"speculation": reason, "draft-max": reason}
    elif not opened.spec.draft_model:
        found["speculation=draft"] = NO_DRAFT_MODEL
    if "speculation" not in found and not opened.spec.nextn:
        found["speculation=mtp"] = NO_NEXTN
    return found | _NO_HISTORY if encodes else found


def _recommended_sampling(model: Any) -> dict[str, Any]:
    """Return the valid sampling parameters that the file recommends, by name."""
    found: dict[str, Any] = {}
    buffer = ctypes.create_string_buffer(SAMPLING_VALUE_BYTES)
    for key, name in _SAMPLING_KEYS.items():
        text = lib.llama_model_meta_key_str(key)
        if lib.llama_model_meta_val_str(model, text, buffer, SAMPLING_VALUE_BYTES) < 0:
            continue
        try:
            value = buffer.value.decode()
            number = value if name == "samplers" else msgspec.json.decode(value)
            found |= read_options({name: number}, strict=True).values
        except (InvalidArgument, UnicodeDecodeError, msgspec.DecodeError):
            continue  # don't refuse the file for a bad recommendation
    return found


def _template(
    model: Any,
    vocab: Vocab,
    renderer: Renderer,
    *,
    generates: bool,
    start_token: int | None,
    prepare: bool,
) -> tuple[ChatTemplate | None, dict[str, str]]:
    """Return the model's chat template, and notes for chats: if neither the *renderer* nor the
    model's file has a template, and, with *prepare*, those of its form, or the reason why it cannot
    be used. A model that *generates* no text needs no template.
    """
    notes: dict[str, str] = {}
    configured = bool(renderer.source)
    if not configured:
        source = _source(model)
        if not source and not generates:
            renderer.close()
            return None, {}
        if not source:
            begin = vocab.tokenize(CHATML_BEGIN.encode(), special=True, bos=False)
            source, notes["chat-template"] = fallback_source(
                chatml=len(begin) == 1, encodes=start_token is not None
            )
        renderer.set_source(source)
    new = partial(ChatTemplate, bos=vocab.bos, eos=vocab.eos, strip_bos=vocab.adds_bos)
    with_tools = None if configured else _source(model, TOOLS_TEMPLATE)
    template = new(renderer, with_tools=new(Renderer(with_tools)) if with_tools else None)
    if prepare:
        try:
            notes |= template.prepare()
        except TemplateRefusal as exc:
            notes["chat-template"] = f"the model's chat template cannot be used: {exc}"
    return template, notes


def _named_templates(spec: ModelSpec, vocab: Vocab) -> dict[str, ChatTemplate | LoadFailed]:
    """Return the chat templates of other names of the model, or the reasons why they cannot be
    used: these fail the requests by those names, and not the load.
    """
    found: dict[str, ChatTemplate | LoadFailed] = {}
    for each in spec.templates:
        if not each.is_own:
            continue
        own = msgspec.structs.replace(spec, chat_template=each.source, chat_template_file=each.path)
        try:
            renderer = configured_renderer(own)
        except LoadFailed as exc:
            found[each.name] = exc
        else:
            found[each.name] = ChatTemplate(
                renderer, bos=vocab.bos, eos=vocab.eos, strip_bos=vocab.adds_bos
            )
    return found


def _template_info(
    opened: _OpenedModel,
    context: LlamaContext,
    template: ChatTemplate | LoadFailed,
    name: TemplateSpec,
    *,
    prepare: bool,
) -> TemplateInfo:
    """Return the facts about the own chat *template* of another *name* of the model."""
    notes: dict[str, str] = {}
    usable = template if isinstance(template, ChatTemplate) else None
    if isinstance(template, LoadFailed):
        notes["chat-template"] = template.message
    elif prepare:
        try:
            notes |= template.prepare()
        except TemplateRefusal as exc:
            notes["chat-template"] = f"the model's chat template cannot be used: {exc}"
    return _form_info(opened, context, usable, name, notes)


def _form_info(
    opened: _OpenedModel,
    context: LlamaContext,
    template: ChatTemplate | None,
    name: TemplateSpec,
    notes: dict[str, str],
) -> TemplateInfo:
    """Return the facts about a *template* whose form of answers another *name* may set."""
    configured = opened.spec.tool_format if name.tool_format is None else name.tool_format
    form = _answer_form(configured, opened.vocab, template)
    return TemplateInfo(
        answer_form=form,
        tool_format=form.shown_name,
        unused=_unused(opened, template, context),
        chat_notes=notes,
        has_chat_template=template is not None and "chat-template" not in notes,
    )


def _source(model: Any, name: bytes | None = None) -> str:
    """Return the chat template of the model's file, or the one with this *name*; "" if none."""
    found = lib.llama_model_chat_template(model, name)
    source = found.decode("utf-8", "replace") if found else ""
    return source if name is None or "{" in source else ""  # without one, some have a bare name


def _description(model: Any) -> str:
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(model, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")
