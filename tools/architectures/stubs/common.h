// The part of llama.cpp's common library that tests/test-llama-archs.cpp names. The engine is built
// without that library. Models are saved without a batch, so the batch here does nothing.
#pragma once

#include "llama.h"

struct common_batch {
    explicit common_batch(llama_context *) {}
    void add(llama_token, llama_pos, llama_seq_id, bool) {}
    void clear() {}
    llama_batch_ext * get() { return nullptr; }
};

inline void common_init() {}
