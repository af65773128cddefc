"""A bare llama.cpp context that computes the logits behind a difference, by batch shape.

It applies llama.cpp's own samplers to the logits. So the gap of two candidates is the one after
penalties, DRY and biases, which decided which of them was sampled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.threads import ComputeThreads

from .sides import THREADS

__all__ = ("CHAIN", "SHAPES", "Bare", "sizes_of")

CTX_SIZE = 1024
CACHED_ANSWERS_MAX = 8
SHAPES = ("steps", "whole", "ones", "all-but-1", "all-but-4", "halves")
"""Ways to split prompt and answer into batches. *steps* is the prompt, then token by token.
*all-but-N* splits the prompt N tokens before its end, as each side does for some models.
"""
DRY_BREAKERS = ("\n", ":", '"', "*")

Logits = NDArray[np.float32]
_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


def sizes_of(shape: str, prompt: int, answer: int) -> list[int]:
    """Return the batches' sizes for these numbers of prompt and answer tokens."""
    ones = [1] * answer
    if shape == "whole":
        return [prompt + answer]
    if shape == "ones":
        return [1] * (prompt + answer)
    first = {"steps": prompt, "all-but-1": prompt - 1, "all-but-4": prompt - 4}
    part = first.get(shape, prompt // 2)
    parts = [part, prompt - part] if 0 < part < prompt else [prompt]
    return parts + ones


class Bare:
    """A model and a context for one sequence, owned by the process's only thread."""

    def __init__(self, path: Path):
        capture()
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.vocab_size = int(lib.llama_vocab_n_tokens(self._vocab))
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = CTX_SIZE, 1, False
        params.n_batch, params.n_ubatch, params.swa_full = 512, 512, False
        params.n_threads = params.n_threads_batch = THREADS
        self._context = lib.llama_init_from_model(self._model, params)
        self._threads = ComputeThreads(self._context)
        self._threads.attach_pool()
        self._batch = lib.llama_batch_init(512, 0, 1)
        self._cache: dict[tuple[tuple[int, ...], ...], dict[str, Logits]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        self._threads.close()
        lib.llama_model_free(self._model)

    def tokenize(self, text: str, *, prompt: bool = True) -> list[int]:
        """Return a prompt's tokens, or those of a part of a text."""
        raw, tokens = text.encode(), (ctypes.c_int32 * CTX_SIZE)()
        count = lib.llama_tokenize(self._vocab, raw, len(raw), tokens, len(tokens), prompt, prompt)
        assert count >= 0, "a text of the corpus has too many tokens"
        return list(tokens[:count])

    def is_end(self, token: int) -> bool:
        """Return whether *token* ends a generation."""
        return bool(lib.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a generation."""
        return [token for token in range(self.vocab_size) if self.is_end(token)]

    def piece(self, token: int) -> str:
        """Return a token's text; for a special token, its name."""
        buffer = ctypes.create_string_buffer(256)
        size = lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(0, size)].decode("utf-8", "replace")

    def logits(self, tokens: Sequence[int], sizes: Sequence[int]) -> Logits:
        """Return the logits after *tokens*, decoded in batches of these sizes."""
        self._clear_memory()
        done = 0
        for size in sizes:
            self._decode(tokens[done : done + size], done)
            done += size
        assert done == len(tokens), f"{done} of {len(tokens)} tokens are in the batches"
        return self._last_logits()

    def logits_by_shape(self, prompt: Sequence[int], answer: Sequence[int]) -> Mapping[str, Logits]:
        """Return the logits after prompt and answer, by shape; the last few are cached."""
        key = (tuple(prompt), tuple(answer))
        if key not in self._cache:
            while len(self._cache) >= CACHED_ANSWERS_MAX:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = {
                shape: self.logits([*prompt, *answer], sizes_of(shape, len(prompt), len(answer)))
                for shape in SHAPES
            }
        return self._cache[key]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy answer to *prompt*."""
        self._clear_memory()
        self._decode(prompt, 0)
        answer = [int(self._last_logits().argmax())]
        while len(answer) < count:
            self._decode(answer[-1:], len(prompt) + len(answer) - 1)
            answer.append(int(self._last_logits().argmax()))
        return answer

    def _clear_memory(self) -> None:
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, -1, -1)

    def _last_logits(self) -> Logits:
        logits = lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).copy()

    def _decode(self, tokens: Sequence[int], begin: int) -> None:
        batch = self._batch
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, begin + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index + 1 == len(tokens)
        batch.n_tokens = len(tokens)
        status = lib.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"

    def adjusted_logits(
        self, logits: Logits, tokens: Sequence[int], request: Mapping[str, Any]
    ) -> Logits:
        """Return the logits after *tokens* with the penalties and biases of *request*."""
        ids, found = self._apply(logits, tokens, request, ("penalties", "dry"))
        adjusted = np.empty(len(logits), np.float32)
        adjusted[ids] = found
        return adjusted

    def sampled_token(
        self, logits: Logits, tokens: Sequence[int], request: Mapping[str, Any]
    ) -> int:
        """Return the most probable token after the whole chain of *request*."""
        ids, found = self._apply(logits, tokens, request, tuple(CHAIN))
        return int(ids[found.argmax()])

    def _apply(
        self,
        logits: Logits,
        tokens: Sequence[int],
        request: Mapping[str, Any],
        kinds: Sequence[str],
    ) -> tuple[NDArray[np.int32], Logits]:
        """Return the candidates left by the samplers of these kinds, and their logits."""
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        biases = self._biases(request)
        if biases:
            array = (lib.llama_logit_bias * len(biases))(*biases)
            sampler = lib.llama_sampler_init_logit_bias(self.vocab_size, len(biases), array)
            lib.llama_sampler_chain_add(chain, sampler)
        for name in request.get("samplers", CHAIN):
            if name in kinds:
                lib.llama_sampler_chain_add(chain, CHAIN[name](self, request))
        for token in tokens:
            lib.llama_sampler_accept(chain, token)
        data = np.zeros(len(logits), _CANDIDATE)
        data["id"], data["logit"] = np.arange(len(logits)), logits
        pointer = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
        candidates = lib.llama_token_data_array(pointer, len(data), -1, False)
        lib.llama_sampler_apply(chain, ctypes.byref(candidates))
        lib.llama_sampler_free(chain)
        remaining = data[: candidates.size]
        return remaining["id"], remaining["logit"]

    def _biases(self, request: Mapping[str, Any]) -> list[tuple[int, float]]:
        biases = [
            (token, float("-inf") if bias is False else float(bias))
            for text, bias in request.get("logit_bias", ())
            for token in self.tokenize(text, prompt=False)
        ]
        if request.get("ignore_eos"):
            biases += [(token, float("-inf")) for token in self.ends]
        return biases

    def penalties(self, request: Mapping[str, Any]) -> Any:
        """Return the sampler of the penalties."""
        return lib.llama_sampler_init_penalties(
            self.vocab_size,
            request.get("repeat_last_n", 64),
            request.get("repeat_penalty", 1.0),
            request.get("frequency_penalty", 0.0),
            request.get("presence_penalty", 0.0),
        )

    def dry(self, request: Mapping[str, Any]) -> Any:
        """Return the sampler of DRY."""
        breakers = (ctypes.c_char_p * len(DRY_BREAKERS))(*(b.encode() for b in DRY_BREAKERS))
        return lib.llama_sampler_init_dry(
            self._vocab,
            request.get("dry_multiplier", 0.0),
            request.get("dry_base", 1.75),
            request.get("dry_allowed_length", 2),
            request.get("dry_penalty_last_n", 64),
            breakers,
            len(breakers),
        )


Make = Callable[[Bare, Mapping[str, Any]], Any]
CHAIN: dict[str, Make] = {
    "penalties": Bare.penalties,
    "dry": Bare.dry,
    "top_n_sigma": lambda _, r: lib.llama_sampler_init_top_n_sigma(r.get("top_n_sigma", -1.0)),
    "top_k": lambda _, r: lib.llama_sampler_init_top_k(r.get("top_k", 40)),
    "typ_p": lambda _, r: lib.llama_sampler_init_typical(*_cut(r, "typical_p", 1.0)),
    "top_p": lambda _, r: lib.llama_sampler_init_top_p(*_cut(r, "top_p", 0.95)),
    "min_p": lambda _, r: lib.llama_sampler_init_min_p(*_cut(r, "min_p", 0.05)),
}
"""llama-server's chain with its defaults and without random samplers, as the temperature keeps only
the most probable token.
"""


def _cut(request: Mapping[str, Any], name: str, default: float) -> tuple[float, int]:
    return request.get(name, default), request.get("min_keep", 0)
