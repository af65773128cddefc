/* libwasi_nn_backend.so: the functions of wasi_nn_backend, with its types and error numbers.
 *
 * A backend has one current model: a later load replaces it and closes its sessions, and a failed one
 * changes nothing. Handles are never used again. Sessions with an id belong to their backend. */
#define _POSIX_C_SOURCE 200809L
#include "backend.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum wasi_nn_error {
    success = 0,
    invalid_argument = 1,
    invalid_encoding = 2,
    timeout = 3,
    runtime_error = 4,
    unsupported_operation = 5,
    too_large = 6,
    not_found = 7,
    security = 8,
    unknown = 9
} wasi_nn_error;

typedef struct tensor {
    void *dimensions; /* not read */
    int type;         /* not read */
    uint8_t *data;    /* ends with a zero byte */
} tensor;

enum {
    CONFIG_BYTES_MAX = 1 << 20,
    SESSIONS_DEFAULT = 100,
    SESSIONS_MAX = 10000,
    IDLE_MS_DEFAULT = 300000,
    IDLE_MS_MIN = 1000,
    IDLE_MS_MAX = 86400000
};

static const char DEFAULT_SESSION[] = "default_session";

EXPORT wasi_nn_error init_backend(void **ctx);
EXPORT wasi_nn_error init_backend_with_config(void **ctx, const char *config, uint32_t config_len);
EXPORT wasi_nn_error deinit_backend(void *ctx);
EXPORT wasi_nn_error load(void *ctx, void *builders, int encoding, int target, uint32_t *g);
EXPORT wasi_nn_error load_by_name(void *ctx, const char *filename, uint32_t filename_len, uint32_t *g);
EXPORT wasi_nn_error load_by_name_with_config(void *ctx, const char *filename, uint32_t filename_len,
                                              const char *config, uint32_t config_len, uint32_t *g);
EXPORT wasi_nn_error init_execution_context(void *ctx, uint32_t g, uint32_t *exec_ctx);
EXPORT wasi_nn_error init_execution_context_with_session_id(void *ctx, const char *session_id, uint32_t *exec_ctx);
EXPORT wasi_nn_error close_execution_context(void *ctx, uint32_t exec_ctx);
EXPORT wasi_nn_error run_inference(void *ctx, uint32_t exec_ctx, uint32_t index, tensor *input_tensor,
                                   uint8_t *output_tensor, uint32_t *output_tensor_size, const char *runtime_config,
                                   uint32_t config_len);
EXPORT wasi_nn_error set_input(void *ctx, uint32_t exec_ctx, uint32_t index, tensor *input_tensor);
EXPORT wasi_nn_error compute(void *ctx, uint32_t exec_ctx);
EXPORT wasi_nn_error get_output(void *ctx, uint32_t exec_ctx, uint32_t index, uint8_t *output_tensor,
                                uint32_t *output_tensor_size);

/* wasi_nn_backend has the order of wasi-nn's WIT, plus one, and WasmEdge's numbers from 100 on. */
static wasi_nn_error number_of(const inferd_error *error) {
    switch (error->number) {
    case INFERD_TIMEOUT: case INFERD_READER_TIMEOUT: return timeout;
    case INFERD_PERMISSION_DENIED: return security;
    case INFERD_LOAD_FAILED: return runtime_error;
    case INFERD_UNKNOWN: return unknown;
    default: break;
    }
    switch (error->wasi) {
    case 0: return success;
    case 1: return invalid_argument;
    case 2: return invalid_encoding;
    case 6: return unsupported_operation;
    case 7: return too_large;
    case 8: return not_found;
    default: return error->wasi >= 100 ? (wasi_nn_error)error->wasi : runtime_error;
    }
}

/* ---- The configuration ---- */

/* The length of a configuration; the length 0 of a text means that it ends with a zero byte. */
static size_t config_length(const char *config, uint32_t length) {
    return !config ? 0 : length ? strnlen(config, length) : strnlen(config, CONFIG_BYTES_MAX);
}

/* A number between the bounds; another or none is the default, as in wasi_nn_backend. */
static long find_number(const char *json, const char *key, long low, long high, long otherwise) {
    const char *text = backend_find_value(json, key);
    char *end = NULL;
    long number = text ? strtol(text, &end, 10) : otherwise;
    return end != text && number >= low && number <= high ? number : otherwise;
}

/* Read the limits of sessions. The daemon reads the memory policy; all else is its own configuration. */
static backend_limits read_limits(const char *json) {
    const char *cleanup = backend_find_value(json, "auto_cleanup");
    backend_limits limits = {.one_model = true, .evicts = !cleanup || strncmp(cleanup, "false", 5)};
    limits.contexts_max = (size_t)find_number(json, "max_sessions", 1, SESSIONS_MAX, SESSIONS_DEFAULT);
    if (limits.evicts)
        limits.idle_ms = find_number(json, "idle_timeout_ms", IDLE_MS_MIN, IDLE_MS_MAX, IDLE_MS_DEFAULT);
    return limits;
}

static wasi_nn_error begin(void **ctx, const char *config, uint32_t length) {
    inferd_error error;
    if (!ctx)
        return invalid_argument;
    char *json = strndup(config ? config : "", config_length(config, length));
    backend_limits limits = read_limits(json ? json : "");
    backend_begin(ctx, 1, &limits, json ? json : "", &error);
    free(json);
    return number_of(&error);
}

wasi_nn_error init_backend(void **ctx) { return begin(ctx, NULL, 0); }

wasi_nn_error init_backend_with_config(void **ctx, const char *config, uint32_t config_len) {
    return begin(ctx, config, config_len);
}

wasi_nn_error deinit_backend(void *ctx) {
    inferd_error error;
    backend_end(ctx, &error);
    return number_of(&error);
}

/* ---- Models ---- */

wasi_nn_error load(void *ctx, void *builders, int encoding, int target, uint32_t *g) {
    (void)ctx, (void)builders, (void)encoding, (void)target, (void)g;
    return unsupported_operation;
}

/* Load a model in place of the current one. A configuration that is not JSON is left out, as there. */
static wasi_nn_error load_model(void *ctx, const char *name, uint32_t length, const char *config, uint32_t config_len,
                                uint32_t *g) {
    inferd_error error;
    uint32_t graph = 0;
    size_t json_length = config_length(config, config_len);
    if (!name)
        return invalid_argument;
    if (backend_load(ctx, name, length, config, json_length, &graph, &error) == INFERD_INVALID_ENCODING)
        backend_load(ctx, name, length, NULL, 0, &graph, &error);
    if (g && !error.number)
        *g = graph;
    return number_of(&error);
}

wasi_nn_error load_by_name(void *ctx, const char *filename, uint32_t filename_len, uint32_t *g) {
    return load_model(ctx, filename, filename_len, NULL, 0, g);
}

wasi_nn_error load_by_name_with_config(void *ctx, const char *filename, uint32_t filename_len, const char *config,
                                       uint32_t config_len, uint32_t *g) {
    return load_model(ctx, filename, filename_len, config, config_len, g);
}

/* ---- Sessions ---- */

static wasi_nn_error open_session(void *ctx, const char *session_id, uint32_t *exec_ctx) {
    inferd_error error;
    if (!session_id || !exec_ctx)
        return invalid_argument;
    backend_open(ctx, 0, session_id, exec_ctx, &error);
    return number_of(&error);
}

/* The graph is ignored, and all callers share one session, as in wasi_nn_backend. */
wasi_nn_error init_execution_context(void *ctx, uint32_t g, uint32_t *exec_ctx) {
    (void)g;
    return open_session(ctx, DEFAULT_SESSION, exec_ctx);
}

wasi_nn_error init_execution_context_with_session_id(void *ctx, const char *session_id, uint32_t *exec_ctx) {
    return open_session(ctx, session_id, exec_ctx);
}

wasi_nn_error close_execution_context(void *ctx, uint32_t exec_ctx) {
    inferd_error error;
    backend_close(ctx, exec_ctx, &error);
    return number_of(&error);
}

/* ---- Turns ---- */

/* The end of a text output: a zero byte, which the size counts. `*size` is the size that is needed if the
 * buffer is too small, else the size that is used. */
static void end_text(const inferd_error *error, uint8_t *output, uint32_t *size, size_t length) {
    if (!error->number)
        output[length] = 0;
    if (!error->number || error->number == INFERD_TOO_LARGE)
        *size = (uint32_t)(length + 1);
}

/* Unlike in wasi_nn_backend, `*output_tensor_size` at the call is a bound: an answer that needs more is
 * too_large, and get_output returns it. */
wasi_nn_error run_inference(void *ctx, uint32_t exec_ctx, uint32_t index, tensor *input_tensor,
                            uint8_t *output_tensor, uint32_t *output_tensor_size, const char *runtime_config,
                            uint32_t config_len) {
    inferd_error error;
    size_t length = 0;
    (void)index;
    if (!input_tensor || !input_tensor->data || !output_tensor || !output_tensor_size || !*output_tensor_size)
        return invalid_argument;
    const char *text = (const char *)input_tensor->data;
    size_t size = *output_tensor_size - 1, json_length = config_length(runtime_config, config_len);
    int number = backend_run_inference(ctx, exec_ctx, text, strlen(text), runtime_config, json_length,
                                       output_tensor, size, &length, &error);
    if (number == INFERD_INVALID_ENCODING && json_length)
        backend_run_inference(ctx, exec_ctx, text, strlen(text), NULL, 0, output_tensor, size, &length,
                              &error);
    end_text(&error, output_tensor, output_tensor_size, length);
    return number_of(&error);
}

wasi_nn_error set_input(void *ctx, uint32_t exec_ctx, uint32_t index, tensor *input_tensor) {
    inferd_error error;
    if (!input_tensor || !input_tensor->data)
        return invalid_argument;
    const char *text = (const char *)input_tensor->data;
    backend_set_input(ctx, exec_ctx, index, text, strlen(text), &error);
    return number_of(&error);
}

wasi_nn_error compute(void *ctx, uint32_t exec_ctx) {
    inferd_error error;
    backend_compute(ctx, exec_ctx, &error);
    return number_of(&error);
}

wasi_nn_error get_output(void *ctx, uint32_t exec_ctx, uint32_t index, uint8_t *output_tensor,
                         uint32_t *output_tensor_size) {
    inferd_error error;
    size_t length = 0;
    if (!output_tensor || !output_tensor_size || !*output_tensor_size)
        return invalid_argument;
    backend_get_output(ctx, exec_ctx, index, output_tensor, *output_tensor_size - 1, &length, &error);
    end_text(&error, output_tensor, output_tensor_size, length);
    return number_of(&error);
}
