"""A model's projector: images and sounds are decoded, cut into items, and encoded by libmtmd.

The language model is opened for its vocabulary and its sizes, without its weights. libmtmd aborts
the process on some contents and files. This module avoids the causes that are known, and belongs
into a process of its own, whose program is `program.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import xxhash
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray
from PIL import Image

from ...engine_options import EngineOptions
from ...errors import (
    BackendError,
    InvalidArgument,
    LoadFailed,
    OutOfMemory,
    TooLarge,
    UnsupportedOperation,
)
from ...gguf import parts_of
from ...gguf.header import DamagedHeader
from ...gguf.projector import (
    ProjectorHeader,
    projector_mismatch,
    read_projector,
    read_text_side,
)
from ...media import MediaKind
from ...media_process import CONTENT_ITEMS_MAX, ItemPiece, ProjectorFacts, TextPiece
from ...model_spec import ModelSpec
from ...shared_memory import sealed_memory
from ..llama_log import LogRing, capture
from ..loading.devices import layers_of
from ..loading.opening import (
    FLASH_ATTENTION,
    load_failed,
    name_of,
    open_model,
    read_llama_options,
)
from .images import PIXELS_MAX, decode_image
from .sounds import SECONDS_MAX, check_sound

LARGEST_SIDE = 4096
"""The side of the image whose buffers are measured. Projectors scale larger ones down."""
MEASURED_SECONDS = 30
FIT_STEPS = 12
"""Halvings of the range in which the size of a scaled image is searched."""
_HASH_BYTES = 1 << 20
_NO_MEMORY = ("bad_alloc", "alloc")
_BUFFER = re.compile(r"(\S+) compute buffer size = +([\d.]+) MiB")

Piece = TextPiece | ItemPiece


class MediaLimits(NamedTuple):
    """Bounds on one content."""

    pixels_max: int = PIXELS_MAX
    seconds_max: float = SECONDS_MAX
    items_max: int = CONTENT_ITEMS_MAX


class Encoded(NamedTuple):
    """The embeddings of an item in sealed memory, whose *descriptor* the receiver closes."""

    descriptor: int
    causal: bool


def load_mtmd() -> ModuleType:
    """Return the bindings of libmtmd.

    :raises UnsupportedOperation: the engine was built without it.
    """
    try:
        # `from llama_cpp import …` would first import its high-level API.
        return importlib.import_module("llama_cpp.mtmd_cpp")
    except (ImportError, OSError, RuntimeError) as exc:
        raise UnsupportedOperation(
            f"the engine cannot read images or sounds: libmtmd is missing ({exc})",
            hint="install the engine again as the README says; older builds left libmtmd out",
        ) from exc


def fitted_size(
    width: int, height: int, tokens_max: int, count: Callable[[int, int], int]
) -> tuple[int, int]:
    """Return the size to which an image is scaled down, so that its *count* of tokens is at most
    *tokens_max*, or the least that the projector makes of any image. 0 is without a bound.
    """
    if not tokens_max or count(width, height) <= tokens_max:
        return width, height

    def scaled(scale: float) -> tuple[int, int]:
        return max(1, round(width * scale)), max(1, round(height * scale))

    low, high = 0.0, 1.0
    best = scaled(1 / max(width, height))
    target = max(tokens_max, count(*best))
    if count(width, height) <= target:
        return width, height
    for _ in range(FIT_STEPS):
        middle = (low + high) / 2
        size = scaled(middle)
        if count(*size) <= target:
            best, low = size, middle
        else:
            high = middle
    return best


class Projector:
    """An open projector. Owned by one thread.

    :raises UnsupportedOperation: the engine lacks libmtmd, or this kind of model cannot be run.
    :raises LoadFailed: the projector or the model cannot be read, or they do not fit together.
    """

    def __init__(self, spec: ModelSpec, threads: int = 1, limits: MediaLimits | None = None):
        self._mtmd: Any = load_mtmd()
        self._limits = limits or MediaLimits()
        self._name = os.path.basename(spec.mmproj)
        self._options = read_llama_options(spec)
        header = check_projector(spec)
        try:
            self._file = os.open(spec.mmproj, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            cause = exc.strerror or str(exc)
            raise LoadFailed(f"the projector {self._name!r} cannot be used: {cause}") from exc
        # `use_threads` loads it again: the same file, also if another one has its name by then.
        self._path = f"/proc/self/fd/{self._file}"
        self._log: LogRing = capture()
        self._mtmd.mtmd_helper_log_set(self._log.callback, None)
        self._model = self._open_model(spec)
        self._context: Any = None
        self.uses_gpu = bool(layers_of(spec, self._model))
        self._threads = max(1, threads)
        try:
            self._context = self._open_context(self._threads)
            self._width = int(lib.llama_model_n_embd_inp(self._model))
            mtmd, context = self._mtmd, self._context
            sounds = bool(mtmd.mtmd_support_audio(context))
            self._mrope = bool(mtmd.mtmd_decode_use_mrope(context))
            self._rate = int(mtmd.mtmd_get_audio_sample_rate(context)) if sounds else 0
            images = bool(mtmd.mtmd_support_vision(context))
            self.facts = ProjectorFacts(
                kind=header.kind,
                images=images,
                sounds=sounds,
                width=self._width,
                mrope=self._mrope,
                sample_rate=self._rate,
                image_tokens_max=self._count(LARGEST_SIDE, LARGEST_SIDE) if images else 0,
                fingerprint=_fingerprint(self._path, self._options),
                weights_bytes=header.weights_bytes,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        context, self._context = self._context, None
        model, self._model = self._model, None
        if context:
            self._mtmd.mtmd_free(context)
        if model:
            lib.llama_model_free(model)
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def use_threads(self, threads: int) -> None:
        """Compute on *threads* threads from the next content on. libmtmd has no call for this, so
        the projector is loaded again, from the page cache.
        """
        threads = max(1, threads)
        if threads == self._threads:
            return
        context, self._context = self._context, None
        self._mtmd.mtmd_free(context)
        self._context, self._threads = self._open_context(threads), threads

    def read(self, data: bytes, kind: MediaKind, tokens_max: int = 0) -> list[Piece]:
        """Return the pieces of a content, without encoding them.

        :raises UnsupportedOperation: the projector reads no images, or no sounds.
        :raises InvalidArgument: the content is not an image or a sound, or is damaged.
        :raises TooLarge: it is too large to be decoded, or has too many items.
        """
        with self._chunks_of(data, kind, tokens_max, pixels=False) as chunks:
            return self._pieces(chunks)

    def encode(self, data: bytes, kind: MediaKind, tokens_max: int = 0) -> Iterator[Encoded]:
        """Encode the items of a content one after the other.

        :raises BackendError: libmtmd cannot encode it. Other errors are those of `read`.
        """
        with self._chunks_of(data, kind, tokens_max, pixels=True) as chunks:
            self._pieces(chunks)  # checked before the first of them is encoded
            for chunk in filter(self._is_media, chunks):
                yield self._encode_chunk(chunk)

    def measure_buffer(self) -> int:
        """Return the memory in which the projector computes the largest content, as llama.cpp logs
        it when it allocates its buffers. The computation is stopped after its first step.
        """
        context, self._context = self._context, None
        self._mtmd.mtmd_free(context)
        stop = lib.ggml_backend_sched_eval_callback(lambda _tensor, ask, _data: bool(ask))
        self._context = self._open_context(1, stop)
        try:
            return max(self._buffer_bytes(bitmap) for bitmap in self._largest_contents())
        finally:
            context, self._context = self._context, None
            self._mtmd.mtmd_free(context)
            self._context = self._open_context(self._threads)

    def _largest_contents(self) -> Iterator[Any]:
        if self.facts.images:
            pixels = bytes(3 * LARGEST_SIDE * LARGEST_SIDE)
            yield self._image_bitmap(LARGEST_SIDE, LARGEST_SIDE, pixels)
        if self.facts.sounds:
            samples = (ctypes.c_float * (MEASURED_SECONDS * self._rate))()
            yield self._mtmd.mtmd_bitmap_init_from_audio(len(samples), samples)

    def _buffer_bytes(self, bitmap: Any) -> int:
        with self._chunks(bitmap) as chunks:
            tokens = self._mtmd.mtmd_input_chunk_get_n_tokens
            largest = max(filter(self._is_media, chunks), key=tokens)
            self._compute(largest)
            found = (_BUFFER.search(line) for line in self._log.lines())
            buffers = {match[1]: float(match[2]) for match in found if match}
            return int(sum(buffers.values()) * (1 << 20)) + 4 * self._width * int(tokens(largest))

    def _open_model(self, spec: ModelSpec) -> Any:
        params = lib.llama_model_default_params()
        params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
        self._log.clear()
        model, _ = open_model(spec, self._options, params)
        if not model:
            raise load_failed(name_of(spec), self._log)
        return model

    def _open_context(self, threads: int, stop: Any = None) -> Any:
        """Load the projector. With *stop*, a callback that ends computations, its buffers are
        allocated for the first content.
        """
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads = self.uses_gpu, threads
        params.print_timings, params.warmup = False, stop is None
        params.flash_attn_type = FLASH_ATTENTION[self._options.flash_attn]
        if stop is not None:
            params.cb_eval = stop
        self._log.clear()
        context = self._mtmd.mtmd_init_from_file(self._path.encode(), self._model, params)
        if not context:
            cause = self._log.cause()
            if any(word in cause for word in _NO_MEMORY):
                raise OutOfMemory(
                    f"there is too little memory for the projector {self._name!r}",
                    hint="unload models, or use a smaller quantization of it",
                )
            raise LoadFailed(
                f"llama.cpp cannot load the projector {self._name!r}: {cause}",
                hint="check that it is a complete projector of a kind that this llama.cpp supports",
            )
        return context

    @contextmanager
    def _chunks_of(
        self, data: bytes, kind: MediaKind, tokens_max: int, *, pixels: bool
    ) -> Iterator[list[Any]]:
        """Yield libmtmd's chunks of a content; without *pixels* only their sizes are right."""
        if kind == "image":
            bitmap = self._image(data, tokens_max, pixels=pixels)
        else:
            bitmap = self._sound(data)
        with self._chunks(bitmap) as chunks:
            yield chunks

    def _image(self, data: bytes, tokens_max: int, *, pixels: bool) -> Any:
        if not self.facts.images:
            raise self._unsupported("images")
        image = decode_image(data, self._limits.pixels_max)
        size = fitted_size(image.width, image.height, tokens_max, self._count)
        if not pixels:
            return self._image_bitmap(*size, None)
        if size != image.size:
            image = image.resize(size, Image.Resampling.LANCZOS)
        return self._image_bitmap(*size, image.tobytes())

    def _image_bitmap(self, width: int, height: int, pixels: bytes | None) -> Any:
        """Return libmtmd's copy of an image; without *pixels* a placeholder."""
        pointer = ctypes.POINTER(ctypes.c_uint8)
        data = None if pixels is None else ctypes.cast(ctypes.c_char_p(pixels), pointer)
        return self._mtmd.mtmd_bitmap_init(width, height, data)

    def _count(self, width: int, height: int) -> int:
        """Return the tokens of an image of this size."""
        with self._chunks(self._image_bitmap(width, height, None)) as chunks:
            return sum(
                int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
                for chunk in filter(self._is_media, chunks)
            )

    def _sound(self, data: bytes) -> Any:
        if not self.facts.sounds:
            raise self._unsupported("sounds")
        data = check_sound(data, self._limits.seconds_max)
        buffer = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        self._log.clear()
        options = self._mtmd.mtmd_helper_init_opt_default()
        found = self._mtmd.mtmd_helper_bitmap_init_from_buf_wrapper(
            self._context, buffer, len(data), False, options
        )
        if not found.bitmap:
            raise InvalidArgument(
                f"the sound is damaged: {self._log.cause()}", hint="send the whole file"
            )
        # libmtmd aborts on a sound of one sample.
        samples = int(self._mtmd.mtmd_bitmap_get_nx(found.bitmap))
        if found.video_ctx or not self._mtmd.mtmd_bitmap_is_audio(found.bitmap) or samples < 2:
            self._mtmd.mtmd_bitmap_free(found.bitmap)
            raise InvalidArgument("the sound has no samples", hint="send a longer one")
        # The frames of an MP3 can hide others. A second is left for the decoder's padding.
        seconds, most = samples / self._rate, self._limits.seconds_max
        if seconds > most + 1:
            self._mtmd.mtmd_bitmap_free(found.bitmap)
            raise TooLarge(
                f"the sound takes {seconds:.0f} s; at most {most:.0f} s are allowed",
                hint="send a shorter one, or several",
                data={"seconds": seconds, "seconds_max": most},
            )
        return found.bitmap

    @contextmanager
    def _chunks(self, bitmap: Any) -> Iterator[list[Any]]:
        """Yield the chunks that libmtmd cuts *bitmap* into, which is freed."""
        mtmd = self._mtmd
        chunks: Any = None
        try:
            chunks = mtmd.mtmd_input_chunks_init()
            part = mtmd.mtmd_input_part()
            part.bitmap = bitmap
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            self._log.clear()
            result = mtmd.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False)
        finally:
            mtmd.mtmd_bitmap_free(bitmap)
        try:
            if result != 0:
                raise self._refusal()
            size = int(mtmd.mtmd_input_chunks_size(chunks))
            yield [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(size)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)

    def _refusal(self) -> InvalidArgument | OutOfMemory:
        cause = self._log.cause()
        if any(word in cause for word in _NO_MEMORY):
            return OutOfMemory(
                "there is too little memory to read the content", hint="send a smaller one"
            )
        return InvalidArgument(
            f"llama.cpp cannot read the content: {cause}", hint="send it in another size or format"
        )

    def _pieces(self, chunks: list[Any]) -> list[Piece]:
        mtmd = self._mtmd
        pieces: list[Piece] = []
        for chunk in chunks:
            if not self._is_media(chunk):
                pieces.append(TextPiece(self._text_tokens(chunk)))
                continue
            size = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
            positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
            if size < 1 or positions < 1:
                raise InvalidArgument(
                    f"the projector {self._name!r} makes no tokens of the content",
                    hint="send a larger one",
                )
            causal = not mtmd.mtmd_decode_use_non_causal(self._context, chunk)
            pieces.append(ItemPiece(size, positions, causal))
        items = sum(isinstance(piece, ItemPiece) for piece in pieces)
        if not items:
            raise InvalidArgument(
                f"the projector {self._name!r} makes no tokens of the content",
                hint="send a larger one",
            )
        if items > self._limits.items_max:
            raise TooLarge(
                f"the content has {items} parts; at most {self._limits.items_max} are possible",
                hint="send a smaller image, or a shorter sound",
                data={"items": items, "items_max": self._limits.items_max},
            )
        return pieces

    def _is_media(self, chunk: Any) -> bool:
        kind = self._mtmd.mtmd_input_chunk_get_type(chunk)
        return bool(kind != self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT)

    def _text_tokens(self, chunk: Any) -> list[int]:
        count = ctypes.c_size_t()
        pointer = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        tokens = [int(token) for token in pointer[: count.value]] if count.value else []
        if min(tokens, default=0) < 0:  # llama.cpp would abort when it computes them
            raise UnsupportedOperation(
                f"the model lacks tokens that the projector {self._name!r} puts around images",
                hint="use the projector that was made for this model",
            )
        return tokens

    def _compute(self, chunk: Any) -> Any:
        """Encode *chunk*; return its embeddings, which stay until the next one is encoded."""
        self._log.clear()
        if self._mtmd.mtmd_encode_chunk(self._context, chunk) != 0:
            cause = self._log.cause()
            raise BackendError(
                f"llama.cpp cannot encode the content: {cause}",
                hint="send another one, or check the projector's file",
            )
        return self._mtmd.mtmd_get_output_embd(self._context)

    def _encode_chunk(self, chunk: Any) -> Encoded:
        size = int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        pointer = self._compute(chunk)
        embeddings = np.ctypeslib.as_array(pointer, (size, self._width))
        if not np.isfinite(embeddings).all():
            raise BackendError(
                f"the projector {self._name!r} makes embeddings that are not numbers",
                hint="check the projector's file, or use another quantization of it",
            )
        parts = [embeddings.data.cast("B")]
        if self._mrope:
            parts.append(self._places(chunk, size).data.cast("B"))
        causal = not self._mtmd.mtmd_decode_use_non_causal(self._context, chunk)
        return Encoded(sealed_memory(parts), causal)

    def _places(self, chunk: Any, size: int) -> NDArray[np.int32]:
        """Return the positions of an M-RoPE model's item relative to its first one, in the order in
        which `mtmd-helper-common.h` writes them into a batch.
        """
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) != mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            return np.repeat(np.arange(size, dtype=np.int32)[:, None], 4, axis=1)
        found = (mtmd.mtmd_decoder_pos * size)()
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        mtmd.mtmd_helper_image_get_decoder_pos(image, 0, found)
        columns = np.frombuffer(found, np.int32).reshape(size, 4)
        return np.ascontiguousarray(columns[:, [0, 2, 1, 3]])

    def _unsupported(self, media: str) -> UnsupportedOperation:
        other = "images" if self.facts.images else "sounds"
        return UnsupportedOperation(
            f"the projector {self._name!r} reads {other}, and no {media}",
            hint=f"use a model that reads {media}",
        )


def check_projector(spec: ModelSpec) -> ProjectorHeader:
    """Return the header of the projector of *spec*, after a comparison with the model's.

    :raises LoadFailed: a file cannot be read, or the projector does not belong to the model.
    """
    name = os.path.basename(spec.mmproj)
    try:
        header = read_projector(Path(spec.mmproj))
        text = read_text_side(parts_of(Path(spec.path))[0])
    except (OSError, DamagedHeader) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise LoadFailed(
            f"the projector {name!r} cannot be used: {reason}",
            hint="use the projector that was made for this model, or set mmproj to an empty text",
        ) from exc
    if reason := projector_mismatch(header, text):
        raise LoadFailed(
            f"the projector {name!r} does not belong to {name_of(spec)!r}: {reason}",
            hint="use the projector that was made for this model, or set mmproj to an empty text",
        )
    return header


def _fingerprint(path: str, options: EngineOptions) -> str:
    """Return a hash of the projector's file and of the settings that change its embeddings."""
    digest = xxhash.xxh3_128(options.flash_attn.encode())
    with closing(open(path, "rb", buffering=0)) as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
