"""libmtmd's own way from an image to logits, and the same with raw calls on embeddings."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from llama_cpp import mtmd_cpp as mtmd
from numpy.typing import NDArray

from inferd.backends.llama.llama_log import capture
from inferd.backends.media_process import ItemPiece, TextPiece

CTX_SIZE = 1024
Piece = TextPiece | ItemPiece


class Reference:
    """A language model with its weights, and its projector, used only by raw calls."""

    def __init__(self, model: Path, projector: Path):
        ring = capture()
        mtmd.mtmd_helper_log_set(ring.callback, None)
        self._model = lib.llama_model_load_from_file(
            os.fsencode(model), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = CTX_SIZE
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.width = int(lib.llama_model_n_embd_inp(self._model))
        options = mtmd.mtmd_context_params_default()
        options.use_gpu, options.n_threads, options.print_timings = False, 1, False
        self._mtmd = mtmd.mtmd_init_from_file(os.fsencode(projector), self._model, options)
        assert self._context and self._mtmd

    def close(self) -> None:
        mtmd.mtmd_free(self._mtmd)
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    def tokens(self, text: str, *, bos: bool = False) -> list[int]:
        data = text.encode()
        found = (lib.llama_token * (8 * len(data) + 8))()
        count = lib.llama_tokenize(self._vocab, data, len(data), found, len(found), bos, True)
        assert count >= 0
        return list(found[:count])

    def image(self, width: int, height: int, pixels: bytes) -> Any:
        data = (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels)
        return mtmd.mtmd_bitmap_init(width, height, data)

    def sound(self, data: bytes) -> Any:
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return mtmd.mtmd_helper_bitmap_init_from_buf(self._mtmd, buffer, len(data), False)

    def by_helper(self, before: str, bitmap: Any, after: str) -> tuple[list[Piece], Any, int]:
        """Return the pieces of a prompt with *bitmap*, the logits after it and its positions, as
        libmtmd's helper computes them.
        """
        text = before.encode() + mtmd.mtmd_default_marker() + after.encode()
        prompt = mtmd.mtmd_input_text(text, len(text), True, True)
        chunks = mtmd.mtmd_input_chunks_init()
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        assert not mtmd.mtmd_tokenize(self._mtmd, chunks, ctypes.byref(prompt), bitmaps, 1)
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        past = lib.llama_pos()
        arguments = (self._mtmd, self._context, chunks, 0, 0, CTX_SIZE, True, ctypes.byref(past))
        assert not mtmd.mtmd_helper_eval_chunks(*arguments)
        pieces = [self._piece(mtmd.mtmd_input_chunks_get(chunks, i)) for i in range(_size(chunks))]
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return pieces, self._logits(), int(past.value)

    def _piece(self, chunk: Any) -> Piece:
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            count = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            assert tokens is not None
            return TextPiece(list(tokens[: count.value]))
        return ItemPiece(
            int(mtmd.mtmd_input_chunk_get_n_tokens(chunk)),
            int(mtmd.mtmd_input_chunk_get_n_pos(chunk)),
            not mtmd.mtmd_decode_use_non_causal(self._mtmd, chunk),
        )

    def by_embeddings(
        self, pieces: Sequence[Piece], items: Sequence[bytes]
    ) -> tuple[NDArray[np.float32], int]:
        """Return the logits after *pieces*, whose items have the memories *items*, and their
        positions, computed by raw calls.
        """
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        past, left = 0, list(items)
        for index, piece in enumerate(pieces):
            if isinstance(piece, TextPiece):
                self._decode_text(piece.tokens, past, logits=index == len(pieces) - 1)
                past += len(piece.tokens)
            else:
                self._decode_item(piece, left.pop(0), past)
                past += piece.positions
        assert not left
        return self._logits(), past

    def next_logits(self, token: int, past: int) -> NDArray[np.float32]:
        """Decode a *token* at position *past*, and return the logits after it."""
        self._decode_text([token], past, logits=True)
        return self._logits()

    def _decode_text(self, tokens: Sequence[int], past: int, *, logits: bool) -> None:
        batch = lib.llama_batch_ext_init(self._context)
        for offset, token in enumerate(tokens):
            index = lib.llama_batch_ext_add_token(batch, 0, token)
            position = lib.llama_pos(past + offset)
            lib.llama_batch_ext_set_pos(batch, index, ctypes.byref(position))
        if logits:
            lib.llama_batch_ext_set_output_logits(batch, index, True)
        self._process(batch)

    def _decode_item(self, piece: ItemPiece, memory: bytes, past: int) -> None:
        count = piece.size * self.width
        rows = np.frombuffer(memory, np.float32, count).copy()
        places = np.frombuffer(memory, np.int32, offset=4 * count).reshape(-1, 4)
        if not len(places):
            places = np.arange(piece.size, dtype=np.int32)[:, None]
        shifted = places + past
        if not places[:, -1].any() and places.shape[1] == 4:
            shifted[:, 3] = 0
        batch = lib.llama_batch_ext_init(self._context)
        for number in range(piece.size):
            row = rows[number * self.width :].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            index = lib.llama_batch_ext_add_embd(batch, 0, lib.llama_embd(row, 1, self.width))
            assert index == number
            position = (lib.llama_pos * 4)(*shifted[number])
            lib.llama_batch_ext_set_pos(batch, index, position)
        lib.llama_set_causal_attn(self._context, piece.causal)
        try:
            self._process(batch)
        finally:
            lib.llama_set_causal_attn(self._context, True)

    def _process(self, batch: Any) -> None:
        assert not lib.llama_process(self._context, lib.LLAMA_PROCESS_TYPE_DECODE, batch)
        lib.llama_batch_ext_free(batch)

    def _logits(self) -> NDArray[np.float32]:
        pointer = lib.llama_get_logits_ith(self._context, -1)
        return np.array(pointer[: lib.llama_vocab_n_tokens(self._vocab)], np.float32)


def _size(chunks: Any) -> int:
    return int(mtmd.mtmd_input_chunks_size(chunks))
