// The part of llama.cpp's log that tests/test-llama-archs.cpp names: only errors are printed.
#pragma once

#include "ggml.h"

#include <cstdio>

#define LOG_LEVEL_DEBUG 5
#define LOG_LEVEL_ERROR 1
#define LOG(...) ((void) 0)
#define LOG_INF(...) ((void) 0)
#define LOG_ERR(...) fprintf(stderr, __VA_ARGS__)

inline void common_log_set_verbosity_thold(int) {}
inline int common_log_get_verbosity(ggml_log_level level) {
    return level == GGML_LOG_LEVEL_ERROR ? LOG_LEVEL_ERROR : LOG_LEVEL_DEBUG;
}
inline void * common_log_main() { return nullptr; }
inline void common_log_flush(void *) {}
