/* libwasi_nn_llamacpp.so: the functions that WAMR's wasi-nn looks up in a backend, with its types and error
 * numbers. Types are those of WAMR's wasi_nn_types.h since tensor data has a size. */
#include "backend.h"

#define EXPORT __attribute__((visibility("default")))

/* WASI_NN errors of WAMR are WasmEdge's numbers: those of `inferd_error.wasi`. */
typedef int wasi_nn_error;
enum { invalid_argument = 1, unsupported_operation = 6 };

typedef struct tensor_data {
    uint8_t *buf;
    uint32_t size;
} tensor_data;

typedef struct tensor {
    void *dimensions;  /* hosts disagree on them; only the size of the data counts */
    uint32_t type;     /* its number for bytes differs between versions of WAMR */
    tensor_data data;
} tensor;

static const backend_limits LIMITS = {.contexts_max = 1000};

EXPORT wasi_nn_error init_backend(void **ctx);
EXPORT wasi_nn_error deinit_backend(void *ctx);
EXPORT wasi_nn_error load(void *ctx, void *builders, int encoding, int target, uint32_t *g);
EXPORT wasi_nn_error load_by_name(void *ctx, const char *name, uint32_t length, uint32_t *g);
EXPORT wasi_nn_error load_by_name_with_config(void *ctx, const char *name, uint32_t length, const char *config,
                                              uint32_t config_length, uint32_t *g);
EXPORT wasi_nn_error init_execution_context(void *ctx, uint32_t g, uint32_t *exec_ctx);
EXPORT wasi_nn_error set_input(void *ctx, uint32_t exec_ctx, uint32_t index, tensor *input);
EXPORT wasi_nn_error compute(void *ctx, uint32_t exec_ctx);
EXPORT wasi_nn_error get_output(void *ctx, uint32_t exec_ctx, uint32_t index, tensor_data *output,
                                uint32_t *output_size);

wasi_nn_error init_backend(void **ctx) {
    inferd_error error;
    if (!ctx)
        return invalid_argument;
    backend_begin(ctx, 0, &LIMITS, NULL, &error);
    return error.wasi;
}

wasi_nn_error deinit_backend(void *ctx) {
    inferd_error error;
    backend_end(ctx, &error);
    return error.wasi;
}

/* WAMR's own llama.cpp backend does not load bytes either. */
wasi_nn_error load(void *ctx, void *builders, int encoding, int target, uint32_t *g) {
    (void)ctx, (void)builders, (void)encoding, (void)target, (void)g;
    return unsupported_operation;
}

wasi_nn_error load_by_name_with_config(void *ctx, const char *name, uint32_t length, const char *config,
                                       uint32_t config_length, uint32_t *g) {
    inferd_error error;
    if (!name || !g)
        return invalid_argument;
    backend_load(ctx, name, length, config, config_length, g, &error);
    return error.wasi;
}

/* No exported function calls another: a host's function of the same name would be called instead. */
wasi_nn_error load_by_name(void *ctx, const char *name, uint32_t length, uint32_t *g) {
    inferd_error error;
    if (!name || !g)
        return invalid_argument;
    backend_load(ctx, name, length, NULL, 0, g, &error);
    return error.wasi;
}

wasi_nn_error init_execution_context(void *ctx, uint32_t g, uint32_t *exec_ctx) {
    inferd_error error;
    if (!exec_ctx)
        return invalid_argument;
    backend_open(ctx, g, NULL, exec_ctx, &error);
    return error.wasi;
}

wasi_nn_error set_input(void *ctx, uint32_t exec_ctx, uint32_t index, tensor *input) {
    inferd_error error;
    if (!input || (input->data.size && !input->data.buf))
        return invalid_argument;
    backend_set_input(ctx, exec_ctx, index, input->data.buf, input->data.size, &error);
    return error.wasi;
}

wasi_nn_error compute(void *ctx, uint32_t exec_ctx) {
    inferd_error error;
    backend_compute(ctx, exec_ctx, &error);
    return error.wasi;
}

/* With a buffer that is too small, `output_size` becomes the size that is needed. */
wasi_nn_error get_output(void *ctx, uint32_t exec_ctx, uint32_t index, tensor_data *output, uint32_t *output_size) {
    inferd_error error;
    size_t length = 0;
    if (!output || !output_size || (output->size && !output->buf))
        return invalid_argument;
    backend_get_output(ctx, exec_ctx, index, output->buf, output->size, &length, &error);
    *output_size = (uint32_t)length;
    return error.wasi;
}
