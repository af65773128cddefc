"""Loading: from a `ModelSpec` to a `LlamaModel`, or to an error that says what is wrong."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import msgspec
from llama_cpp import llama_cpp as lib

from ..base import LoadProgress, ModelInfo, ModelSpec
from ..build import LLAMA_BUILD_NUMBER, LLAMA_COMMIT
from ..errors import Cancelled, InvalidArgument, LoadFailed, OutOfMemory, UnsupportedOperation
from .context import LlamaContext
from .gguf_file import GgufFile, open_model_file, read_gguf
from .log import LogRing, capture
from .model import LlamaModel
from .template import ChatTemplate
from .vocab import Vocab

__all__ = ("LlamaOptions", "load")

CTX_SIZE_DEFAULT_MAX = 4096
CTX_SIZE_STEP = 256
"""llama.cpp rounds a sequence's share of the context to this (`llama_context`'s constructor)."""
UBATCH_SIZE_MAX = 512
CTX_CELLS_MAX = (1 << 31) - 1

_FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_CACHE_TYPES = {"f16": lib.GGML_TYPE_F16, "f32": lib.GGML_TYPE_F32}


class LlamaOptions(msgspec.Struct, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """What `ModelSpec.options` can hold for this backend."""

    flash_attn: Literal["auto", "on", "off"] = "auto"
    cache_type_k: Literal["f16", "f32"] = "f16"
    cache_type_v: Literal["f16", "f32"] = "f16"
    swa_full: bool = False


def load(spec: ModelSpec, progress: LoadProgress) -> LlamaModel:
    """Load a model and make its context; see `load_llama`."""
    options = _options(spec)
    name = os.path.basename(spec.path) or spec.name
    log = capture()
    log.clear()
    with ExitStack() as undo:
        fd = _duplicate(spec.fd, name) if spec.fd >= 0 else open_model_file(spec.path)
        with _closing(fd):
            file = read_gguf(fd, name)
            model = _load_model(spec, name, fd, file, progress, log)
        undo.callback(lib.llama_model_free, model)
        _check_kind(model, name)
        context = _make_context(spec, options, model, name, file, log)
        undo.callback(context.close)
        loaded = _assemble(spec, options, model, context, file)
        undo.pop_all()
    return loaded


def _options(spec: ModelSpec) -> LlamaOptions:
    try:
        options = msgspec.convert(spec.options, LlamaOptions)
    except msgspec.ValidationError as exc:
        raise InvalidArgument(f"the model's options: {exc}") from None
    cells = _ctx_size(spec.ctx_size) * spec.slots
    if not 0 < spec.slots <= lib.llama_max_parallel_sequences() or cells > CTX_CELLS_MAX:
        raise InvalidArgument(f"{spec.slots} slots with a ctx-size of {spec.ctx_size} each")
    if spec.ctx_size < 0 or not 0 < spec.batch_size <= CTX_CELLS_MAX:
        raise InvalidArgument(f"ctx-size {spec.ctx_size}, batch-size {spec.batch_size}")
    return options


def _ctx_size(size: int) -> int:
    return -(-size // CTX_SIZE_STEP) * CTX_SIZE_STEP


def _duplicate(fd: int, name: str) -> int:
    try:
        return os.dup(fd)
    except OSError as exc:
        raise LoadFailed(
            f"the descriptor of {name!r} cannot be used: {exc.strerror}",
            hint="pass an open descriptor of a regular file",
        ) from None


@contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def _load_model(
    spec: ModelSpec, name: str, fd: int, file: GgufFile, progress: LoadProgress, log: LogRing
) -> Any:
    lib.llama_backend_init()
    watch = _Progress(progress)
    params = lib.llama_model_default_params()
    params.n_gpu_layers = spec.n_gpu_layers
    params.progress_callback = watch.callback
    if spec.fd >= 0:
        model = _load_descriptor(fd, name, file, params)
    else:
        model = lib.llama_model_load_from_file(os.fsencode(spec.path), params)
    if watch.error is not None:
        raise watch.error
    if watch.given_up:
        raise Cancelled(f"the load of {name!r} was cancelled")
    if not model:
        raise LoadFailed(
            f"llama.cpp cannot load {name!r}: {log.cause()}",
            hint="is it a language model, whole, and of a kind that this llama.cpp knows?",
        )
    return model


def _load_descriptor(fd: int, name: str, file: GgufFile, params: Any) -> Any:
    if file.is_split:
        raise UnsupportedOperation(
            f"{name!r} is one part of a split model and came as a descriptor",
            hint="merge the parts with llama-gguf-split --merge, or load the model by name",
        )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fdopen.argtypes, libc.fdopen.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    # A dup shares its position with the descriptor that it was made of.
    os.lseek(fd, 0, os.SEEK_SET)
    own = os.dup(fd)
    stream = libc.fdopen(own, b"rb")
    if not stream:
        os.close(own)
        raise LoadFailed(f"{name!r} cannot be read: {os.strerror(ctypes.get_errno())}")
    try:
        return lib.llama_model_load_from_file_ptr(stream, params)
    finally:
        libc.fclose(stream)


class _Progress:
    """llama.cpp's progress callback; what it raises is kept, as C cannot pass it on."""

    def __init__(self, progress: LoadProgress):
        self._progress = progress
        self.error: BaseException | None = None
        self.given_up = False
        self.callback = lib.llama_progress_callback(self._call)

    def _call(self, done: float, _data: object) -> bool:
        try:
            goes_on = bool(self._progress(done))
        except BaseException as exc:
            self.error, goes_on = exc, False
        self.given_up = self.given_up or not goes_on
        return goes_on


def _check_kind(model: Any, name: str) -> None:
    vocab = lib.llama_model_get_vocab(model)
    for is_so, kind in (
        (lib.llama_model_has_encoder(model), "an encoder"),
        (not lib.llama_model_has_decoder(model), "no decoder"),
        (lib.llama_model_is_diffusion(model), "a diffusion process"),
        (lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE, "no vocabulary"),
    ):
        if is_so:
            raise _unsupported(name, kind)


def _unsupported(name: str, kind: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{name!r} has {kind}: inferd does not run such models",
        hint="use a decoder-only language model",
    )


def _make_context(
    spec: ModelSpec, options: LlamaOptions, model: Any, name: str, file: GgufFile, log: LogRing
) -> LlamaContext:
    pointer = lib.llama_init_from_model(model, _context_params(spec, options, model))
    if not pointer:
        cause = log.cause()
        kind = OutOfMemory if "alloc" in cause else LoadFailed
        raise kind(
            f"no context for {name!r} with {spec.slots} slots: {cause}",
            hint="use a smaller ctx-size or fewer slots",
        )
    if not lib.llama_get_memory(pointer):
        lib.llama_free(pointer)
        raise _unsupported(name, "no KV memory (it makes embeddings)")
    return LlamaContext(
        pointer,
        model,
        vocab_size=int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))),
        fingerprint=_fingerprint(spec, options, file),
    )


def _context_params(spec: ModelSpec, options: LlamaOptions, model: Any) -> Any:
    trained = int(lib.llama_model_n_ctx_train(model))
    size = _ctx_size(spec.ctx_size or min(trained, CTX_SIZE_DEFAULT_MAX))
    params = lib.llama_context_default_params()
    params.n_ctx = size * spec.slots
    params.n_seq_max = params.n_outputs_max = spec.slots
    params.n_batch = spec.batch_size
    params.n_ubatch = min(spec.batch_size, UBATCH_SIZE_MAX)
    params.n_threads = params.n_threads_batch = spec.threads or len(os.sched_getaffinity(0))
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attn]
    params.type_k = _CACHE_TYPES[options.cache_type_k]
    params.type_v = _CACHE_TYPES[options.cache_type_v]
    params.swa_full = options.swa_full
    params.kv_unified = False
    params.offload_kqv = params.op_offload = spec.n_gpu_layers != 0
    params.no_perf = True
    return params


def _fingerprint(spec: ModelSpec, options: LlamaOptions, file: GgufFile) -> str:
    """Name the file and all that a saved state's layout depends on; not the context's size."""
    layout = (spec.slots, options, lib.llama_version(), LLAMA_COMMIT)
    return hashlib.sha256(f"{file.content_hash} {layout}".encode()).hexdigest()[:32]


def _assemble(
    spec: ModelSpec, options: LlamaOptions, model: Any, context: LlamaContext, file: GgufFile
) -> LlamaModel:
    vocab = Vocab(lib.llama_model_get_vocab(model))
    template = _template(model, vocab)
    info = ModelInfo(
        description=_description(model),
        fingerprint=_fingerprint(spec, options, file),
        vocab_size=vocab.size,
        vocab_hash=file.vocab_hash,
        ctx_size=context.ctx_size,
        ctx_size_trained=int(lib.llama_model_n_ctx_train(model)),
        batch_size=context.batch_size,
        slots=context.slots,
        size_bytes=int(lib.llama_model_size(model)),
        parameters=int(lib.llama_model_n_params(model)),
        token_bytes_max=file.token_bytes_max,
        has_chat_template=template is not None,
        memory=context.kind,
        can_shift=context.can_shift,
        n_gpu_layers=spec.n_gpu_layers,
        llama_build_number=LLAMA_BUILD_NUMBER,
        llama_commit=LLAMA_COMMIT,
    )
    return LlamaModel(model, context, vocab, template, info)


def _template(model: Any, vocab: Vocab) -> ChatTemplate | None:
    source = lib.llama_model_chat_template(model, None)
    if not source:
        return None
    return ChatTemplate(
        source.decode("utf-8", "replace"), bos=vocab.bos, eos=vocab.eos, strip_bos=vocab.adds_bos
    )


def _description(model: Any) -> str:
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(model, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")
