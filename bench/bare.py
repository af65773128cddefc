"""A bare llama.cpp loop that runs a scenario's prompts, which shows the limit of this machine.

It tokenizes, decodes mixed batches and samples greedily, without a queue, another process or text.
As in inferd's engine, KV is split, logits ascend by sequence, and flash attention is as inferd has
chosen. It is a process of its own, so that its memory and threads are freed when another side runs.
`python -m bench.bare` reads JSON: [texts, tokens of each answer, slots, tokens of context a slot,
whether a shared beginning is computed once]. It writes [requested_s, [arrival_s, …], tokens of the
prompt, of these cached] for each text.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp

from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.loading.opening import WEIGHTS_UBATCH_SIZE_MAX
from inferd.backends.llama.threads import ComputeThreads

from .machine import MODEL, THREADS
from .own_setting import has_flash_attn

BATCH_SIZE = 512
WARM_UP_TOKENS = 8

Answer = tuple[float, list[float], int, int]
"""requested_s, arrivals_s, tokens of the prompt, and how many of them were cached."""


class Bare:
    """A model, a context and a batch, owned by the process's only thread."""

    def __init__(self, slots: int, ctx_size: int) -> None:
        self.ctx_size = ctx_size
        capture()
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(MODEL).encode(), llama_cpp.llama_model_default_params()
        )
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = slots * ctx_size, slots, False
        params.n_batch, params.n_ubatch = BATCH_SIZE, min(BATCH_SIZE, WEIGHTS_UBATCH_SIZE_MAX)
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if has_flash_attn()
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.n_outputs_max = slots
        params.n_threads = params.n_threads_batch = THREADS
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.threads = ComputeThreads(self.context)
        self.threads.attach_pool()
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH_SIZE, 0, 1)
        self.sampler = self._greedy_without_end()

    def _greedy_without_end(self) -> Any:
        """Return a greedy chain that never samples the end of a generation, as on each side."""
        n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        ends = [t for t in range(n_vocab) if llama_cpp.llama_vocab_is_eog(self.vocab, t)]
        bias = (llama_cpp.llama_logit_bias * len(ends))(*((t, float("-inf")) for t in ends))
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(
            chain, llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(ends), bias)
        )
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        return chain

    def tokenize(self, text: str) -> list[int]:
        """Return the prompt's tokens."""
        raw, tokens = text.encode(), (ctypes.c_int32 * self.ctx_size)()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), tokens, len(tokens), True, False)
        return list(tokens[:n])

    def run_prompts(self, texts: list[str], n_predict: int, *, share: bool) -> list[Answer]:
        """Run all prompts side by side until each has its tokens; return the tokens' times."""
        requested_s = time.perf_counter()
        pending = [self.tokenize(text) for text in texts]
        sizes = [len(tokens) for tokens in pending]
        done = [0] * len(texts)
        common = self._share(pending, done) if share else 0
        arrivals: list[list[float]] = [[] for _ in texts]
        while min(map(len, arrivals)) < n_predict:
            for sequence, index in self._step(pending, done):
                token = llama_cpp.llama_sampler_sample(self.sampler, self.context, index)
                arrivals[sequence].append(time.perf_counter())
                pending[sequence] = [token] if len(arrivals[sequence]) < n_predict else []
        for sequence in range(len(texts)):
            llama_cpp.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        cached = [0, *[common] * (len(texts) - 1)]
        return [(requested_s, *answer) for answer in zip(arrivals, sizes, cached, strict=True)]

    def _share(self, pending: list[list[int]], done: list[int]) -> int:
        """Compute the prompts' shared beginning once and copy it; return its number of tokens."""
        common = next(
            i for i, tokens in enumerate(zip(*pending, strict=False)) if len(set(tokens)) > 1
        )
        first = [pending[0][:common], *([] for _ in pending[1:])]
        while first[0]:
            self._step(first, done)
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self.context, state, size, 0)
        for sequence in range(1, len(pending)):
            read = llama_cpp.llama_state_seq_set_data(self.context, state, size, sequence)
            assert read == size, f"{read} of {size} bytes were restored"
        for sequence, tokens in enumerate(pending):
            pending[sequence], done[sequence] = tokens[common:], common
        return common

    def _step(self, pending: list[list[int]], done: list[int]) -> list[tuple[int, int]]:
        """Decode pending tokens up to the batch size. Return (sequence, index in the batch) of the
        tokens to sample from.
        """
        batch, count = self.batch, 0
        ends: list[tuple[int, int]] = []
        for sequence, tokens in enumerate(pending):
            take = tokens[: BATCH_SIZE - count]
            for offset, token in enumerate(take):
                batch.token[count], batch.pos[count] = token, done[sequence] + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = offset + 1 == len(tokens)
                count += 1
            done[sequence] += len(take)
            pending[sequence] = tokens[len(take) :]
            if take and not pending[sequence]:
                ends.append((sequence, count - 1))
        batch.n_tokens = count
        status = llama_cpp.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode returned {status}"
        return ends


def main() -> None:
    """Run the job on standard input and print its result."""
    texts, n_predict, slots, ctx_size, share = json.load(sys.stdin)
    bare = Bare(slots, ctx_size)
    bare.run_prompts(texts, WARM_UP_TOKENS, share=share)
    print(json.dumps(bare.run_prompts(texts, n_predict, share=share)))


if __name__ == "__main__":
    main()
